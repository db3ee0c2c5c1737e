"""Momentum, or all state of the optimizers, on the host or on disk: the training is the one
without, to the last bit.

On every layout, and across checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.test_checkpoints import FULL, SWIGLU, differences, saved, warnings
from tests.support import cases, cli
from tests.support.case import Case
from tests.support.cases import MOE, TP
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

STEPS = 5
BUFFER_MB = 0.04  # ten pages: what a rank holds goes through in several parts

MOMENTUM = {
    "optim": (2, Case(strategy="optim")),
    "int8": (2, Case(optimizer={"muon_momentum_dtype": "int8"})),
    "allgather": (2, Case(optimizer={"muon_exchange": "allgather"})),
    "without nesterov": (
        2,
        Case(optimizer={"muon_nesterov": False, "decoupled_weight_decay": False}),
    ),
    "shared replicas": (2, Case(strategy="no_shard", optimizer={"muon_share_replicated": True})),
    "TP 2 x DP 2": (4, TP),
    "EP 2 x DP 2": (4, MOE.but(expert_parallel=2)),
    "HSDP 2 x DP 2": (4, Case(instances=2, layers=1)),
}
ALL = {
    "optim": (2, Case(strategy="optim")),
    "optim_grads_params": (2, Case(strategy="optim_grads_params")),
    "one rank": (1, Case(strategy="optim_grads_params")),
    "four ranks, of which some hold no rows": (4, Case(ffn=47)),
    "frozen": (2, Case(frozen=("embedding",))),
    "cautious decay": (2, Case(optimizer={"muon_cautious_weight_decay": True})),
    "lion": (2, Case(optimizer={"muon_scalar_optimizer": "lion"})),
    "HSDP with outer optim": (4, Case(instances=2, outer="optim", layers=1, overlap=True)),
    **cases.LAYOUTS,
}
for name, (size, case) in ALL.items():
    ALL[name] = size, case.but(bf16=True)
ALL["fp32"] = 2, Case(strategy="optim_grads_params")
LAYOUTS = {"momentum": MOMENTUM, "all": ALL}


def train(
    rank: int,
    world_size: int,
    *,
    case: Case,
    settings: list[dict[str, Any]],
    share_counters: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """In a worker: the bits of weights and state that this rank has after `STEPS` steps with each
    of the settings.

    The model's own weights are among them. The fourth step is skipped, because gradients are not
    finite. `share_counters` puts a bug in: slices count the steps of their parameter, too.
    """
    from megatron_muon.megatron import scalar_state
    from tests.support.case import gradient_of
    from tests.support.model import Trainer

    def poisoned(name: str, shape: Any, step: int) -> torch.Tensor:
        return gradient_of(name, shape, step) * float("nan")

    if share_counters:
        scalar_state._copied = lambda value: value
    results = []
    for setting in settings:
        trainer = Trainer(case.but(optimizer={**case.optimizer, **setting}), steps=STEPS)
        updated = [trainer.step(poisoned if step == 3 else gradient_of)[0] for step in range(STEPS)]
        assert updated == [True, True, True, False, True]
        results.append(bits_of(trainer))
    return results


def bits_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards of main weights, of what the model computes with, and of all
    state.
    """
    bits = {}
    for group in trainer._buffer.parameter_groups:
        weights = group.model_weight_buffer
        for item, original in enumerate(group.params if weights is not None else ()):
            name = trainer._buffer.param_to_name[original]
            bits[f"{name}:model"] = weights.get_item(item, only_shard=True).clone()
    with trainer.optimizer.main_weights_at_hand():
        bits |= {name: p._local_tensor.detach().clone() for name, p in trainer.parameters.items()}
    names = {parameter: name for name, parameter in trainer.parameters.items()}
    state = {name: dict(slots) for name, slots in trainer.states().items()}
    for member in trainer.optimizer.chained_optimizers:
        if hasattr(member.optimizer, "momentum_state"):
            for parameter, momentum in member.optimizer.momentum_state().items():
                state.setdefault(names[parameter], {})["momentum_buffer"] = momentum
    for scalars in trainer.optimizer._scalar_state.values():
        for parameter, slots in scalars.state().items():
            state.setdefault(names[parameter], {}).update(slots)
    for name, slots in state.items():
        bits |= {
            f"{name}:{slot}": getattr(value, "_local_tensor", value).clone()
            for slot, value in slots.items()
        }
    return bits


def offloads(
    folder: Path,
    state: str = "momentum",
    **more: Any,
) -> list[dict[str, Any]]:
    """None; this state on cpu, on nvme, and half of it on nvme."""
    folder.mkdir(exist_ok=True)
    cpu = {"muon_offload": "cpu", "muon_offload_buffer_mb": BUFFER_MB, "muon_offload_state": state}
    nvme = {**cpu, "muon_offload": "nvme", "muon_offload_dir": str(folder)}
    half = {**nvme, "muon_offload_fraction": 0.5}
    return [{**setting, **more} for setting in ({}, cpu, nvme, half)]


def differing(
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


OFTEN = [("momentum", "without nesterov"), ("all", "optim_grads_params")]


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(
    ("state", "layout"),
    wide_but(OFTEN, [(state, name) for state in LAYOUTS for name in LAYOUTS[state]]),
)
def test_the_training_is_the_same_wherever_state_lives(
    ranks: Pool, tmp_path: Path, state: str, layout: str
) -> None:
    world_size, case = LAYOUTS[state][layout]
    for of_rank in ranks(
        world_size, train, case=case, settings=offloads(tmp_path / "state", state)
    ):
        for offloaded in of_rank[1:]:
            assert differing(of_rank[0], offloaded) == []
    assert list((tmp_path / "state").iterdir()) == []  # cleaned up


@pytest.mark.wide
def test_the_comparison_can_fail(ranks: Pool, tmp_path: Path) -> None:
    """Story: others applied the step counters of offloaded state twice."""
    world_size, case = ALL["optim_grads_params"]
    settings = offloads(tmp_path / "state", "all")
    for of_rank in ranks(world_size, train, case=case, settings=settings, share_counters=True):
        wrong = differing(of_rank[0], of_rank[2])
        assert any(name.endswith("weight:step") for name in wrong)
        assert not any("linear_fc1.weight" in name for name in wrong), "Muon counts no steps"


# ------------------------------------------------------------------------------------------------
# checkpoints


@pytest.fixture
def training(ranks: Pool, tmp_path: Path) -> Trainings:
    """Four steps of twelve sequences, saved every two, with an evaluation in between."""
    corpus = cli.make_corpus(tmp_path)
    steps = cli.words("--train-iters 4 --save-interval 2 --eval-interval 3 --eval-iters 1")
    (tmp_path / "state").mkdir()
    return Trainings(
        ranks,
        tmp_path,
        (*cli.TINY, *corpus, *FULL, *SWIGLU, *steps),
        batch=12,
    )


HOST = ("--muon-offload", "cpu")
DISK = (
    *cli.words("--muon-offload nvme --muon-offload-dir state --muon-offload-buffer-mb"),
    str(BUFFER_MB),
)
FLAGS = {
    "none": (),
    "momentum on cpu": HOST,
    "momentum on nvme": DISK,
    "all on cpu": (*HOST, "--muon-offload-state", "all"),
    "all on nvme": (*DISK, "--muon-offload-state", "all"),
}
MOVES = [
    ("bf16", "none", "all on nvme"),
    ("bf16", "all on nvme", "momentum on cpu"),
    ("bf16", "momentum on cpu", "all on cpu"),
    ("fp32", "momentum on nvme", "none"),
]


@pytest.mark.wide
@pytest.mark.parametrize(("precision", "before", "after"), MOVES)
def test_checkpoints_are_the_same_wherever_state_lives(
    training: Trainings, every_way: str, precision: str, before: str, after: str
) -> None:
    """Saved with one setting, resumed with another, and saved again: nothing differs."""
    bf16 = ("--bf16",) if precision == "bf16" else ()
    run = training(*bf16, *FLAGS[before], "--save", "before").checked()
    assert len(run.validation_losses) == 2
    if before == "none":
        assert "optimizer state: momentum fp32: device 0." in run.output
    if before == "momentum on nvme":  # which is staged through the memory of a GPU
        assert ("device 0.00 MB, host 0." in run.output) is not (every_way == "two_memories")
    resumed = training(
        *bf16, *FLAGS[after], *cli.words("--load before --ckpt-step 2 --save after")
    ).checked()
    assert [iteration.number for iteration in resumed.iterations] == [3, 4]
    assert resumed.validation_losses == run.validation_losses
    assert warnings(resumed) == []
    expected = saved(training, "before", 4)
    assert differences(saved(training, "before", 2), expected), "the comparison can fail"
    assert differences(saved(training, "after", 4), expected) == []
    assert list((training.folder / "state").iterdir()) == []


@pytest.mark.usefixtures("every_way")
def test_rounded_momentum_resumes_as_if_uninterrupted(training: Trainings) -> None:
    """bf16 keeps what it reads; the steps that rounding depends on go on from the checkpoint."""
    rounded = ("--muon-momentum-dtype", "bf16")
    training(*rounded, *DISK, "--save", "nvme").checked()
    training(*rounded, *cli.words("--load nvme --ckpt-step 2 --save none")).checked()
    expected = saved(training, "nvme", 4)
    assert differences(saved(training, "none", 4), expected) == []
    momentum = [value for name, value in expected.items() if name.endswith("momentum_buffer")]
    assert momentum
    assert all(value.dtype == torch.float32 for value in momentum)
    assert all(torch.equal(value, value.bfloat16().float()) for value in momentum)


# ------------------------------------------------------------------------------------------------
# memory


def anonymous_bytes() -> int:
    """This process's own memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))


def grow(
    rank: int,
    world_size: int,
    *,
    offload: str,
    folder: str,
) -> dict[str, int]:
    """In a worker: what keeping momentum, and some steps of changing it, adds to this process's own
    memory.
    """
    from benchmarks.layouts import gpt_layout
    from megatron_muon.offload.run import OffloadRun

    layout = gpt_layout(world_size, 384, 14)
    directory = folder if offload == "nvme" else None
    torch.zeros(2**20).add_(1.0)  # what a first operation loads
    before = anonymous_bytes()
    run = OffloadRun(offload, "fp32", directory=directory, buffer_mb=6)
    shards = layout.held(rank)
    names = [matrix.name for matrix in layout.matrices]
    store = run.make_records(names, shards, torch.device("cpu"))
    for _ in range(3):
        for _, borrowed in store.borrow(range(len(shards))):
            for momentum in borrowed:
                momentum.add_(1.0)
        store.end_step()
    grown = anonymous_bytes() - before
    assert all((store.read(index) == 3.0).all() for index in range(len(shards)))
    figures = {"grown": grown, "staging": store.staging_bytes, **store.bytes}
    run.close()
    return figures


@pytest.mark.usefixtures("every_way")
def test_momentum_on_disk_takes_the_staging_of_memory_and_no_more(
    ranks: Pool, tmp_path: Path
) -> None:
    """The process's own memory as the system counts it, and the count of tensors."""
    none, nvme = (
        ranks(
            1,
            grow,
            offload=where,
            folder=str(tmp_path),
        )[0]
        for where in ("none", "nvme")
    )
    momentum = none["device"]
    assert momentum == nvme["disk"] >= 10 * nvme["staging"]
    assert nvme["device"] == 0
    assert nvme["host"] == nvme["staging"]
    assert none["grown"] > 0.9 * momentum
    # Beside the slots: two threads, and the bookkeeping of 56 shards.
    assert nvme["grown"] < nvme["staging"] + 0.02 * momentum, (none, nvme)
