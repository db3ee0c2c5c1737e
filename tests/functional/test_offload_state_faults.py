"""What happens to a run whose state is all on disk when the disk fails, and in how little memory it trains."""

from __future__ import annotations

import ctypes
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.checkpoint import files
from tests.functional import test_offload_faults
from tests.functional.test_checkpoints import differences, saved
from tests.functional.test_offload_faults import FAULTY_STEP, error_of, lying_there
from tests.support import cli
from tests.support.case import Case
from tests.support.pool import Pool
from tests.support.training import Trainings, train

pytestmark = [pytest.mark.timeout(300), pytest.mark.wide]

ALL = (*test_offload_faults.FLAGS, "--muon-offload-state", "all")
WEIGHTS, SCALARS = "main weights", "scalar state"


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    (tmp_path / "momentum").mkdir()
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *ALL))


def train_with(
    rank: int, world_size: int, *, fault: str, on_rank: int, what: str, saving: bool, **run: Any
) -> tuple[int, str]:
    """In a worker: a training run whose store of `what` meets a fault on one rank: at the start of its fourth step, or
    after it, where the save has begun.
    """
    from megatron_muon.megatron.chained import MuonChainedOptimizer

    step, at_hand = MuonChainedOptimizer.step_with_ready_grads, MuonChainedOptimizer.main_weights_at_hand
    undo: list[Callable[[], None]] = []
    done: list[int] = []

    def meet_fault(self: Any) -> None:
        if rank == on_rank and len(done) == FAULTY_STEP:
            store = next(store for store in self.stores if store.what == what)
            undo.append(getattr(test_offload_faults, fault)(store))

    def save_with_fault(self: Any, **how: Any) -> Any:
        meet_fault(self)
        return at_hand(self, **how)

    def step_with_fault(self: Any) -> bool:
        done.append(1)
        if not saving:
            meet_fault(self)
        updated = bool(step(self))
        while undo:
            undo.pop()()
        return updated

    MuonChainedOptimizer.step_with_ready_grads = step_with_fault
    if saving:
        MuonChainedOptimizer.main_weights_at_hand = save_with_fault
    return train(rank, world_size, **run)


def with_fault(training: Trainings, fault: str, *flags: str, what: str, saving: bool = False) -> cli.Run:
    run = {"argv": [*training.flags, *flags], "folder": str(training.folder)}
    answers = training.ranks(2, train_with, **run, fault=fault, on_rank=1, what=what, saving=saving)
    assert len({status for status, _ in answers}) == 1, "\n".join(text[-3000:] for _, text in answers)
    return cli.Run(answers[0][0], "".join(text for _, text in answers), 0.0)


@pytest.mark.parametrize("what", [WEIGHTS, SCALARS])
def test_a_disk_that_is_full_for_other_state(training: Trainings, what: str) -> None:
    """The step is finished, its checkpoint is whole, and the run that goes on from it is the undisturbed one."""
    training("--save", "whole", "--bf16").checked()
    error = error_of(with_fault(training, "full_disk", "--save", "ck", "--bf16", what=what), status=1)
    assert "rank 1 cannot write " in error
    assert "nothing is lost, what was to be written is kept in memory" in error
    assert lying_there(training) == []
    assert files.latest(training.folder / "ck") == FAULTY_STEP
    assert differences(saved(training, "ck", 4), saved(training, "whole", 4)) == []
    training("--load", "ck", "--save", "resumed", "--bf16").checked()
    assert differences(saved(training, "resumed"), saved(training, "whole")) == []


@pytest.mark.parametrize("what", [WEIGHTS, SCALARS])
def test_lost_state_ends_the_run_without_a_checkpoint(training: Trainings, what: str) -> None:
    """As momentum: a run that goes on with something else is not the run that was asked for."""
    error = error_of(with_fault(training, "unreadable", "--save", "ck", "--bf16", what=what), status=1)
    assert f"rank 1 cannot read {what} in " in error
    assert error.endswith("is lost on this rank; start again from a checkpoint")
    assert lying_there(training) == []
    assert files.latest(training.folder / "ck") == 2
    run = training("--load", "ck", "--train-iters", "4", "--override-opt-param-scheduler", "--bf16").checked()
    assert [iteration.number for iteration in run.iterations] == [3, 4]


@pytest.mark.parametrize("what", [WEIGHTS, SCALARS, "momentum"])
def test_state_that_a_save_cannot_read_is_in_no_checkpoint(training: Trainings, what: str) -> None:
    """It reads as NaN; the checkpoint before stays the latest."""
    error = error_of(with_fault(training, "unreadable", "--save", "ck", "--bf16", what=what, saving=True), status=1)
    assert f"rank 1 cannot read {what} in " in error
    assert error.endswith("is lost on this rank; start again from a checkpoint")
    assert files.latest(training.folder / "ck") == 2
    training("--load", "ck", "--train-iters", "4", "--override-opt-param-scheduler", "--bf16").checked()


# ------------------------------------------------------------------------------------------------ memory

LARGE = Case(hidden=256, heads=4, query_groups=4, ffn=1024, layers=1, vocabulary=16384, bf16=True)
"""0.8 million parameters of Muon, 8.4 of Adam: on one rank 3 MB of momentum, 67 of moments, 37 of main weights."""

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of mallopt(3)

LIMIT_MB = 100
"""What a process may take beyond what it has once the model is there, with gradients and main weights."""


def train_within(rank: int, world_size: int, *, limit_mb: int, setting: dict[str, Any]) -> str:
    """In a worker: two steps of a large model in so much more memory; empty, or what torch says when that ends."""
    from tests.support import model

    make = model._optimizer

    def make_within(*args: Any) -> Any:
        status = Path("/proc/self/status").read_text().splitlines()
        taken = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (taken + limit_mb * 10**6, resource.RLIM_INFINITY))
        return make(*args)

    model._optimizer = make_within
    threading.stack_size(1 << 19)  # which counts too
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back at once, however threads take turns
    libc.mallopt(M_ARENA_MAX, 1)
    try:
        trainer = model.Trainer(LARGE.but(optimizer=setting))
        for _ in range(2):
            trainer.step(lambda name, shape, step: torch.full(tuple(shape), 1e-3))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_model_whose_state_does_not_fit_trains_with_it_on_disk(ranks: Pool, tmp_path: Path) -> None:
    nvme = {"muon_offload": "nvme", "muon_offload_dir": str(tmp_path), "muon_offload_buffer_mb": 3.0}
    settings = {"none": {}, "momentum": nvme, "all": {**nvme, "muon_offload_state": "all"}}
    said = {name: ranks(1, train_within, limit_mb=LIMIT_MB, setting=setting)[0] for name, setting in settings.items()}
    assert "can't allocate memory" in said["none"]
    assert "can't allocate memory" in said["momentum"]
    assert said["all"] == ""
