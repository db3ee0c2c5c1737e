"""The checks of `megatron-muon doctor --gpu`: on a GPU if there is one, and that each can fail."""

from __future__ import annotations

import json
import pwd
import socket

import pytest
import torch
import torch.distributed as dist

from megatron_muon import cli
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.errors import ExitStatus
from megatron_muon.fsdp import muon
from megatron_muon.offload.codecs import Codec
from megatron_muon.tools.doctor import gpu_report, private_names, step_checks
from megatron_muon.tools.doctor.gpu_checks import Context
from megatron_muon.tools.plan import estimate

CHECKS = step_checks.CHECKS
STACK = NewtonSchulz, "run"


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_passes():
    assert cli.main(["doctor", "--gpu"]) == ExitStatus.OK


@pytest.fixture
def context(tmp_path, monkeypatch):
    """A CPU with few small matrices on two simulated ranks, in a process as torchrun starts it."""
    for name, value in (("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        step_checks,
        "SHAPES",
        ((24, 40), (33, 7), (4, 10, 6)),
    )
    monkeypatch.setattr(step_checks, "SIMULATED", 2)
    step_checks.values.cache_clear()
    yield Context(torch.device("cpu"), tmp_path)
    step_checks.values.cache_clear()


def patched(monkeypatch, owner, name, after):
    """Have a call `after` with its result and arguments, and return the result of that."""
    right = getattr(owner, name)

    def wrong(*args, **options):
        return after(right(*args, **options), *args)

    monkeypatch.setattr(owner, name, wrong)


def larger(marks, _, stack, *rest):
    stack[-1].mul_(1.3)
    return marks


def nan_somewhere(weights, *_):
    """On a rank of several, the second weight is NaN."""
    if dist.is_initialized():
        weights[1] = weights[1] * torch.nan
    return weights


def elsewhere(work, output, *rest):
    """Received rows belong to another row."""
    output.copy_(output.roll(7))
    return work


SIMPLE, OFFLOADED = "owner", "momentum on the host"
CONTROLS = {
    "a slow device": (
        "machine",
        (Context, "seconds"),
        lambda seconds, *_: 1e6 * seconds,
        "copies reach",
    ),
    "one block of several": ("arithmetic", STACK, larger, "largest singular value"),
    "a wrong owner": (
        SIMPLE,
        (dist, "all_to_all_single"),
        elsewhere,
        "owner, from whole matrices: ",
    ),
    "NaN in one rank's weights": (
        SIMPLE,
        (step_checks, "trained"),
        nan_somewhere,
        "error nan",
    ),
    "nothing is offloaded": (
        OFFLOADED,
        (muon, "offload_run"),
        lambda *_: None,
        "nothing was offloaded",
    ),
    "a rounded record": (
        OFFLOADED,
        (Codec, "decode"),
        lambda out, *_: out.mul(1.001),
        "momentum on the host, from whole matrices: ",
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_faults_are_found(control, context, monkeypatch):
    name, where, after, text = CONTROLS[control]
    patched(monkeypatch, *where, after)
    if name in step_checks.VARIANTS:
        monkeypatch.setattr(step_checks, "VARIANTS", {name: step_checks.VARIANTS[name]})
        name = "steps"
    CHECKS[name](context)
    assert any(text in wrong for wrong in context.wrong), context.wrong


def test_a_checkpoint_that_is_not_read_is_found(context, monkeypatch):
    monkeypatch.setattr(step_checks, "load", lambda *_, **__: None)
    step_checks.checkpoint(context)
    assert any("other bits" in wrong for wrong in context.wrong), context.wrong


@pytest.mark.parametrize("name", ["arithmetic", "steps", "checkpoint"])
def test_sound_code_passes(name, context):
    CHECKS[name](context)
    assert context.wrong == []
    context.write_findings()  # it can be written
    if name == "steps":
        assert {*context.figures, "CUDA graph"} == step_checks.VARIANTS.keys()


def test_an_error_on_one_simulated_rank_is_named(context, monkeypatch):
    """The others, which wait for it, end; later variants are checked."""

    def failing(marks, *_):
        if dist.is_initialized() and dist.get_rank() == 1 and not failed:
            failed.append(True)
            raise ValueError("rank 1 is out of luck")
        return marks

    failed = []
    patched(monkeypatch, *STACK, failing)
    monkeypatch.setattr(step_checks, "VARIANTS", {SIMPLE: {}, "later": {}})
    step_checks.steps(context)
    assert context.wrong == ["owner: ValueError: rank 1 is out of luck"]
    assert "later" in context.figures


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--device cpu --only spee", "--only: spee is not a check; choose some of: machine "),
        ("--device cpu --json nowhere/report.json", "cannot write 'nowhere/report.json'"),
        ("--device cpu --only steps --write-profile my.yaml", "add it to --only"),
    ],
)
def test_mistakes_are_one_line(arguments, text, capsys):
    assert cli.main(["doctor", "--gpu", *arguments.split()]) == ExitStatus.USAGE
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_a_check_that_hangs_or_crashes_is_reported(tmp_path, monkeypatch):
    """One second is not enough to import torch. Faults that were noted before stay."""
    (tmp_path / "figures.0.json").write_text('{"figures": {}, "skipped": [], "wrong": ["a fault"]}')
    monkeypatch.setattr(gpu_report, "LIMIT_S", 1)
    late = gpu_report._run_check("machine", "cpu", tmp_path, 0)
    assert late["status"] == "failed"
    assert late["wrong"] == ["a fault", "stopped after 1 s; `log` shows where"]
    assert "most recent call first" in "\n".join(late["log"])

    monkeypatch.setattr(gpu_report, "LIMIT_S", 600)
    crashed = gpu_report._run_check("nothing", "cpu", tmp_path / "crash", 0)
    assert "KeyError: 'nothing'" in crashed["wrong"][0]


MODULE = "megatron_muon/tools/doctor/gpu_report.py"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'File "{gpu_report.__file__}", line 3', f'File "{MODULE}", line 3'),
        ("node-17.corp.example.com and adapter by ada", "NAME and adapter by NAME"),
        ("[10.12.3.4]:29500, torch 2.13.0", "[ADDRESS]:29500, torch 2.13.0"),
        ("--json /tmp/r.json in TFLOP/s, 1/2 of 8", "--json .../r.json in TFLOP/s, 1/2 of 8"),
    ],
)
def test_a_report_has_no_names_and_folders(text, shown):
    made = private_names.public({"ada": [text, 1.0]}, {"node-17", "ada"})
    assert made == {"ada": [shown, 1.0]}


def test_a_user_without_a_name_is_no_error(monkeypatch):
    """As in a container that runs under a number."""

    def unknown(uid):
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.corp.example.com")
    assert private_names.private_names() == {"node-17.corp.example.com", "node-17"}


def test_a_report_and_a_profile_for_plan(tmp_path, capsys):
    report, file = tmp_path / "report.json", tmp_path / "my.yaml"
    line = f"doctor --gpu --device cpu --only machine --json {report} --write-profile {file}"
    assert cli.main(line.split()) == ExitStatus.OK
    assert "all checks pass that can run here" in capsys.readouterr().out
    assert json.loads(report.read_text())["checks"]["machine"]["status"] == "ok"
    plan = f"plan --config configs/quickstart.yaml --world-size 4 --hardware {file}".split()
    assert cli.main(plan) == ExitStatus.OK
    assert "measured cpu" in capsys.readouterr().out
    file.write_text("name: half", "utf-8")
    assert cli.main(plan) == ExitStatus.USAGE
    assert "does not describe a machine" in capsys.readouterr().err


def test_a_machine_is_named_by_its_gpu():
    figures = {"ranks": 16, "nodes": 2, "all_to_all_gb_per_s": 40.0}
    figures |= dict.fromkeys(("bf16_tflops", "fp32_tflops", "memory_gb_per_s"), 10.0)
    for gpu, known in (("NVIDIA A100-SXM4-40GB", "a100-sxm"), ("L40S", "h100-sxm")):
        made = estimate.measured(figures | {"GPU": gpu})
        assert made.node_ranks == 8
        assert (made.network_gb_per_s, made.bf16_tflops) == (40.0, 10.0)
        assert made.node_gb_per_s == estimate.HARDWARE[known].node_gb_per_s
