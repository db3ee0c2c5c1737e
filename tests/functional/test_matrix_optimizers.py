"""Optimizers of emerging-optimizers on shards: each equals the same class on whole matrices, on
every layout, and its state follows the matrices through checkpoints.

Gradients have full rank: where directions have no gradient SOAP normalises rounding to size 1, and
two correct runs part.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from emerging_optimizers import registry
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_muon import Sharded
from megatron_muon.errors import UserError
from megatron_muon.megatron.plan_figures import state_bytes
from tests.functional.test_checkpoints import (
    DIVISIBLE,
    SWIGLU,
    differences,
    saved,
    strategy,
    warnings,
)
from tests.support import cli
from tests.support.case import STRATEGIES, Case
from tests.support.cases import BLOCKS_OVER_LAYOUTS, GATED, HSDP, MOE, OVER_TP, TP, but
from tests.support.model import Trainer
from tests.support.parity import Seen, run
from tests.support.pool import Pool
from tests.support.reference import REGISTERED, Reference
from tests.support.training import Trainings
from tests.support.wide import wide_but

STEPS = 10
LR = 0.05
DECAY = 0.1
OF_MOVEMENT = 1e-5
"""Largest difference from the class on whole matrices, as a part of the largest movement."""

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "soap": ("soap", {}),
    "kl-soap": ("soap", {"use_kl_shampoo": True}),
    "rekls": ("rekls", {}),
    "polargrad": ("polargrad", {"nesterov": True}),
    "mop": ("mop", {}),
    "psgd_pro": ("psgd_pro", {"momentum": 0.8}),
    "lion": ("lion", {}),
}

SHAPES = {"tall": (13, 6), "wide": (5, 12), "qkv": (12, 7), "experts": (4, 6, 10), "square": (9, 9)}
SPLIT = {"qkv": (6, 3, 3)}


def values(name: str, step: int) -> Tensor:
    """Normal numbers of the name and the step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(SHAPES[name], generator=generator)


def blocks_of(name: str, matrix: Tensor) -> list[tuple[str, Tensor]]:
    """Views of the blocks of a parameter, with their names in seeds."""
    if name == "experts":
        return [(f"experts[{number}]/0", block) for number, block in enumerate(matrix)]
    parts = matrix.split(SPLIT.get(name, len(matrix)))
    return [(f"{name}/{number}", block) for number, block in enumerate(parts)]


def by_hand(label: str, steps: int) -> dict[str, Tensor]:
    """Weights after steps of the class on whole matrices in one process, without this package."""
    kind, arguments = CLASSES[label]
    assert REGISTERED
    make = registry.get_optimizer_cls(kind)
    found = {}
    for name in SHAPES:
        weight = values(name, -1)
        for key, block in blocks_of(name, weight):
            parameter = nn.Parameter(block.clone())
            optimizer = make(
                [parameter],
                lr=LR,
                weight_decay=DECAY,
                weight_decay_method="decoupled",
                **arguments,
            )
            for step in range(steps):
                gradients = dict(blocks_of(name, values(name, step)))
                parameter.grad = gradients[key].clone()
                torch.manual_seed(zlib.crc32(f"{key}/{step}".encode()))
                with torch.compiler.set_stance("force_eager"):
                    optimizer.step()
            block.copy_(parameter.detach())
        found[name] = weight
    return found


class Training:
    """Weights on a mesh, or plain ones, with a class for all of them."""

    def __init__(self, mesh_shape: tuple[int, ...], label: str, **settings: Any) -> None:
        self.mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
        self.is_tp = settings.pop("is_tp", False)
        self.model = nn.Module()
        for name in SHAPES:
            self.model.register_parameter(name, nn.Parameter(self.placed(values(name, -1))))
        kind, arguments = CLASSES[label]
        self.optimizer = Sharded(
            kind,
            self.model.named_parameters(),
            lr=LR,
            weight_decay=DECAY,
            matrices=["*"],
            split=SPLIT,
            **arguments,
            **settings,
        )

    def placed(self, tensor: Tensor) -> Tensor:
        if self.mesh is None:
            return tensor
        placements: list[Any] = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        if self.is_tp:
            placements = [Shard(0), Shard(tensor.ndim - 1)]
        return distribute_tensor(tensor, self.mesh, placements)

    def train(self, steps: range) -> dict[str, Tensor]:
        for step in steps:
            for name, p in self.model.named_parameters():
                p.grad = self.placed(values(name, step))
            self.optimizer.step()
        found = {}
        for name, p in self.model.named_parameters():
            weight = p.detach()
            found[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
        return found


def trained(
    rank: int,
    world_size: int,
    *,
    mesh: tuple[int, ...],
    labels: Sequence[str] = tuple(CLASSES),
    **settings: Any,
) -> dict[str, dict[str, Tensor]]:
    """In a worker: weights after the steps, by class."""
    found = {}
    for label in labels:
        found[label] = Training(mesh, label, **settings).train(range(STEPS))
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], label: str) -> None:
    for name in SHAPES:
        moved = (expected[name] - values(name, -1)).abs().max()
        apart = (found[name] - expected[name]).abs().max()
        assert moved > 0.01
        assert apart <= OF_MOVEMENT * moved, f"{label}, {name}: {apart} of {moved}"


LAYOUTS: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "fsdp2 on 1": (1, (1,), {}),
    "fsdp2 on 2": (2, (2,), {}),
    "fsdp2 on 3, waves": (3, (3,), {"exchange_buffer_mb": 0.015}),
    "fsdp2 on 4": (4, (4,), {}),
    "hsdp": (4, (2, 2), {}),
    "tp": (4, (2, 2), {"is_tp": True}),
    "ddp": (2, (), {}),
    "allgather": (2, (2,), {"exchange": "allgather"}),
    "host": (2, (2,), {"offload": "cpu"}),
}


@pytest.mark.parametrize("layout", wide_but(["tp"], LAYOUTS))
def test_ten_steps_equal_the_class_on_whole_matrices(ranks: Pool, layout: str) -> None:
    """Also with the same bits on each layout, as blocks are the same."""
    size, mesh, settings = LAYOUTS[layout]
    seen = ranks(size, trained, mesh=mesh, **settings)
    alone = ranks(1, trained, mesh=())[0]
    for label in CLASSES:
        assert_equal(seen[0][label], by_hand(label, STEPS), f"{layout}, {label}")
        for name in SHAPES:
            assert torch.equal(seen[0][label][name], alone[label][name]), (label, name)


def test_the_comparison_can_fail(ranks: Pool) -> None:
    """Negative controls: KL-SOAP is not SOAP, and nine steps are not ten."""
    seen = ranks(2, trained, mesh=(2,), labels=["soap", "mop"])[0]
    for label, other, steps in (("soap", "kl-soap", STEPS), ("mop", "mop", STEPS - 1)):
        with pytest.raises(AssertionError):
            assert_equal(seen[label], by_hand(other, steps), label)


# ----------------------------------------------------------------------------------------------
# state in checkpoints


def saves(rank: int, world_size: int, *, mesh: tuple[int, ...], folder: str) -> Any:
    """In a worker: weights of some classes at the end, with a checkpoint on the way."""
    found = {}
    for label in ("soap", "psgd_pro", "mop"):
        training = Training(mesh, label)
        weights = training.train(range(4))
        state = get_optimizer_state_dict(training.model, training.optimizer)
        dcp.save({"state": state, "weights": weights}, checkpoint_id=f"{folder}/{label}")
        found[label] = training.train(range(4, 7))
    return found


def loads(
    rank: int, world_size: int, *, mesh: tuple[int, ...], folder: str, **settings: Any
) -> Any:
    """In a worker: the same weights, from the checkpoint on."""
    found = {}
    for label in ("soap", "psgd_pro", "mop"):
        training = Training(mesh, label, **settings)
        weights = {name: values(name, -1) for name in SHAPES}
        state = {
            "state": get_optimizer_state_dict(training.model, training.optimizer),
            "weights": weights,
        }
        dcp.load(state, checkpoint_id=f"{folder}/{label}")
        for name, p in training.model.named_parameters():
            p.detach().copy_(training.placed(weights[name]))
        set_optimizer_state_dict(training.model, training.optimizer, state["state"])
        found[label] = training.train(range(4, 7))
    return found


@pytest.mark.parametrize("mesh", wide_but([[2, 2]], [[1], [2], [3], [2, 2]]))
def test_a_resumed_run_has_the_same_bits_on_other_ranks(
    ranks: Pool, tmp_path: Path, mesh: list[int]
) -> None:
    """Eigenvectors and counts are restored, not computed again."""
    expected = ranks(2, saves, mesh=(2,), folder=str(tmp_path))[0]
    size = torch.Size(mesh).numel()
    found = ranks(size, loads, mesh=tuple(mesh), folder=str(tmp_path))[0]
    for label, weights in expected.items():
        for name in SHAPES:
            assert torch.equal(found[label][name], weights[name]), (label, name)


def kept(rank: int, world_size: int) -> Any:
    """In a worker: bytes of state that the rank keeps, and that the plan counts for it."""
    found = []
    for label in CLASSES:
        training = Training((world_size,), label)
        training.train(range(2))
        (part,) = training.optimizer.parts
        found.append((part.method_state.nbytes, int(state_bytes(part.waves.plan)[rank])))
    return found


def test_the_plan_counts_the_bytes_of_state(ranks: Pool) -> None:
    found = ranks(2, kept)
    for of_rank in found:
        for bytes_kept, planned in of_rank:
            assert bytes_kept == planned
    assert all(any(bytes_kept for bytes_kept, _ in each) for each in zip(*found, strict=True))


def skips(rank: int, world_size: int) -> Any:
    """In a worker: whether matrices without a finite gradient, or without one, kept their state."""
    found = []
    for is_missing in (False, True):
        training = Training((world_size,), "soap")
        before = training.train(range(3))
        held = whole_state(training)
        for name, p in training.model.named_parameters():
            gradient = values(name, 3)
            if name == "wide":
                gradient[0, 0] = torch.nan
            p.grad = None if name == "wide" and is_missing else training.placed(gradient)
        training.optimizer.step()
        after = training.train(range(0))
        now = whole_state(training)
        found.append(
            (
                {name for name in SHAPES if torch.equal(before[name], after[name])},
                {name for name in SHAPES if all(map(torch.equal, held[name], now[name]))},
            )
        )
    return found


def whole_state(training: Training) -> dict[str, list[Tensor]]:
    """The state of each parameter as a checkpoint has it."""
    state = training.optimizer.state_dict()["state"]
    return {
        name: [slot.full_tensor() for slot in state[number].values()]
        for number, name in enumerate(SHAPES)
    }


def test_a_matrix_without_a_finite_gradient_keeps_its_state(ranks: Pool) -> None:
    for found in ranks(2, skips):
        assert found == [({"wide"}, {"wide"})] * 2


# ----------------------------------------------------------------------------------------------
# Megatron

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
            "plain": of("soap", SMALL, "use_kl_shampoo=False"),
            "cautious": of("soap", but(SMALL, muon_cautious_weight_decay=True, weight_decay=1.0)),
            "host": of("soap", but(SMALL, muon_offload="cpu")),
            "empty shards": of("soap", Case(layers=1, ffn=47)),
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


@pytest.mark.parametrize("name", wide_but(["strategies", "layouts"], GROUPS))
def test_under_megatron_fsdp_too(ranks: Pool, name: str) -> None:
    size, cases = GROUPS[name]
    seen = ranks(size, run, cases=cases, steps=STEPS)[0]
    for label, case in cases.items():
        check(seen[label], case, label)


def refused(rank: int, world_size: int, *, kind: str, settings: dict[str, Any]) -> str:
    """In a worker: the error of a class that cannot be used."""
    model = nn.Linear(4, 3)
    with pytest.raises(UserError) as caught:
        Sharded(kind, model.named_parameters(), matrices=["weight"], **settings)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("scion", {}, "optimizer scion reads weights"),
        ("oblique_sgd", {}, "optimizer oblique_sgd reads weights"),
        ("muon", {}, "has an implementation of its own"),
        ("nothing", {}, "is not an optimizer of emerging-optimizers"),
        ("soap", {"ns_steps": 3}, "ns_steps"),
        ("soap", {"offload": "nvme"}, "offload nvme"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(
    ranks: Pool, kind: str, settings: dict[str, Any], words: str
) -> None:
    for error in ranks(2, refused, kind=kind, settings=settings):
        assert words in error


# ----------------------------------------------------------------------------------------------
# checkpoints of Megatron

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
