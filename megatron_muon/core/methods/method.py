"""Interface of a method: the computation on stacks of whole blocks, on the ranks that own them."""

from __future__ import annotations

import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from megatron_muon.core.layout import Matrix
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.slices import BlockKind, BlockSlice, Team
from megatron_muon.core.teams import TeamGroup

UPDATES = "update_count"
"""`OwnerMethod`'s slot for the number of a block's updates. At 0 the class has yet to make its state."""


class Work:
    """Buffers of a method; each view of one is made once.

    Args:
        buffers: flat, uint8, by the names and of the sizes of `Method.work_bytes`, or larger.
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = buffers
        self._views: dict[object, Tensor] = {}
        self._blocks: dict[int, Sequence[Tensor]] = {}

    @classmethod
    def allocated(
        cls,
        sizes: Mapping[str, int],
        device: torch.device,
    ) -> Work:
        """Buffers of their own memory."""
        buffers = {}
        for name, size in sizes.items():
            buffers[name] = torch.empty(size, dtype=torch.uint8, device=device)
        return cls(buffers)

    def with_buffer(self, name: str, memory: Tensor) -> Work:
        """The same buffers, but one in other memory, contiguous."""
        flat = memory.view(-1).view(torch.uint8)
        return Work({**self._buffers, name: flat})

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """The buffer `name` with this shape and dtype."""
        key = name, shape, dtype
        if key not in self._views:
            size = math.prod(shape) * dtype.itemsize
            view = self._buffers[name][:size].view(dtype).view(shape)
            self._views[key] = view
            if len(shape) == 3:
                self.keep(view)
        return self._views[key]

    def blocks(self, stack: Tensor) -> Sequence[Tensor]:
        """The blocks of a stack; those of a buffer, or of a kept stack, exist."""
        return self._blocks.get(id(stack)) or stack.unbind()

    def keep(self, stack: Tensor) -> None:
        """Make the blocks of a stack that lives as long as the buffers."""
        self._blocks[id(stack)] = stack.unbind()

    @functools.cached_property
    def one(self) -> Tensor:
        """`(1,)` fp32; a * one is added to bf16 in fp32, a Python number would be rounded first."""
        return torch.ones(1, dtype=torch.float32, device=self._buffers["r"].device)


class BlockState(dict[str, Tensor]):
    """State of a stack's blocks by slot name, `(count, ...)` fp32; `slots` are the blocks."""

    slots: Sequence[BlockSlice] = ()


class Method(ABC):
    """Turns a stack of whole blocks into their updates.

    Attributes:
        keeps_on_host: True if state is in host memory between steps.
        takes_momentum: True if `run` gets momentum, which holders keep; else gradients.
        serves_teams: True if several ranks may share a block.
        leaves_updates_in: the name of the buffer in which `run` may leave updates.
        takes_levelled: True if `run` gets stacks that have been multiplied by their factors.
        device: of momentum and stacks.
        dtype: of its arithmetic, which "auto" takes for wire and stacks.
    """

    takes_momentum: ClassVar[bool] = True
    serves_teams: ClassVar[bool] = False
    leaves_updates_in: ClassVar[str] = ""
    takes_levelled: ClassVar[bool] = False
    keeps_on_host = False
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def cost(
        self,
        rows: int,
        cols: int,
        team: int = 1,
        steps: int = 0,
    ) -> int:
        """Operations of a block of `(rows, cols)` on each rank of a team; `steps` are `Matrix.steps`."""

    def flops(self, matrix: Matrix) -> int:
        """Operations of a matrix, over its blocks, without a team."""
        return sum(self.cost(*block, steps=matrix.steps) for block in matrix.blocks)

    def scale(self, shape: tuple[int, int]) -> float:
        """Factor of the update of a block of `shape`, `BlockKind.scale`; 1 by default."""
        return 1.0

    def kind(self, block: BlockSlice) -> BlockKind:
        """The stack that a block belongs to; wide and transposed tall blocks share one by default."""
        return block.kind(self.scale(block.of))

    def row_scales(self, matrix: Matrix) -> torch.Tensor:
        """Factors of the rows of a matrix's update, `(rows, 1)` fp32, for rules that apply them."""
        return torch.ones(matrix.shape[0], 1, dtype=torch.float32)

    def work_bytes(
        self,
        kind: BlockKind,
        count: int,
        element_bytes: int,
    ) -> dict[str, int]:
        """Bytes of its buffers by name for a stack of `count` blocks of elements of `element_bytes`.

        None by default.
        """
        return {}

    def together(self, kind: BlockKind) -> int:
        """Number of blocks that it takes together."""
        return sys.maxsize

    def state_shapes(self, kind: BlockKind) -> Mapping[str, tuple[int, ...]]:
        """Shapes of a block's fp32 state by slot name; none by default.

        No rank of a team that cuts a block can have it. State is zero at first, and part of checkpoints.
        """
        return {}

    @property
    def has_state(self) -> bool:
        """True if it overrides `state_shapes`."""
        return type(self).state_shapes is not Method.state_shapes

    def zero_state(self, kind: BlockKind, slots: Sequence[BlockSlice]) -> BlockState:
        """The first state of a stack of these blocks."""
        state = BlockState()
        state.slots = slots
        for slot, shape in self.state_shapes(kind).items():
            state[slot] = torch.zeros(
                len(slots),
                *shape,
                dtype=torch.float32,
                device=self.state_device(slot, kind),
            )
        return state

    def state_device(self, slot: str, kind: BlockKind) -> torch.device:
        """Where a slot is kept; with the stacks by default."""
        return self.device

    def state_numels(self, matrix: Matrix) -> list[dict[str, int]]:
        """Elements of the state of each block of a matrix by slot name."""
        found = []
        for block in Team((0,), (0.0,)).slices(0, matrix):
            shapes = self.state_shapes(self.kind(block)) if self.has_state else {}
            found.append({slot: math.prod(shape) for slot, shape in shapes.items()})
        return found

    def state_bytes(self, rows: int, cols: int) -> int:
        """Bytes of the state of a block of `(rows, cols)`."""
        matrix = Matrix("", (rows, cols))
        return 4 * sum(sum(block.values()) for block in self.state_numels(matrix))

    def arithmetic(self) -> AbstractContextManager[None]:
        """Around the `run`s of a step: sets how the device forms products; nothing by default."""
        return nullcontext()

    @abstractmethod
    def run(
        self,
        stack: Tensor,
        kind: BlockKind,
        factors: Tensor,
        work: Work,
        *,
        state: BlockState | None = None,
        team: TeamGroup | None = None,
        probe: Probe = SILENT,
    ) -> Tensor | None:
        """Make scaled updates, NaN where a factor is NaN. Collective in a team.

        Within `arithmetic`.

        Args:
            stack: `(count, m, n)` fp32 or bf16 with m <= n, at most `together` blocks; a tall
                block is its transpose here. In a team, n are this rank's columns.
            factors: `(count, 1, 1)` fp32, the power of two that brings each block to a largest
                magnitude in [0.5, 1), or 1 if stacks are levelled and it is in [2^-40, 2^40]; NaN
                for a block of a matrix that is not finite.
            work: buffers of `work_bytes`.
            state: `(count, ...)` fp32 by slot name, as `state_shapes`, to be changed in place; that
                of a block with a NaN factor must stay.

        Returns:
            Updates `(count, m, n)`, in the buffer `leaves_updates_in`; None if they are in the
            stack's place.
        """

    @property
    def products(self) -> str:
        """What else decides bits, the same on all ranks, for the plan's digest; nothing by default."""
        return ""

    def warm_up(self, slots: Sequence[BlockSlice]) -> None:
        """Prepare for this rank's blocks before the first step, for instance by compiling."""
        return
