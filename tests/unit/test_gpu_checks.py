"""The checks of `megatron-muon doctor --gpu`: on a GPU if there is one, and that each can fail."""

from __future__ import annotations

import json
import pwd
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_muon import cli
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.errors import ExitStatus
from megatron_muon.fsdp import muon
from megatron_muon.fsdp.muon import Muon
from megatron_muon.offload.codecs import Codec
from megatron_muon.tools.doctor import gpu_checks, gpu_report, private_names, step_checks
from megatron_muon.tools.doctor.gpu_checks import Context
from megatron_muon.tools.plan import estimate

CHECKS = step_checks.CHECKS
ON_CPU = ("doctor", "--gpu", "--device", "cpu")
CHOSEN = ("owner", "shared", "all-gather", "CUDA graph", "NorMuon", "teams", "int8 momentum")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_passes(name: str, tmp_path: Path) -> None:
    context = Context(torch.device("cuda", 0), tmp_path)
    torch.cuda.set_device(0)
    CHECKS[name].run(context)
    assert context.wrong == []


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """A CPU with few small matrices on two simulated ranks, in a process as torchrun starts it."""
    for name, value in (("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(step_checks, "SHAPES", ((24, 40), (33, 7), (4, 10, 6)))
    monkeypatch.setattr(step_checks, "SIMULATED", 2)
    variants = {name: step_checks.VARIANTS[name] for name in CHOSEN}
    monkeypatch.setattr(step_checks, "VARIANTS", variants)
    step_checks.values.cache_clear()
    yield Context(torch.device("cpu"), tmp_path)
    step_checks.values.cache_clear()


def patched(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: Callable[..., Any]
) -> None:
    """Have a call `after` with its result and arguments, and return the result of that."""
    right = getattr(owner, name)

    def wrong(*args: Any, **options: Any) -> Any:
        return after(right(*args, **options), *args)

    monkeypatch.setattr(owner, name, wrong)


def larger(marks: torch.Tensor, _: object, stack: torch.Tensor, *rest: Any) -> torch.Tensor:
    stack[-1].mul_(1.3)
    return marks


def nan_somewhere(weights: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    """On a rank of several, the second weight is NaN."""
    if dist.is_initialized():
        weights[1] = weights[1] * torch.nan
    return weights


def rounded(_: object, optimizer: Muon) -> None:
    """On a rank of several, the first weight after a step has bf16's digits."""
    if dist.is_initialized():
        with torch.no_grad():
            one: Any = optimizer.param_groups[0]["params"][0]
            local = getattr(one, "_local_tensor", one)
            local.copy_(local.bfloat16())


def elsewhere(work: Any, output: torch.Tensor, *rest: Any) -> Any:
    """Received rows belong to another row."""
    output.copy_(output.roll(7))
    return work


KEPT: list[torch.Tensor] = []
STACK = Orthogonalizer, "orthogonalize_stack"
CONTROLS: dict[str, tuple[str, tuple[Any, str], Callable[..., Any], str]] = {
    "a slow device": (
        "machine",
        (Context, "seconds"),
        lambda seconds, *_: 1e6 * seconds,
        "copies reach",
    ),
    "one block of several": ("arithmetic", STACK, larger, "largest singular value"),
    "fp32 that is bf16": (
        "arithmetic",
        (gpu_checks, "orthogonalized"),
        lambda made, *_: made.bfloat16(),
        "highest",
    ),
    "a rounded weight": ("exchange", (Muon, "step"), rounded, "from whole matrices"),
    "a wrong owner": (
        "exchange",
        (dist, "all_to_all_single"),
        elsewhere,
        "owner, from whole matrices: ",
    ),
    "NaN in one rank's weights": (
        "exchange",
        (step_checks, "trained"),
        nan_somewhere,
        "error nan",
    ),
    "nothing is offloaded": (
        "offload",
        (muon, "offload_run"),
        lambda *_: None,
        "nothing was offloaded",
    ),
    "a rounded record": (
        "offload",
        (Codec, "decode"),
        lambda out, *_: out.mul(1.0001),
        "momentum in host: ",
    ),
    "a leaked buffer": (
        "cost",
        (Muon, "step"),
        lambda *_: KEPT.append(torch.ones(2**20)),
        "MiB behind",
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_faults_are_found(control: str, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    name, where, after, text = CONTROLS[control]
    patched(monkeypatch, *where, after)
    for cases in (step_checks.VARIANTS, step_checks.OFFLOADED, step_checks.COSTED):
        for other in list(cases)[1:]:  # the first one is enough
            monkeypatch.delitem(cases, other)
    monkeypatch.setattr(step_checks, "_check_checkpoint", lambda *_: None)
    CHECKS[name].run(context)
    KEPT.clear()
    assert any(text in wrong for wrong in context.wrong), context.wrong


def test_a_checkpoint_that_is_not_read_is_found(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_checks, "load", lambda *_, **__: None)
    step_checks._check_checkpoint(context, "none", "cpu")
    assert any("other bits" in wrong for wrong in context.wrong), context.wrong


@pytest.mark.parametrize("name", ["machine", "arithmetic", "exchange", "offload", "cost"])
def test_sound_code_passes(name: str, context: Context) -> None:
    CHECKS[name].run(context)
    assert context.wrong == []
    context.keep()  # it can be written
    if name == "exchange":
        assert context.skipped == {"no GPU": ["CUDA graph"]}
        assert {*context.figures, "CUDA graph"} == step_checks.VARIANTS.keys()


def test_an_error_on_one_simulated_rank_is_named(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others, which wait for it, end; later variants are checked."""

    def failing(marks: Any, *_: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1 and not failed:
            failed.append(True)
            raise ValueError("rank 1 is out of luck")
        return marks

    failed: list[bool] = []
    patched(monkeypatch, *STACK, failing)
    step_checks.exchange(context)
    assert context.wrong == ["owner: ValueError: rank 1 is out of luck"]
    assert {"shared", "all-gather", "NorMuon", "teams"} <= context.figures.keys()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([*ON_CPU, "--only", "spee"], "--only: 'spee' is not a check; choose some of: machine "),
        ([*ON_CPU, "--report", "nowhere/report.md"], "cannot write 'nowhere/report.md'"),
        ([*ON_CPU, "--report", "report.json"], "must end in .md"),
        ([*ON_CPU, "--only", "cost", "--write-profile", "my.yaml"], "add it to --only"),
        (["doctor", "--report", "r.md"], "--report goes with --gpu"),
        (["doctor", "--gpu", "--json", "r"], "nor --json"),
        pytest.param(
            ["doctor", "--gpu"],
            "no GPU here: torch finds none; use a machine with one, or --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_check_that_hangs_or_crashes_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One second is not enough to import torch. The report names the place; later checks run."""
    report = tmp_path / "report.md"
    only = ("--only", "machine", "offload", "--limit", "1", "--report", str(report))
    assert cli.main([*ON_CPU, *only]) == ExitStatus.FAILURE
    printed = capsys.readouterr().out
    assert printed.count("too late ") == 2
    remedy = "repeat with --only machine --limit 240; if it stops at the same place, it hangs: "
    assert remedy in printed
    assert "out of time: machine, offload; " in printed.splitlines()[-1]
    assert "most recent call first" in report.read_text("utf-8")
    written = json.loads(report.with_suffix(".json").read_text("utf-8"))
    assert written["checks"]["machine"]["status"] == "too late"

    # a fault noted before the limit is more than a matter of time
    folder = tmp_path / "wrong"
    folder.mkdir()
    kept: dict[str, Any] = {"figures": {}, "skipped": {}, "wrong": ["a fault"], "now": "owner"}
    (folder / "figures.0.json").write_text(json.dumps(kept), "utf-8")
    late = gpu_report._run_check("machine", "cpu", folder, 0, 1)
    assert (late["status"], late["wrong"]) == ("failed", ["a fault", "stopped after 1 s, in owner"])

    crashed = gpu_report._run_check("nothing", "cpu", tmp_path / "crash", 0, 600)
    assert crashed["status"] == "failed"
    assert "KeyError: 'nothing'" in crashed["wrong"][0]


MODULE = "megatron_muon/tools/doctor/gpu_report.py"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('File "/home/ada/lib/x.py", line 3', 'File ".../x.py", line 3'),
        (f'File "{gpu_report.__file__}", line 3', f'File "{MODULE}", line 3'),
        (f'File "{torch.__file__}", line 3', 'File "torch/__init__.py", line 3'),
        ("log\nnode-17:12:12 [0] NCCL\n/home/ada/x.py", "log\nNAME:12:12 [0] NCCL\n.../x.py"),
        ("node-17.corp.example.com and adapter by ada", "NAME and adapter by NAME"),
        ("[10.12.3.4]:29500, torch 2.13.0", "[ADDRESS]:29500, torch 2.13.0"),
        ("--report /tmp/report.md", "--report .../report.md"),
        ("owner / AdamW in TFLOP/s, 1/2 of 8", "owner / AdamW in TFLOP/s, 1/2 of 8"),
    ],
)
def test_a_report_has_no_names_and_folders(text: str, shown: str) -> None:
    made = private_names.public({"ada": [text], "seconds": 1.0}, {"node-17", "ada"})
    assert made == {"ada": [shown], "seconds": 1.0}


def test_a_user_without_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number."""

    def unknown(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.corp.example.com")
    assert private_names.private_names() == {"node-17.corp.example.com", "node-17"}


def test_plan_reads_a_profile(
    context: Context, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    gpu_checks.machine(context)
    file.write_text(estimate.profile(context.figures), "utf-8")
    plan = ["plan", "--config", "configs/quickstart.yaml", "--world-size", "4", "--hardware"]
    assert cli.main([*plan, str(file)]) == ExitStatus.OK
    assert "measured cpu" in capsys.readouterr().out
    right = file.read_text("utf-8")
    other = tmp_path / "other.yaml"
    for more in ("bf16_tflops: abc", "node_ranks: -3", "processor: 1", "{"):
        other.write_text(right + more, "utf-8")
        assert cli.main([*plan, str(other)]) == ExitStatus.USAGE
        assert "does not describe a machine" in capsys.readouterr().err.splitlines()[-1]
    assert cli.main([*plan, str(tmp_path / "absent.yaml")]) == ExitStatus.USAGE


@pytest.mark.parametrize(
    ("gpu", "known"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm"),
        ("NVIDIA GB300", "gb300"),
        ("L40S", "h100-sxm"),
    ],
)
def test_a_machine_is_named_by_its_gpu(gpu: str, known: str) -> None:
    measured = {"GPU": gpu, "memory_gb": 40.0, "ranks": 16, "nodes": 2, "all_to_all_gb_per_s": 40.0}
    measured |= dict.fromkeys(("bf16_tflops", "fp32_tflops", "memory_gb_per_s"), 10.0)
    made = estimate.measured(measured)
    assert (made.memory_gb, made.node_ranks) == (40.0, 8)
    assert (made.network_gb_per_s, made.bf16_tflops) == (40.0, 10.0)
    assert made.node_gb_per_s == estimate.HARDWARE[known].node_gb_per_s
