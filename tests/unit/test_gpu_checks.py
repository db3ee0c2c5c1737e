"""The checks of `benchmarks.gpu`: on a GPU where there is one, and that they can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_checks import Context, arithmetic
from benchmarks.gpu_runs import CHECKS
from megatron_muon.core.orthogonalize import Orthogonalizer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_passes(name: str, tmp_path: Path) -> None:
    context = Context(torch.device("cuda", 0), tmp_path)
    CHECKS[name].run(context)
    assert context.wrong == []


def test_arithmetic_that_is_off_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(torch.device("cpu"), tmp_path)
    arithmetic(context)
    assert context.wrong == []
    right = Orthogonalizer.orthogonalize_stack

    def larger(self: Orthogonalizer, stack: torch.Tensor, *args: object, **settings: object) -> None:
        right(self, stack, *args, **settings)  # type: ignore[arg-type]
        stack.mul_(1.3)

    monkeypatch.setattr(Orthogonalizer, "orthogonalize_stack", larger)
    arithmetic(context)
    assert any("largest singular value" in text for text in context.wrong)
    assert any("errors" in text for text in context.wrong)
