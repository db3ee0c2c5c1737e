"""Any optimizer of matrices, unmodified, as a method: SOAP and its relatives on shards.

The owner of a block gives the class a parameter of zeros, learning rate 1 and no decay; what the
class subtracts is the update. Gradients travel as they are; learning rate and decay are the
holders'. Blocks keep their orientation, and fused projections are blocks of their own. A block
without a finite gradient is left out of the class's step, so its state stays.

Whether a block is left out, and numbers in its state, are known to the host: a stack waits for the
device once, as factorizations do anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, override

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from megatron_muon.core.cost import TOGETHER
from megatron_muon.core.methods.candidate import Candidate, Leaf, seeded, values_by_slot
from megatron_muon.core.methods.method import UPDATES, BlockState, Method, Work
from megatron_muon.core.slices import BlockKind, BlockSlice

LEAST_FACTOR = 2.0**-51
"""Of blocks with a largest magnitude up to 2^50, about 1e15; larger ones count as not finite."""

_HOST = torch.device("cpu")


def shape_of(kind: BlockKind) -> tuple[int, int]:
    """Rows and columns of a block as its matrix has it."""
    return (kind.longer, kind.smaller) if kind.is_tall else (kind.smaller, kind.longer)


def _is_view(value: Tensor, stored: Tensor) -> bool:
    """True if a tensor has the memory and the order of elements of another."""
    return value.data_ptr() == stored.data_ptr() and value.stride() == stored.stride()


class OwnerMethod(Method):
    """Runs a class of optimizers on whole blocks.

    Args:
        candidate: the class with its arguments, as `rehearsal.approve` returns it.
        device: of stacks.
        keeps_on_host: state is in host memory between steps.
    """

    takes_momentum: ClassVar[bool] = False
    dtype = torch.float32

    def __init__(
        self,
        candidate: Candidate,
        device: torch.device = _HOST,
        *,
        keeps_on_host: bool = False,
    ) -> None:
        self.candidate = candidate
        self.device = device
        self.keeps_on_host = keeps_on_host
        self._is_random = candidate.trial.is_random
        self._optimizers: dict[tuple[int, int], Optimizer] = {}

    @override
    def cost(self, rows: int, cols: int, team: int = 1, steps: int = 0) -> int:
        return self.candidate.operations(rows, cols)

    @override
    def kind(self, block: BlockSlice) -> BlockKind:
        return block.kind(1.0)._replace(is_tall=block.is_tall)

    @override
    def together(self, kind: BlockKind) -> int:
        if self._is_random:
            return 1  # so that a block's random numbers do not depend on others
        most = TOGETHER["cpu" if self.device.type == "cpu" else "cuda"]
        return max(1, most // (kind.smaller * kind.longer))

    @override
    def work_bytes(self, kind: BlockKind, count: int, element_bytes: int) -> dict[str, int]:
        size = 4 * min(count, self.together(kind)) * kind.smaller * kind.longer
        return {"parameters": size, "gradients": size}

    @override
    def state_shapes(self, kind: BlockKind) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {UPDATES: ()}
        for leaf in self._leaves(kind):
            shapes[leaf.slot] = leaf.shape
        return shapes

    @override
    def state_device(self, slot: str, kind: BlockKind) -> torch.device:
        on_host = {leaf.slot for leaf in self._leaves(kind) if leaf.on_host}
        if self.keeps_on_host or slot == UPDATES or slot in on_host:
            return _HOST
        return self.device

    @override
    def zero_state(self, kind: BlockKind, slots: Sequence[BlockSlice]) -> BlockState:
        state = super().zero_state(kind, slots)
        if self.keeps_on_host and torch.empty(0, device=self.device).is_cuda:
            for slot, tensor in state.items():
                state[slot] = tensor.pin_memory()
        return state

    def _leaves(self, kind: BlockKind) -> Sequence[Leaf]:
        return self.candidate.state_of(shape_of(kind))[0]

    @property
    @override
    def products(self) -> str:
        return self.candidate.name

    @override
    def arithmetic(self) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = nullcontext()
        if self.device.type == "cpu":
            found = torch.compiler.set_stance("force_eager")
        elif self._is_random:
            from torch._inductor import config

            # compiled and eager code, which shapes choose between, draw the same numbers then
            found = config.patch(fallback_random=True)
        return found

    @override
    def run(
        self,
        stack: Tensor,
        kind: BlockKind,
        factors: Tensor,
        work: Work,
        *,
        state: BlockState | None = None,
        **_: Any,
    ) -> None:
        assert state is not None
        shape = len(stack), *shape_of(kind)
        blocks = stack.mT if kind.is_tall else stack
        parameters = work.take("parameters", shape, torch.float32).zero_()
        gradients = work.take("gradients", shape, torch.float32).copy_(blocks)
        # of larger gradients squares would overflow; NaN is not more than anything
        is_finite = (factors >= LEAST_FACTOR).view(-1).tolist()
        numbers = [number for number, is_updated in enumerate(is_finite) if is_updated]
        if numbers:
            self._step(parameters, gradients, numbers, kind, state)
        updates = parameters.neg_()
        sums = updates.sum(dim=(1, 2), keepdim=True)
        blocks.copy_(updates)
        is_lost = ~((factors >= LEAST_FACTOR) & sums.isfinite())
        stack.masked_fill_(is_lost, torch.nan)

    def _step(
        self,
        parameters: Tensor,
        gradients: Tensor,
        numbers: Sequence[int],
        kind: BlockKind,
        state: BlockState,
    ) -> None:
        """A step of the class on the blocks `numbers` of a stack, which it subtracts updates from."""
        members = []
        optimizer = self._optimizer_of(kind)
        optimizer.state.clear()
        for number in numbers:
            parameter = parameters[number]
            parameter.grad = gradients[number]
            members.append(parameter)
            if state[UPDATES][number]:
                optimizer.state[parameter] = self.read_state(kind, state, number)
        optimizer.param_groups[0]["params"] = members
        with self.random_numbers_of(state, numbers):
            optimizer.step()
        for number, parameter in zip(numbers, members, strict=True):
            self._write(kind, state, number, optimizer.state[parameter])
            state[UPDATES][number] += 1
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = []

    def _optimizer_of(self, kind: BlockKind) -> Optimizer:
        shape = shape_of(kind)
        if shape not in self._optimizers:
            parameter = torch.zeros(shape, dtype=torch.float32, device=self.device)
            self._optimizers[shape] = self.candidate.optimizer([parameter])
        return self._optimizers[shape]

    def read_state(self, kind: BlockKind, state: BlockState, number: int) -> Any:
        """The state of a block as the class has it; tensors are those of `state` if they can be."""
        leaves, tree = self.candidate.state_of(shape_of(kind))
        values: list[Any] = []
        for leaf in leaves:
            stored = state[leaf.slot][number]
            if isinstance(leaf.dtype, type):
                values.append(leaf.dtype(stored.item()))
            else:
                place = _HOST if leaf.on_host else self.device
                values.append(stored.to(place, leaf.dtype, non_blocking=True))
        return tree_unflatten(values, tree)

    def _write(self, kind: BlockKind, state: BlockState, number: int, found: Any) -> None:
        """Keep the state of a block after a step."""
        values = values_by_slot(found)
        memory = {state[slot].untyped_storage().data_ptr() for slot in values}
        for slot, value in values.items():
            if not isinstance(value, Tensor) or _is_view(value, state[slot][number]):
                continue
            # one that the class has moved to another slot, or transposed
            if value.untyped_storage().data_ptr() in memory:
                values[slot] = value.clone()
        for leaf in self._leaves(kind):
            stored = state[leaf.slot][number]
            value = values[leaf.slot]
            if not isinstance(value, Tensor):
                stored.fill_(value)
            elif not _is_view(value, stored):
                stored.copy_(value, non_blocking=True)

    def forget(self) -> None:
        """Make instances of the class anew; state of blocks stays."""
        self._optimizers.clear()

    def random_numbers_of(
        self, state: BlockState, numbers: Sequence[int]
    ) -> AbstractContextManager[None]:
        """The random numbers of a block's next update, the same on any rank; for classes that draw."""
        if not self._is_random:
            return nullcontext()
        (number,) = numbers
        block = state.slots[number]
        key = f"{block.matrix.name}/{block.block}/{int(state[UPDATES][number])}"
        return seeded(zlib.crc32(key.encode()), self.device)
