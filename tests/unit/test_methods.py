"""The interface of methods, with Newton-Schulz: magnitudes, blocks that are not finite, memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.core.cost import Iteration
from megatron_muon.core.methods.method import Work
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.passes import largest_magnitude, unit_factor
from megatron_muon.core.slices import BlockKind
from megatron_muon.core.teams import TeamGroup

DTYPES = (torch.float32, torch.bfloat16)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def kind_of(stack: torch.Tensor, ranks: tuple[int, ...] = ()) -> BlockKind:
    _, m, n = stack.shape
    return BlockKind(m, n * (len(ranks) or 1), 1.0, 0, ranks, n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude_shows_what_is_not_finite(dtype: torch.dtype) -> None:
    blocks = randn(5, 6, 7).clamp(-2.0, 2.0)
    for number, value in enumerate((-3.0, 4.0, math.nan, -math.inf, 1e-30)):
        blocks[number, 2, 3] = value
    blocks[4] = blocks[4].clamp(-1e-30, 1e-30)
    blocks = blocks.to(dtype)
    found = largest_magnitude(blocks)
    assert found.shape == (5, 1, 1)
    assert found.dtype == torch.float32
    expected = blocks.abs().float().amax(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
    assert (found < math.inf).flatten().tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_that_is_nan_makes_its_block_nan_and_no_other(
    dtype: torch.dtype, precision: str
) -> None:
    stack = randn(3, 8, 20).to(dtype)
    method = NewtonSchulz(Iteration(precision=precision))
    kind = kind_of(stack)
    work = Work.allocated(method.work_bytes(kind, 3, dtype.itemsize), stack.device)
    factors = unit_factor(largest_magnitude(stack))
    alone = stack.clone()
    alone = method.run(alone.mul_(factors.to(dtype)), kind, factors, work).clone()
    factors[1] = math.nan
    stack = method.run(stack.mul_(factors.to(dtype)), kind, factors, work)
    assert stack[1].isnan().all()
    assert torch.equal(stack[::2], alone[::2])


class _Made(TorchDispatchMode):
    """Records the sizes of tensors that own new memory."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.numel: list[int] = []
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(
        self,
        call: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = call(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if tensor.untyped_storage().data_ptr() not in self._known:
                self.numel.append(tensor.numel())
        return result


@pytest.mark.parametrize("ranks", [(), (0, 1)], ids=["alone", "team"])
@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_run_makes_nothing_as_large_as_a_gram_matrix(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    dtype: torch.dtype,
    precision: str,
    ranks: tuple[int, ...],
) -> None:
    """Buffers are counted by the plan; a team's sum in fp32 was a new tensor for each product."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)
    orthogonalize = NewtonSchulz(Iteration(precision=precision, method=method))
    stack = randn(4, 32, 48).to(dtype)
    kind = kind_of(stack, ranks)
    sizes = orthogonalize.work_bytes(kind, len(stack), dtype.itemsize)
    memory = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    group: Any = None
    team = TeamGroup(ranks, group) if ranks else None
    factors = unit_factor(largest_magnitude(stack))
    with _Made(stack, *memory.values()) as made:
        updates = orthogonalize.run(stack, kind, factors, Work(memory), team=team)
    assert made.numel
    assert max(made.numel) <= len(stack) * kind.smaller
    assert updates.isfinite().all()
