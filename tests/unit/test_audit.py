"""Audits judge a step of a whole matrix by its precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.memory import peak_extra_bytes
from megatron_muon.core.cost import Iteration
from megatron_muon.core.layout import Matrix, RowSplit, Shard, Shards
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.passes import DECOUPLED
from megatron_muon.fsdp.whole_step import Subject, WholeStep

GROUP = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
SPLIT = RowSplit(2, (8, 4))


def subject_of(rows: int, cols: int, **split: Any) -> Subject:
    half = rows // 2
    shards = Shards([Shard(0, 0, half, 0, cols), Shard(1, half, rows - half, 0, cols)])
    matrix = Matrix("layers.0.weight", (rows, cols), shards, **split)
    device = torch.device("cpu")
    return Subject(0, 5, matrix, GROUP, [], device, torch.float32, ranks=(0, 1))


def tensors_of(subject: Subject, rank: int) -> dict[str, torch.Tensor]:
    """Gradient and momentum of this rank, weights of a usual size."""
    rows, cols = subject.matrix.shape
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return {
        "weight": 0.02 * normal(rows, cols),
        "gradient": normal(rows, rank) @ normal(rank, cols),
        "momentum_buffer": normal(rows, rank) @ normal(rank, cols),
    }


def judge_of(precision: str, **options: Any) -> WholeStep:
    given = {"nesterov": True, "decay": DECOUPLED, "half": precision == "medium"}
    method = NewtonSchulz(Iteration(precision=precision))
    return WholeStep(method, [], **{**given, "rounds": False, **options})


def split_findings(*given: Any) -> tuple[list[str], list[str]]:
    """What a comparison found right, and its faults."""
    findings = judge_of(given[0]).compare(*given[1:])
    right = [finding.text for finding in findings if not finding.is_fault]
    return right, [finding.text for finding in findings if finding.is_fault]


@pytest.mark.parametrize("rank", [1, 3, 60])
@pytest.mark.parametrize("split", [{}, {"split": SPLIT}])
def test_a_correct_step_has_no_fault_and_a_lost_row_is_named(rank: int, split: Any) -> None:
    """Momentum of low rank is what a first batch gives."""
    subject = subject_of(24, 40, **split)
    before = tensors_of(subject, rank)
    after = judge_of("highest")._step(subject, before)
    found, faults = split_findings("highest", subject, before, after)
    assert not faults
    assert "momentum exact" in found
    after["weight"][17] = before["weight"][17]
    _, (fault,) = split_findings("highest", subject, before, after)
    assert fault.endswith("row 17 of rank 1")
    if rank > 1:  # of rank 1 a row may be smaller than the bound of bf16
        _, (fault,) = split_findings("medium", subject, before, after)
        assert fault.endswith("row 17 of rank 1")


@pytest.mark.parametrize("rank", [1, 3, 60])
def test_an_iteration_in_bf16_is_within_its_bound(rank: int) -> None:
    """Where momentum has nothing but rounding, updates in bf16 differ by more than their size."""
    subject = subject_of(24, 40)
    before = tensors_of(subject, rank)
    half = judge_of("medium")
    rounded = {slot: tensor.bfloat16().float() for slot, tensor in before.items()}
    rounded["weight"] = before["weight"]
    after = half._step(subject, rounded)
    after["momentum_buffer"] = half._step(subject, before)["momentum_buffer"]
    _, faults = split_findings("medium", subject, before, after)
    assert not faults
    if rank < 60:
        exact = half._step(subject, before)["weight"] - before["weight"]
        assert (after["weight"] - before["weight"] - exact).norm() > 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda before, after: after["weight"].sub_(before["weight"], alpha=0.1 * 0.02),
            "weights decay by 0.2 ",
        ),
        (lambda before, after: after["weight"].lerp_(before["weight"], 0.1), "update differs by "),
        (lambda before, after: after["momentum_buffer"].mul_(1.0 + 1e-5), "momentum differs by "),
        (lambda before, after: before["gradient"].fill_(math.nan), "it moved, but "),
    ],
)
def test_what_differs_is_said(change: Any, text: str) -> None:
    subject = subject_of(24, 40)
    before = tensors_of(subject, 60)
    after = judge_of("highest")._step(subject, before)
    change(before, after)
    _, faults = split_findings("highest", subject, before, after)
    assert any(fault.startswith(text) for fault in faults), faults


@pytest.mark.parametrize(("rows", "cols"), [(128, 128), (64, 512), (512, 64)])
def test_a_comparison_holds_ten_copies_of_the_matrix(rows: int, cols: int) -> None:
    """On its device; those that it is given are on the host."""
    subject = subject_of(rows, cols)
    before = tensors_of(subject, rows)
    judge = judge_of("highest")
    after = judge._step(subject, before)
    held = peak_extra_bytes(lambda: judge.compare(subject, before, after), torch.device("cpu"))
    assert held < 11.0 * 4.0 * rows * cols


def test_an_update_of_another_size_is_not_taken_for_decay() -> None:
    """Young weights are sums of updates like the last one, and rounding changes their size."""
    subject = subject_of(256, 256)
    before = tensors_of(subject, 256)
    judge = judge_of("medium")
    moved = judge._step(subject, before)["weight"] - before["weight"]
    before["weight"].add_(moved)
    after = judge._step(subject, before)
    after["weight"].lerp_(before["weight"], 0.02)
    _, faults = split_findings("medium", subject, before, after)
    assert not faults
    after["weight"].sub_(before["weight"], alpha=0.1 * 0.02)
    _, faults = split_findings("medium", subject, before, after)
    assert any("weights decay by 0.2 " in fault for fault in faults), faults
