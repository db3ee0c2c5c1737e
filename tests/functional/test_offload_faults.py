"""What happens to a run whose state is on disk when the disk is full, fails, or it is killed; in
how little memory.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError
from tests.support import cli
from tests.support.killable import Killable, wait_for_iteration
from tests.support.pool import Pool
from tests.support.training import Trainings, train
from tests.support.wide import wide_but

pytestmark = pytest.mark.timeout(300)

NVME = cli.words("--muon-offload nvme --muon-offload-dir momentum --muon-offload-buffer-mb 0.04")
FLAGS = (
    *(
        *cli.MUON,
        *cli.words(
            "--data-parallel-sharding-strategy optim_grads_params --muon-fp32-matmul-prec highest"
        ),
    ),
    *(*cli.words("--global-batch-size 4 --train-iters 6 --save-interval 2"), *NVME),
    *("--num-workers", "0"),
)
LONG = cli.words("--train-iters 100000 --num-workers 1")
"""Until it is killed; with a forked process beside each rank, which lives on for some seconds."""
FAULTY_STEP = 4
KINDS = {
    "momentum": (),
    "main weights": ("--muon-offload-state", "all", "--bf16"),
    "scalar state": ("--muon-offload-state", "all", "--bf16"),
}
"""What is on disk, and the flags that put it there."""


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    (tmp_path / "momentum").mkdir()
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *FLAGS))


def lying_there(training: Trainings) -> list[str]:
    return sorted(path.name for path in (training.folder / "momentum").iterdir())


def error_of(run: cli.Run, *, status: int) -> str:
    """What the run says on each rank, which is one and the same line."""
    assert run.returncode == status, run.tail
    lines = [
        line for line in run.output.splitlines() if line.startswith("pretrain_gpt.py: error: ")
    ]
    assert len(lines) == 2, run.tail
    assert lines[0] == lines[1]
    assert "Traceback" not in run.output, run.tail
    return lines[0]


# ------------------------------------------------------------------------------------------------
# in a step


def train_with_fault(
    rank: int, world_size: int, *, what: str, saving: bool, **run: Any
) -> tuple[int, str]:
    """In a worker: a training whose store of `what` can no longer be read on rank 0: from the start
    of its fourth step, or from the save after it.
    """
    from megatron_muon.megatron.chained import MuonChainedOptimizer

    step = MuonChainedOptimizer.step_with_ready_grads
    at_hand = MuonChainedOptimizer.main_weights_at_hand
    done: list[int] = []

    def meet_fault(self: Any) -> None:
        if rank == 0 and len(done) == FAULTY_STEP:
            descriptor = next(each for each in self.stores if each.what == what).disk.file._file
            other = os.open(f"/proc/self/fd/{descriptor.fileno()}", os.O_WRONLY)
            os.dup2(other, descriptor.fileno())

    def save(self: Any, **how: Any) -> Any:
        meet_fault(self)
        return at_hand(self, **how)

    def step_with_fault(self: Any) -> bool:
        done.append(1)
        if not saving:
            meet_fault(self)
        return bool(step(self))

    MuonChainedOptimizer.step_with_ready_grads = step_with_fault
    if saving:
        MuonChainedOptimizer.main_weights_at_hand = save
    return train(rank, world_size, **run)


@pytest.mark.parametrize("saving", wide_but([False], [False, True]))
@pytest.mark.parametrize("what", wide_but(["momentum"], KINDS))
def test_a_disk_that_can_no_longer_be_read(training: Trainings, what: str, saving: bool) -> None:
    """Story: the run went on from zeros and saved them. What is lost is named, and no checkpoint is
    made without it.
    """
    argv = [*training.flags, *KINDS[what], "--save", "ck"]
    folder = str(training.folder)
    answers = training.ranks(
        2, train_with_fault, argv=argv, folder=folder, what=what, saving=saving
    )
    assert lying_there(training) == []
    output = "".join(text for _, text in answers)
    error = error_of(cli.Run(answers[0][0], output, 0.0), status=1)
    assert f"rank 0 cannot read {what} in " in error
    assert f"Bad file descriptor; {what} of " in error
    assert error.endswith(" is lost on this rank; start again from a checkpoint")
    assert folders.latest(training.folder / "ck") == 2
    again = cli.words("--load ck --train-iters 4 --override-opt-param-scheduler")
    run = training(*KINDS[what], *again).checked()
    assert [iteration.number for iteration in run.iterations] == [3, 4]


# ------------------------------------------------------------------------------------------------
# before the first


def make_stores(
    rank: int,
    world_size: int,
    *,
    folder: str,
    limit: int,
) -> list[bool]:
    """In a worker: two stores of a run of which rank 1 alone has momentum; which are on disk."""
    from megatron_muon.core.layout import Shard
    from megatron_muon.offload.run import OffloadRun

    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run = OffloadRun("nvme", "fp32", directory=folder)
    for rows in (16, 272):
        shard = Shard(rank, 0, rank * rows, 0, 256)
        run.make_records(["w"], [shard], torch.device("cpu"))
    on_disk = [store.disk.file is not None for store in run.stores]
    run.close()
    return on_disk


def refusal_of_stores(rank: int, world_size: int, **settings: Any) -> str:
    """In a worker: the error of `make_stores`."""
    with pytest.raises(UserError) as refused:
        make_stores(rank, world_size, **settings)
    return str(refused.value)


def test_ranks_without_momentum_take_part(ranks: Pool, tmp_path: Path) -> None:
    """Story: they did not ask for failures with the others, who waited."""
    folder = str(tmp_path)
    assert (
        ranks(
            2,
            make_stores,
            folder=folder,
            limit=1 << 20,
        )
        == [[True, True]] * 2
    )
    assert list(tmp_path.iterdir()) == []
    refusal, again = ranks(2, refusal_of_stores, folder=folder, limit=1 << 17)
    assert again == refusal
    assert re.match("muon_offload_dir .* cannot take momentum of a rank on ", refusal)
    assert f", {272 * 1024:,} bytes (File too large); choose a directory with room" in refusal
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------
# killed


def test_a_second_run_in_the_directory_of_one_that_is_killed(
    training: Trainings, killable: Killable
) -> None:
    """Each has files of its own, and both train on; what is killed leaves nothing.

    Story: its files kept every later start out until somebody had typed a command to remove them.
    """
    pids = killable.start(training.folder, *training.flags, *LONG)
    wait_for_iteration(training.folder, pids, 2)
    training("--train-iters", "2").checked()
    log = training.folder / f"run-{pids[-1]}.log"
    last = cli.Run(0, log.read_text(), 0.0).iterations[-1].number
    wait_for_iteration(training.folder, pids, last + 2)
    for pid, number in zip(pids, (signal.SIGKILL, signal.SIGTERM), strict=True):
        os.kill(pid, number)
    assert killable.wait() == [-signal.SIGKILL, -signal.SIGTERM]
    assert lying_there(training) == []


# ------------------------------------------------------------------------------------------------
# memory


M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of mallopt(3)
