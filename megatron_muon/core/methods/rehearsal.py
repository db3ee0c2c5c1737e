"""A rehearsal of `OwnerMethod` with a class, on small blocks, before the class is used."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_muon.core.layout import Matrix
from megatron_muon.core.methods.candidate import Candidate, alone, random_gradient, refusal
from megatron_muon.core.methods.method import UPDATES, BlockState, Work
from megatron_muon.core.methods.owner import OwnerMethod
from megatron_muon.core.slices import BlockSlice, Team

_SHAPE = (4, 4)
_STEPS = 4
_RATE = 0.5
"""Learning rate of the class alone; the method's is 1."""

_SMALL = 1e-6
"""Size of gradients with which rounding stays small: SOAP normalizes rounding of larger ones to 1,
so that blocks in one stack, which round otherwise, get other updates."""


def approve(candidate: Candidate) -> Candidate:
    """Try a class and rehearse the method with it; return it.

    Raises:
        SettingError: the class cannot run on owners; see `Trial`. Or updates of blocks differ from
            those of the class on each block alone, with one instance and another learning rate.
    """
    if not _rehearse(OwnerMethod(candidate), 1.0, together=1):
        how = "with new instances, another learning rate, or parameters that change in place"
        raise refusal(candidate.name, f"gives other updates {how}")
    if not _rehearse(OwnerMethod(candidate), _SMALL, together=2):
        raise refusal(candidate.name, "gives other updates if it steps several blocks")
    return candidate


def _rehearse(method: OwnerMethod, scale: float, *, together: int) -> bool:
    """True if the updates of two blocks, so many at a time, are those of the class alone."""
    slots = []
    for number in range(2):
        slots += Team((0,), (0.0,)).slices(number, Matrix(f"trial {number}", _SHAPE))
    together = min(together, method.together(method.kind(slots[0])))
    is_same = True
    with alone():
        for first in range(0, 2, together):
            part = slots[first : first + together]
            found = _updates(method, part, scale)
            for one, slot in zip(found, part, strict=True):
                other = _alone(method, slot, scale)
                is_same &= bool((one - other).norm() <= 1e-3 * one.norm())
    return is_same


def _gradient(slot: BlockSlice, step: int, scale: float) -> Tensor:
    return scale * random_gradient(_SHAPE, 10 * step + slot.index)


def _updates(method: OwnerMethod, slots: list[BlockSlice], scale: float) -> Tensor:
    """Sums of the updates of blocks; instances of the class are replaced on the way."""
    kind = method.kind(slots[0])
    state = method.zero_state(kind, slots)
    work = Work.allocated(method.work_bytes(kind, len(slots), 4), method.device)
    total = torch.zeros(len(slots), *_SHAPE, dtype=torch.float32)
    for step in range(_STEPS):
        stack = torch.stack([_gradient(slot, step, scale) for slot in slots])
        method.run(stack, kind, torch.ones(len(slots), 1, 1), work, state=state)
        method.forget()
        total += stack
    return total


def _alone(method: OwnerMethod, slot: BlockSlice, scale: float) -> Tensor:
    """Sum of the updates of a block by one instance of the class."""
    block = torch.zeros(_SHAPE, dtype=torch.float32)
    optimizer = method.candidate.optimizer([block], _RATE)
    state = BlockState({UPDATES: torch.zeros(1)})
    state.slots = [slot]
    for step in range(_STEPS):
        block.grad = _gradient(slot, step, scale)
        with method.random_numbers_of(state, [0]):
            optimizer.step()
        state[UPDATES] += 1
    return block / -_RATE
