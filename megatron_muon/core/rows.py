"""This rank's rows of matrices, as parameters have them and as views of a wave's flat tensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.core.wave import Chunk


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of `tensor` that this rank holds, without a copy; of a stack of experts one expert below the other."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.view(local.shape[:-1].numel(), local.shape[-1]) if local.ndim == 3 else local


def sharded_like(other: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """`elements`, of the shape of this rank's rows, as a tensor that is sharded as `other` is, wherever they lie."""
    if not isinstance(other, DTensor):
        return elements.view(other.shape)
    return DTensor(elements.view(other._local_tensor.shape), other._spec, requires_grad=False)


class Rows:
    """This rank's rows of a chunk: matrices by index, and views `(rows, cols)` that exist since construction."""

    def __init__(self, chunk: Chunk, *, has_momentum: bool) -> None:
        device = chunk.prepared.device
        self.indices = [held.of for held in chunk.rows]
        self.prepared, self.updates = (self._views(chunk, flat) for flat in (chunk.prepared, chunk.updates))
        self.flat_momentum = torch.zeros(chunk.numel if has_momentum else 0, dtype=torch.float32, device=device)
        self.momentum = self._views(chunk, self.flat_momentum) if has_momentum else []
        self.starts = [*(held.start for held in chunk.rows), chunk.numel]
        self.firsts, self.sizes, self.index = (
            torch.tensor(numbers, dtype=torch.int64, device=device)
            for numbers in (self.starts[:-1], [held.shard.numel for held in chunk.rows], self.indices)
        )

    @staticmethod
    def _views(chunk: Chunk, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[held.start : held.start + held.shard.numel].view(held.shard.rows, held.shard.cols)
            for held in chunk.rows
        ]
