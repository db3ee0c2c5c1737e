"""The checks of `megatron-muon doctor --gpu`: on a GPU where there is one, and that each can fail."""

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
from megatron_muon.megatron import provenance
from megatron_muon.offload.codecs import Codec
from megatron_muon.tools.doctor import checks, gpu, steps
from megatron_muon.tools.doctor.checks import Context
from megatron_muon.tools.plan import estimate


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", steps.CHECKS)
def test_a_gpu_passes(name: str, tmp_path: Path) -> None:
    context = Context(torch.device("cuda", 0), tmp_path)
    torch.cuda.set_device(0)
    steps.CHECKS[name].run(context)
    assert context.wrong == []


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """On the processor, with few and small matrices on two threads, as torchrun starts a process
    alone.
    """
    for name, value in (("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(steps, "SHAPES", ((24, 40), (33, 7), (4, 10, 6)))
    monkeypatch.setattr(steps, "SIMULATED", 2)
    chosen = ("owner", "shared", "all-gather", "CUDA graph", "NorMuon", "teams", "int8 momentum")
    monkeypatch.setattr(steps, "VARIANTS", {name: steps.VARIANTS[name] for name in chosen})
    steps.values.cache_clear()
    yield Context(torch.device("cpu"), tmp_path)
    steps.values.cache_clear()


def patched(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: Callable[..., Any]
) -> None:
    """Have a method call `after` with its result and arguments, and return what that returns."""
    right = getattr(owner, name)

    def wrong(*args: Any, **options: Any) -> Any:
        return after(right(*args, **options), *args)

    monkeypatch.setattr(owner, name, wrong)


def larger(marks: torch.Tensor, _: Orthogonalizer, stack: torch.Tensor, *rest: Any) -> torch.Tensor:
    stack.mul_(1.3)
    return marks


def one_larger(
    marks: torch.Tensor, _: Orthogonalizer, stack: torch.Tensor, *rest: Any
) -> torch.Tensor:
    stack[-1].mul_(1.3)
    return marks


def nan_somewhere(weights: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    """On a rank of several, the second weight is NaN."""
    return [
        one * (torch.nan if number == 1 and dist.is_initialized() else 1)
        for number, one in enumerate(weights)
    ]


def rounded(_: object, optimizer: Muon) -> None:
    """On a rank of several, the first weight after a step has bf16's digits."""
    if dist.is_initialized():
        with torch.no_grad():
            one: Any = optimizer.param_groups[0]["params"][0]
            local = getattr(one, "_local_tensor", one)
            local.copy_(local.bfloat16())


def elsewhere(work: Any, output: torch.Tensor, *rest: Any) -> Any:
    """What arrives is for another row."""
    output.copy_(output.roll(7))
    return work


KEPT: list[torch.Tensor] = []

CONTROLS: dict[str, tuple[str, Any, str, Callable[..., Any], str]] = {
    "a device that is slow": (
        "machine",
        Context,
        "seconds",
        lambda seconds, *_: 1e6 * seconds,
        "copies reach",
    ),
    "updates too large": (
        "arithmetic",
        Orthogonalizer,
        "orthogonalize_stack",
        larger,
        "largest singular value",
    ),
    "a rounded weight": ("exchange", Muon, "step", rounded, "from whole matrices"),
    "a wrong owner": (
        "exchange",
        dist,
        "all_to_all_single",
        elsewhere,
        "owner, from whole matrices: ",
    ),
    "NaN in one rank's weights": ("exchange", steps, "trained", nan_somewhere, "error nan"),
    "one block of several": (
        "arithmetic",
        Orthogonalizer,
        "orthogonalize_stack",
        one_larger,
        "largest singular value",
    ),
    "fp32 that is bf16": (
        "arithmetic",
        checks,
        "orthogonalized",
        lambda made, *_: made.bfloat16(),
        "highest",
    ),
    "nothing is offloaded": (
        "offload",
        muon,
        "offload_run",
        lambda *_: None,
        "nothing was offloaded",
    ),
    "a rounded record": (
        "offload",
        Codec,
        "decode",
        lambda out, *_: out.mul(1.0001),
        "momentum in host: ",
    ),
    "a checkpoint that is not read": ("offload", steps, "load", lambda *_: None, "other bits"),
    "a leaked buffer": (
        "cost",
        Muon,
        "step",
        lambda *_: KEPT.append(torch.ones(2**20)),
        "MiB behind",
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_wrong_is_found(
    control: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, owner, attribute, after, text = CONTROLS[control]
    if attribute == "load":
        monkeypatch.setattr(owner, attribute, lambda *_, **__: None)
    else:
        patched(monkeypatch, owner, attribute, after)
    steps.CHECKS[name].run(context)
    assert any(text in wrong for wrong in context.wrong), context.wrong


@pytest.mark.parametrize(
    "name", [name for name in steps.CHECKS if name not in ("training", "stress")]
)
def test_what_is_right_passes(name: str, context: Context) -> None:
    steps.CHECKS[name].run(context)
    assert context.wrong == []
    context.keep()  # it can be written
    if name == "exchange":
        assert context.skipped == {"no GPU": ["CUDA graph"]}
        assert {*context.figures, "CUDA graph"} == steps.VARIANTS.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--gpu"]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU here" in line
    assert "--device cpu" in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "spee"], "--only: 'spee' is not a check; choose some of: machine "),
        (["--report", "nowhere/report.md"], "cannot write 'nowhere/report.md'"),
        (["--report", "report.json"], "give a name that ends in .md"),
        (["--only", "cost", "--write-profile", "my.yaml"], "add it to --only"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--device", "cpu", *arguments]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_arguments_of_the_gpu_go_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--report", "r.md"], "--report goes with --gpu"),
        (["--gpu", "--json", "r"], "nor --json"),
    ):
        assert cli.main(["doctor", *arguments]) == ExitStatus.USAGE
        assert text in capsys.readouterr().err


def test_a_check_that_hangs_or_crashes_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One second is not enough to import torch. The report has where it was, and the checks after
    it run.
    """
    report = tmp_path / "report.md"
    arguments = [
        "--device",
        "cpu",
        "--only",
        "machine",
        "offload",
        "--limit",
        "1",
        "--report",
        str(report),
    ]
    assert gpu.main(arguments) == ExitStatus.FAILURE
    printed = capsys.readouterr().out
    assert printed.count("too late ") == 2
    assert (
        "repeat with --only machine --limit 240; if it stops at the same place, it hangs: "
        in printed
    )
    assert "out of time: machine, offload; " in printed.splitlines()[-1]
    assert "most recent call first" in report.read_text("utf-8")
    assert (
        json.loads(report.with_suffix(".json").read_text("utf-8"))["checks"]["machine"]["status"]
        == "too late"
    )

    # one that has noted a fault before it ran out of time is no matter of time alone
    (tmp_path / "wrong").mkdir()
    kept = {"figures": {}, "skipped": {}, "wrong": ["a fault"], "now": "owner"}
    (tmp_path / "wrong" / "figures.0.json").write_text(json.dumps(kept), "utf-8")
    late = gpu._run_check("machine", "cpu", tmp_path / "wrong", 0, 1)
    assert (late["status"], late["wrong"]) == ("failed", ["a fault", "stopped after 1 s, in owner"])

    crashed = gpu._run_check("nothing", "cpu", tmp_path / "crash", 0, 60)
    assert crashed["status"] == "failed"
    assert "KeyError: 'nothing'" in crashed["wrong"][0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('File "/home/ada/lib/x.py", line 3', 'File ".../x.py", line 3'),
        (f'File "{gpu.__file__}", line 3', 'File "megatron_muon/tools/doctor/gpu.py", line 3'),
        (f'File "{torch.__file__}", line 3', 'File "torch/__init__.py", line 3'),
        (
            "log\nnode-17:12:12 [0] NCCL WARN\n/home/ada/x.py",
            "log\nNAME:12:12 [0] NCCL WARN\n.../x.py",
        ),
        ("node-17.corp.example.com and adapter by ada", "NAME and adapter by NAME"),
        ("[10.12.3.4]:29500, torch 2.13.0", "[ADDRESS]:29500, torch 2.13.0"),
        ("--report /tmp/report.md", "--report .../report.md"),
        ("owner / AdamW in TFLOP/s, 1/2 of 8", "owner / AdamW in TFLOP/s, 1/2 of 8"),
    ],
)
def test_a_report_has_no_names_and_folders(text: str, shown: str) -> None:
    made = provenance.public({"ada": [text], "seconds": 1.0}, {"node-17", "ada"})
    assert made == {"ada": [shown], "seconds": 1.0}


def test_a_user_without_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number."""

    def unknown(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.corp.example.com")
    assert provenance.private_names() == {"node-17.corp.example.com", "node-17"}


def test_plan_reads_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    assert (
        gpu.main(["--device", "cpu", "--only", "machine", "--write-profile", str(file)])
        == ExitStatus.OK
    )
    plan = ["plan", "--config", "configs/llama3-8b.yaml", "--world-size", "64", "--hardware"]
    capsys.readouterr()
    assert cli.main([*plan, str(file)]) == ExitStatus.OK
    assert "measured cpu" in capsys.readouterr().out
    assert cli.main([*plan, str(tmp_path / "other.yaml")]) == ExitStatus.USAGE
    assert "does not describe a machine" in capsys.readouterr().err
    right = file.read_text("utf-8")
    for wrong in (
        f"{right}bf16_tflops: abc",
        f"{right}node_ranks: -3",
        f"{right}processor: 1",
        "{",
        "bf16_tflops: 1",
    ):
        (tmp_path / "other.yaml").write_text(wrong, "utf-8")
        assert cli.main([*plan, str(tmp_path / "other.yaml")]) == ExitStatus.USAGE
        assert "does not describe a machine" in capsys.readouterr().err.splitlines()[-1]


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
    assert (made.memory_gb, made.node_ranks, made.network_gb_per_s, made.bf16_tflops) == (
        40.0,
        8,
        40.0,
        10.0,
    )
    assert made.node_gb_per_s == estimate.HARDWARE[known].node_gb_per_s


def test_an_error_on_one_of_the_simulated_ranks_is_named(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others, which wait for it, end; what comes after is checked."""

    def failing(marks: Any, *_: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1 and not failed:
            failed.append(True)
            raise ValueError("rank 1 is out of luck")
        return marks

    failed: list[bool] = []
    patched(monkeypatch, Orthogonalizer, "orthogonalize_stack", failing)
    steps.exchange(context)
    assert context.wrong == ["owner: ValueError: rank 1 is out of luck"]
    assert {"shared", "all-gather", "NorMuon", "teams"} <= context.figures.keys()
