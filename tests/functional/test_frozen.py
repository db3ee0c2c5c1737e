"""Frozen parameters: some, nearly all, all of one kind. Nothing hangs, nothing frozen moves, the rest is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.case import Case, batches
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.reference import Reference, is_matrix
from tests.support.wide import wide_but

STEPS = 3
FIRST_LAYER = Case(frozen=("layers.0", "word_embeddings"))
WHAT_TRAINS = {
    "all but a layer and the embedding": FIRST_LAYER,
    "one norm weight": Case(trainable=("final_layernorm.weight",)),
    "one matrix": Case(trainable=("layers.1.mlp.linear_fc2.weight",)),
    "matrices": Case(trainable=("linear_qkv.weight", "linear_proj.weight", "fc1.weight", "fc2.weight")),
    "all but matrices": Case(frozen=("linear_qkv.weight", "linear_proj.weight", "fc1.weight", "fc2.weight")),
}


def run(rank: int, world_size: int, *, cases: dict[str, Case]) -> Any:
    """In a worker: whole weights after given gradients, then whether a real step went through, for every case."""
    seen = {}
    for label, case in cases.items():
        trainer = Trainer(case)
        for _ in range(STEPS):
            assert trainer.step()[0]
        whole = trainer.whole()
        loss, (updated, _, _) = trainer.train(batches(1)[0], micro_batches=2)
        assert updated
        seen[label] = (whole, trainer.shapes, loss, set(trainer.whole_state("momentum_buffer")))
    return seen if rank == 0 else None


def everything_frozen(rank: int, world_size: int, *, strategy: str) -> str:
    """In a worker: what the factory says of a model in which nothing trains."""
    from megatron_muon.errors import UserError

    with pytest.raises(UserError) as error:
        Trainer(Case(strategy=strategy, layers=1, trainable=()))
    return str(error.value)


@pytest.mark.parametrize("strategy", wide_but(["optim_grads_params"], ["no_shard", "optim", "optim_grads_params"]))
def test_frozen_parameters(ranks: Pool, strategy: str) -> None:
    """Ranks whose parameters were all frozen left the others waiting in a collective."""
    cases = {label: case.but(strategy=strategy) for label, case in WHAT_TRAINS.items()}
    for label, (whole, shapes, loss, with_momentum) in ranks(2, run, cases=cases)[0].items():
        case = cases[label]
        reference = Reference(case, shapes)
        for _ in range(STEPS):
            reference.step()
        for name, expected in reference.whole().items():
            if name in whole:
                torch.testing.assert_close(whole[name], expected, rtol=0.0, atol=1e-6, msg=f"{label}: {name}")
        assert with_momentum == {n for n in shapes if is_matrix(case, n, shapes[n]) and case.trains(n)}, label
        assert loss < 10.0, label


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_everything_frozen_is_an_error(ranks: Pool, strategy: str) -> None:
    for message in ranks(2, everything_frozen, strategy=strategy):
        assert "no trainable parameter" in message
        assert "unfreeze" in message
