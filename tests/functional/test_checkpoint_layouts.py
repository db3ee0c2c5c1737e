"""Checkpoints of every parallel layout: what one rank saved is loaded, a resumed run is the
uninterrupted one, and one rank loads what the layout saved, to the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.functional.test_checkpoints import (
    DIVISIBLE,
    EXACT,
    FULL,
    SWIGLU,
    differences,
    saved,
    strategy,
    warnings,
)
from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings

TP = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TP, "--sequence-parallel")
HSDP = ("--num-distributed-optimizer-instances", "2")
OUTER = ("--outer-dp-sharding-strategy", "optim")
ETP1, ETP2 = (("--expert-tensor-parallel-size", size) for size in ("1", "2"))
EP2 = ("--expert-model-parallel-size", "2")
EXPERTS = (
    *SWIGLU,
    *cli.words("--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"),
)
ALL_STATE = cli.words("--muon-offload cpu --muon-offload-state all")
MODELS = {
    "dense": SWIGLU,
    "experts": EXPERTS,
    "hyperball": (*SWIGLU, *cli.HYPERBALL),
    "experts, cautious": (*EXPERTS, *cli.CAUTIOUS),
    "all state": (*SWIGLU, *ALL_STATE),
    "experts, all state": (*EXPERTS, *ALL_STATE),
    "clipped": (*SWIGLU, *cli.words("--add-qkv-bias --qk-clip --qk-clip-threshold 0.05")),
}
LAYOUTS = [
    ("clipped", "TP 2 x DP 2, sequence parallel", "optim_grads_params", SEQUENCE),
    ("dense", "HSDP 2 x DP 2", "optim_grads_params, outer optim", (*HSDP, *OUTER)),
    ("dense", "DP 4, shared", "no_shard", ("--muon-share-replicated",)),
    ("hyperball", "HSDP 2 x TP 2", "optim", (*HSDP, *TP)),
    ("all state", "HSDP 2 x DP 2", "optim_grads", HSDP),
    ("experts, cautious", "EP 2 x HSDP 2", "optim_grads_params", (*EP2, *HSDP)),
    ("experts, all state", "EP 2 x TP 2, sequence parallel", "optim", (*EP2, *SEQUENCE, *ETP1)),
    ("experts", "expert TP 2, dense TP 2", "optim_grads", (*SEQUENCE, *ETP2)),
]


@pytest.fixture(scope="module")
def trainings(
    ranks: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trainings, Callable[[str], cli.Run]]:
    """Runs of four steps, and a model's on one rank, which saved the second and the fourth: in
    `one-MODEL`.
    """
    folder = tmp_path_factory.mktemp("layouts")
    corpus = cli.make_corpus(tmp_path_factory.mktemp("corpus"))
    steps = ("--train-iters", "4")
    sizes = (*DIVISIBLE, "--make-vocab-size-divisible-by", "132")
    training = Trainings(
        ranks,
        folder,
        (*cli.TINY, *corpus, *steps, *sizes, *EXACT),
        batch=4,
    )

    @functools.cache
    def one(model: str) -> cli.Run:
        save = ("--save", f"one-{model}", "--save-interval", "2")
        return training(*FULL, *MODELS[model], *save, ranks=1).checked()

    return training, one


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "layout", "sharding", "flags"),
    LAYOUTS,
    ids=[f"{model}, {layout}, {sharding}" for model, layout, sharding, _ in LAYOUTS],
)
def test_layouts_save_resume_and_reshard(
    trainings: Any, model: str, layout: str, sharding: str, flags: tuple[str, ...]
) -> None:
    training, one_rank = trainings
    one = one_rank(model)
    args = (
        *cli.MUON,
        *strategy(sharding.split(", ")[0]),
        *MODELS[model],
        *flags,
    )
    whole, resumed, back = (
        f"{name}, {model}, {layout}, {sharding}"
        for name in (
            "whole",
            "resumed",
            "back",
        )
    )
    first = ("--load", f"one-{model}", "--ckpt-step", "2", "--save", whole, "--save-interval", "1")
    run = training(*args, *first, ranks=4).checked()
    assert warnings(run) == []
    # The second line of a start averages over its first step too, so only the first tells a single
    # step's loss.
    assert run.losses[0] == pytest.approx(one.losses[2], abs=1e-5)
    assert run.iterations[0].grad_norm == pytest.approx(
        one.iterations[2].grad_norm,
        rel=1e-3,
    )

    second = ("--load", whole, "--ckpt-step", "3", "--save", resumed, "--save-interval", "3")
    training(*args, *second, ranks=4).checked()
    expected = saved(training, whole, 4)
    assert any(name.endswith("momentum_buffer") for name in expected)
    assert differences(saved(training, whole, 3), expected), "the comparison can fail"
    assert differences(saved(training, resumed, 4), expected) == []

    # The last iteration is done: the run saves again and ends.
    again = ("--load", whole, "--save", back, "--save-interval", "3")
    assert (
        warnings(
            training(*FULL, *MODELS[model], *again, ranks=1).checked(),
        )
        == []
    )
    found = saved(training, back, 4)
    # of the other tensor-parallel rank
    of_peers = [name for name in expected if name.startswith("rng_state.(0, 1)")]
    assert [name for name in differences(found, expected) if name not in of_peers] == []
