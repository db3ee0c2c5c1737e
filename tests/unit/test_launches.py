"""How many kernels an operation is, as CUDA's fast path for lists takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.tools.rehearse.recorder import launches


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += launches(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels(run: Any) -> int:
    with _Counting() as counting:
        run()
    return counting.kernels


@pytest.mark.parametrize(
    ("count", "elements", "expected"), [(64, 10, 1), (65, 10, 2), (3, 65_536 * 320, 3), (2, 65_536 * 161, 2)]
)
def test_lists_are_launched_64_tensors_or_320_chunks_at_a_time(count: int, elements: int, expected: int) -> None:
    ones, others = ([on_meta(elements) for _ in range(count)] for _ in range(2))
    assert kernels(lambda: torch._foreach_add_(ones, others)) == expected


def test_a_list_that_the_fast_path_does_not_take_is_a_launch_for_each_tensor() -> None:
    square = [on_meta(4, 4) for _ in range(5)]
    assert kernels(lambda: torch._foreach_add_(square, [one.mT for one in square])) == 5
    assert kernels(lambda: torch._foreach_add_(square, [on_meta(4, 4, dtype=torch.bfloat16) for _ in square])) == 5
    assert kernels(lambda: torch._foreach_copy_(square, [on_meta(4, 4, dtype=torch.bfloat16) for _ in square])) == 1
    rows = [on_meta(8, 8)[:, :4] for _ in range(5)]
    assert kernels(lambda: torch._foreach_copy_(rows, [on_meta(8, 8)[:, :4] for _ in range(5)])) == 5


def test_views_and_empty_tensors_are_none() -> None:
    one = on_meta(4, 4)
    assert kernels(lambda: (one.mT, one[0], one.new_empty(3), one.view(-1).unsqueeze(0))) == 0
    assert kernels(lambda: one.mul_(2.0)) == 1
    stack, out = on_meta(2, 4, 4), on_meta(2, 4, 4)
    assert kernels(lambda: torch.baddbmm(stack, stack, stack, out=out)) == 2
