"""Optimizers of emerging-optimizers under Megatron-FSDP: each equals its class on whole matrices,
and Megatron's checkpoints hold its state for any layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_muon.errors import UserError
from tests.functional.test_checkpoints import (
    DIVISIBLE,
    SWIGLU,
    differences,
    saved,
    strategy,
    warnings,
)
from tests.functional.test_matrix_optimizers import LR, OF_MOVEMENT, STEPS
from tests.support import cli
from tests.support.case import STRATEGIES, Case
from tests.support.cases import BLOCKS_OVER_LAYOUTS, GATED, HSDP, MOE, OVER_TP, TP, but
from tests.support.model import Trainer
from tests.support.parity import Seen, run
from tests.support.pool import Pool
from tests.support.reference import Reference
from tests.support.training import Trainings
from tests.support.wide import wide_but

FOR_CLASSES: dict[str, Any] = {
    "muon_nesterov": False,
    "muon_extra_scale_factor": 1.0,
    "muon_fp32_matmul_prec": "medium",
    "lr": LR,
    **GATED,
}
NAMES = ("soap", "rekls", "polargrad", "mop", "psgd_pro")


def of(name: str, case: Case, *arguments: str) -> Case:
    """A case with a class."""
    given = but(case, optimizer=name, **FOR_CLASSES)
    if name == "psgd_pro":  # its updates of these gradients are a fortieth of SOAP's
        given = but(given, muon_lr=1.0, muon_min_lr=0.1)
    return but(given, matrix_optimizer_args=list(arguments)) if arguments else given


SMALL = Case(layers=1, swiglu=True)
GROUPS: dict[str, tuple[int, dict[str, Case]]] = {
    "strategies": (
        3,
        {
            **{s: of("soap", SMALL.but(strategy=s)) for s in STRATEGIES},
            "empty shards": of("soap", Case(layers=1, ffn=47)),
        },
    ),
    "settings": (
        3,
        {
            "plain": of("soap", SMALL, "use_kl_shampoo=False"),
            "cautious": of("soap", but(SMALL, muon_cautious_weight_decay=True, weight_decay=1.0)),
            "host": of("soap", but(SMALL, muon_offload="cpu")),
            "stacked experts": of("soap", Case(layers=1, stacked=3, swiglu=True)),
        },
    ),
    "classes": (2, {name: of(name, SMALL) for name in NAMES}),
    "one rank": (1, {name: of(name, SMALL) for name in NAMES}),
    "layouts": (
        4,
        {
            "tp2": of("soap", but(TP.but(swiglu=True), **OVER_TP)),
            "hsdp": of("soap", HSDP),
            "outer": of("soap", HSDP.but(outer="optim")),
            "ep2": of("soap", MOE.but(swiglu=True, expert_parallel=2)),
        },
    ),
    "classes over layouts": (
        4,
        {
            f"{name}, {label}": of(name, case)
            for name in NAMES[1:]
            for label, case in {
                "tp2": but(TP.but(swiglu=True), **OVER_TP),
                "hsdp": HSDP,
                "ep2": MOE.but(expert_parallel=2),
                "expert tp2": BLOCKS_OVER_LAYOUTS["expert tp2"],
            }.items()
        },
    ),
}


def check(seen: Seen, case: Case, label: str) -> None:
    """Compare all weights with the reference, to a part of how far they have moved."""
    reference = Reference(case, seen.shapes, steps=seen.steps)
    first = reference.whole()
    for _ in range(seen.steps):
        reference.step()
    for name, expected in reference.whole().items():
        moved = (expected - first[name]).abs().max()
        found = seen.after[seen.steps]["weight"][name]
        apart = (found - expected).abs().max()
        bound = OF_MOVEMENT * moved
        if case.settings.get("muon_cautious_weight_decay"):
            bound = 1e-3 * moved  # where the sign of a product of rounding decides
        assert apart <= bound, f"{label}, {name}: {apart} of {moved}"


@pytest.mark.parametrize("name", wide_but(["strategies"], GROUPS))
def test_under_megatron_fsdp_too(ranks: Pool, name: str) -> None:
    size, cases = GROUPS[name]
    seen = ranks(size, run, cases=cases, steps=STEPS)[0]
    for label, case in cases.items():
        check(seen[label], case, label)


ITERATIONS = cli.words("--train-iters 4 --save-interval 2")
SIZES = (*DIVISIBLE, "--make-vocab-size-divisible-by", "132")
NAMED: dict[str, tuple[str, ...]] = {
    "soap": ("--optimizer", "soap"),
    "psgd_pro": ("--matrix-optimizer", "psgd_pro"),
    "mop": ("--matrix-optimizer", "mop"),
}
UNDER = (*cli.words("--use-megatron-fsdp --data-parallel-sharding-strategy"),)
OTHERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (3, (*UNDER, "optim")),
    (1, (*UNDER, "no_shard")),
    (4, (*UNDER, *cli.words("optim_grads --tensor-model-parallel-size 2"))),
    (
        4,
        (*UNDER, *cli.words("optim_grads_params --num-distributed-optimizer-instances 2")),
    ),
)
WITH_EXPERTS = cli.words("--num-experts 4 --moe-router-topk 2")
OTHERS_WITH_EXPERTS = (
    (4, (*UNDER, *cli.words("optim_grads_params --expert-model-parallel-size 4"))),
    (2, (*UNDER, *cli.words("optim_grads_params --expert-model-parallel-size 1"))),
)


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *ITERATIONS, *SIZES, *SWIGLU), batch=12)


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("has_experts", [False, True])
def test_megatrons_checkpoints_hold_the_state_for_any_layout(
    training: Trainings, name: str, has_experts: bool
) -> None:
    named = (*NAMED[name], *(WITH_EXPERTS if has_experts else ()))
    parallel = cli.words("--expert-model-parallel-size 2") if has_experts else ()
    here = (*named, *UNDER, "optim_grads_params", *parallel)

    def go(*flags: str, ranks: int = 2) -> None:
        assert warnings(training(*flags, ranks=ranks).checked()) == []

    go(*here, "--save", "whole")
    go(*here, *cli.words("--load whole --ckpt-step 2 --save resumed"))
    expected = saved(training, "whole", 4)
    assert differences(saved(training, "resumed", 4), expected) == []
    counts = [value for entry, value in expected.items() if entry.endswith("update_count")]
    assert len(counts) >= 3 * 4
    assert all((count == 4).all() for count in counts)
    for number, (size, others) in enumerate(OTHERS_WITH_EXPERTS if has_experts else OTHERS):
        # The last iteration is done: the run saves again and ends.
        copied = f"copied-{number}"
        moved = cli.words(f"--load whole --save {copied} --save-interval 3")
        go(*named, *others, *moved, ranks=size)
        found = saved(training, copied, 4)
        of_peers = [entry for entry in found if entry.startswith("rng_state.")]
        apart = differences(found, expected)
        assert [entry for entry in apart if entry not in of_peers] == [], (size, others)


def test_from_muon_to_soap_and_back_weights_and_adam_go_on(training: Trainings) -> None:
    """The rest starts afresh, with a line."""
    soap_flags = (*NAMED["soap"], *UNDER, "optim_grads_params")
    muon = (*cli.MUON, *strategy("optim_grads_params"))
    training(*muon, "--save", "muon").checked()
    longer = "--override-opt-param-scheduler --train-iters"
    run = training(*soap_flags, *cli.words(f"--load muon --save soap {longer} 6"))
    (line,) = warnings(run.checked())
    assert "start at zero, because another optimizer or layout wrote this checkpoint" in line
    entries = saved(training, "soap", 6)
    steps = {float(value.max()) for entry, value in entries.items() if entry.endswith(".step")}
    assert 6.0 in steps, "Adam's count goes on"
    counts = [value for entry, value in entries.items() if entry.endswith("update_count")]
    assert all((count == 2).all() for count in counts)
    (line,) = warnings(training(*muon, *cli.words(f"--load soap --save back {longer} 7")).checked())
    assert "start at zero, because another optimizer or layout wrote this checkpoint" in line


@pytest.mark.wide
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--optimizer soap", "--optimizer adam"),
        ("--optimizer soap", "--optimizer lion"),
        ("--matrix-optimizer mop", "--optimizer muon"),
        ("--optimizer lion", "--optimizer soap"),
    ],
)
def test_any_optimizer_goes_on_from_anothers_weights(
    training: Trainings, first: str, second: str
) -> None:
    """Story: of a gated projection one optimizer has a whole, the other two halves."""
    under = (*UNDER, "optim_grads_params")
    training(*cli.words(first), *under, "--save", "first").checked()
    more = cli.words("--load first --override-opt-param-scheduler --train-iters 5")
    run = training(*cli.words(second), *under, *more).checked()
    assert [iteration.number for iteration in run.iterations] == [5]
    assert any("another optimizer" in line for line in warnings(run))


def in_a_config(rank: int, world_size: int, *, settings: dict[str, Any]) -> str:
    """In a worker: the error of a config that a script makes."""
    with pytest.raises(UserError) as caught:
        Trainer(but(of("soap", SMALL), **settings))
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "muon", "matrix_optimizer": "soap"}, "name two optimizers"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay=False does not work with soap"),
        ({"muon_offload": "CPU"}, "--muon-offload CPU does not exist"),
        ({"matrix_optimizer_args": ["lr=0.5"]}, "lr=0.5 is not the class's"),
        ({"soap_precondition_frequency": 10}, "takes no precondition_frequency"),
    ],
)
def test_configs_of_scripts_are_refused_likewise(
    ranks: Pool, settings: dict[str, Any], words: str
) -> None:
    assert words in ranks(1, in_a_config, settings=settings)[0]


def test_lion_exchanges_nothing(training: Trainings) -> None:
    run = training("--optimizer", "lion", *UNDER, "optim_grads_params", "--save", "lion").checked()
    assert "megatron-muon: plan" not in run.output
    slots = {entry.rpartition(".")[2] for entry in saved(training, "lion", 4)}
    assert "exp_avg" in slots
    assert "update_count" not in slots


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--optimizer soap --muon-momentum 0.8", "--muon-momentum 0.8 is for Muon, not for soap"),
        ("--optimizer soap --muon-team-size 2", "--muon-team-size is for Muon, not for soap"),
        ("--optimizer soap --muon-offload nvme --muon-offload-dir .", "--muon-offload nvme"),
        ("--optimizer soap --muon-tp-mode blockwise --tensor-model-parallel-size 2", "blockwise"),
        ("--optimizer soap --matrix-optimizer-args bogus=1", "bogus"),
        ("--optimizer muon --matrix-optimizer-args bogus=1", "needs --optimizer soap"),
        ("--optimizer muon --matrix-optimizer soap", "name two optimizers"),
        ("--matrix-optimizer scion", "--matrix-optimizer scion reads weights"),
        ("--optimizer lion --muon-offload cpu", "lion exchanges nothing"),
    ],
)
def test_flags_that_do_not_apply_are_refused_by_name(
    training: Trainings, flags: str, words: str
) -> None:
    run = training(*cli.words(flags), *UNDER, "optim", ranks=2)
    assert run.returncode != 0
    assert words in run.output


@pytest.mark.wide
def test_state_on_the_host_meets_the_stacks_on_the_device(ranks: Pool) -> None:
    """Where host and device memory are two, and only copies lead from one to the other."""
    cases = {
        "device": of("soap", SMALL),
        "host": of("soap", but(SMALL, muon_offload="cpu")),
        "noise": of("psgd_pro", but(SMALL, muon_offload="cpu")),
    }
    with ranks.two_memories():
        seen = ranks(2, run, cases=cases, steps=STEPS)[0]
    for label, case in cases.items():
        check(seen[label], case, label)
