"""AdaMuon's and NorMuon's state is there from the start; the table of parity compares their updates."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.case import Case
from tests.support.cases import ADAMUON, NORMUON
from tests.support.model import Trainer
from tests.support.pool import Pool


def forms(trainer: Trainer) -> dict[str, Any]:
    """Of every matrix: the parts of its state, their types, dtypes, whole shapes and the numbers that this rank has."""
    return {
        name: {
            slot: (type(value).__name__, value.dtype, tuple(value.shape), value._local_tensor.numel())
            for slot, value in state.items()
        }
        for name, state in trainer.states().items()
        if "momentum_buffer" in state
    }


def stepped(rank: int, world_size: int) -> Any:
    """In a worker: the form of both variants' state before a step and after it, and whole shapes."""
    found = []
    for settings in (ADAMUON, NORMUON):
        trainer = Trainer(Case(layers=1, ffn=47, heads=3, query_groups=1, optimizer=settings))
        before = forms(trainer)
        trainer.step()
        found.append((before, forms(trainer), trainer.shapes))
    return found


def test_state_is_there_from_the_start_also_for_empty_shards(ranks: Pool) -> None:
    """Ranks whose state differs in its keys hang when a checkpoint is saved: the slots never change, nor their form."""
    everyone = ranks(4, stepped)
    empty = 0
    for of_rank in everyone:
        for by_element, (before, after, shapes), (first, _, _) in zip((True, False), of_rank, everyone[0], strict=True):
            assert before == after
            assert before.keys() == first.keys()
            for name, slots in before.items():
                rows, cols = shapes[name]
                moments = (rows, cols) if by_element else (rows, 1) if rows >= cols else (1, cols)
                expected = {"momentum_buffer": (rows, cols), "moment2_buffer": moments}
                found = {slot: form[:3] for slot, form in slots.items()}
                assert found == {slot: ("DTensor", torch.float32, shape) for slot, shape in expected.items()}, name
                empty += slots["momentum_buffer"][3] == 0
    assert empty, "no shard was empty"
