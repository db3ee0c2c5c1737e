"""The rows of a step for tests of exchanges, matrix by matrix, without an optimizer; and a whole
matrix's update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from megatron_muon.core.cost import GRAM, STANDARD, Coefficients
from megatron_muon.core.layout import Matrix, RowSplit
from megatron_muon.core.methods import newton_schulz, symmetric
from megatron_muon.core.methods.method import Method, Work
from megatron_muon.core.methods.symmetric import SymmetricProducts
from megatron_muon.core.passes import Passes, copy_all, largest_magnitude, unit_factor
from megatron_muon.core.probe import Probe
from megatron_muon.core.slices import BlockKind, Team
from megatron_muon.core.teams import TeamGroup
from megatron_muon.core.wave import Chunk, Wave


def started(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks `(count, m, n)` as iterations take them: in `dtype`, the largest magnitude near 1."""
    return (blocks * unit_factor(largest_magnitude(blocks))).to(dtype)


def iterated(
    x: torch.Tensor, steps: Coefficients, runs: Sequence[int] | None = None
) -> torch.Tensor:
    """The standard iteration of a copy of `x`, or with `runs` the Gram iteration."""
    count, m, _ = x.shape
    small = count * m * m * x.itemsize
    sizes = dict.fromkeys(("r", "z", "q", "t"), small) | {"wide": x.nbytes}
    work = Work.allocated(sizes, x.device)
    products = SymmetricProducts(symmetric.products_on(x.device, x.dtype), work)
    remaining = iter(steps)
    parts = [list(itertools.islice(remaining, length)) for length in runs or (1,) * len(steps)]
    return newton_schulz.iterate(x.clone(), parts, GRAM if runs else STANDARD, products)


def run(
    method: Method, stack: torch.Tensor, kind: BlockKind, team: TeamGroup | None = None
) -> None:
    """Run a method on a finite stack with buffers of its own."""
    for part in stack.split(min(method.together(kind), len(stack))):
        work = Work.allocated(method.work_bytes(kind, len(part), part.itemsize), part.device)
        factors = unit_factor(largest_magnitude(part))
        if method.takes_levelled:
            part.mul_(factors.to(part.dtype))
        with method.arithmetic():
            updates = method.run(part, kind, factors, work, team=team)
        if updates is not None:
            part.copy_(updates)


def orthogonalized(
    method: Method, matrix: torch.Tensor, split: RowSplit | None = None
) -> torch.Tensor:
    """The scaled update of a whole matrix `(rows, cols)` fp32, zero where it is not finite."""
    described = Matrix("w", (matrix.shape[0], matrix.shape[1]), split=split)  # type: ignore[arg-type]
    update = matrix.clone()
    slots = Team((0,), ()).slices(0, described)
    for slot, block in zip(slots, described.split.views(update), strict=True):
        flat = block.reshape(slot.of)
        wide = flat.mT.contiguous() if slot.is_tall else flat.clone()
        run(method, wide[None], method.kind(slot))
        block.copy_((wide.mT if slot.is_tall else wide).view(block.shape))
    return update if update.isfinite().all() else torch.zeros_like(update)


class ByMatrix(Passes):
    """Passes between waves and rows that a test gives, without an optimizer.

    Args:
        rows: this rank's prepared rows `(rows, cols)` of a matrix, by index.
        apply: takes a matrix's index and this rank's rows of its update.

    Attributes:
        prepared, applied: indices of matrices, in order.
    """

    def __init__(
        self,
        rows: Callable[[int], torch.Tensor],
        apply: Callable[[int, torch.Tensor], None] = lambda _, __: None,
    ) -> None:
        self.prepared: list[int] = []
        self.applied: list[int] = []
        self._of_matrix, self._take = rows, apply
        self._normalizing = []
        self._levels = True

    def begin(self, probe: Probe) -> None:
        pass

    def end(self) -> None:
        pass

    def advance(self, wave: Wave) -> None:
        for chunk in wave.chunks:
            self._collect(chunk)
            copy_all(chunk.pack)
            chunk.prepared.fill_(torch.nan)

    def descend(self, wave: Wave) -> None:
        for chunk in wave.chunks:
            copy_all(chunk.unpack)
            self._hand_over(chunk)

    def _collect(self, chunk: Chunk) -> None:
        for held in chunk.rows:
            self.prepared.append(held.of)
            chunk.prepared[held.start : held.start + held.shard.numel].copy_(
                self._of_matrix(held.of).reshape(-1)
            )

    def _hand_over(self, chunk: Chunk) -> None:
        for held in chunk.rows:
            assert held.of in self.prepared
            assert held.of not in self.applied, "an update is applied twice"
            self.applied.append(held.of)
            update = chunk.updates[held.start : held.start + held.shard.numel]
            self._take(
                held.of,
                update.view(held.shard.rows, held.shard.cols).clone(),
            )
