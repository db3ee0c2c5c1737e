"""What happens to checkpoints when a rank is killed, the disk is full, a file is cut short, a
folder vanishes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_muon.checkpoint import folders
from megatron_muon.checkpoint.locks import locked
from megatron_muon.errors import UserError
from megatron_muon.megatron.checkpoint import loading as checkpoint_loading
from tests.support import cli
from tests.support.case import Case, batches
from tests.support.killable import Killable
from tests.support.model import Trainer
from tests.support.pool import Pool, RankError
from tests.support.training import Trainings, train

FLAGS = (
    *cli.MUON,
    *cli.words("--data-parallel-sharding-strategy optim_grads_params"),
    *cli.words("--muon-fp32-matmul-prec highest --global-batch-size 4 --train-iters 6"),
    *cli.words("--save ck --save-interval 2"),
)
LARGE = ("--ffn-hidden-size", "8192")
"""Shards of some megabytes, so that a save takes long enough to be met in the middle, and a log is
smaller.
"""


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *FLAGS))


@contextlib.contextmanager
def watching(
    act: Callable[[Callable[[Callable[[], Any]], Any]], None],
) -> Iterator[None]:
    """Do something beside the body, in a thread: `act(until)`, where `until(f)` waits for f() to be
    true.
    """
    over = threading.Event()

    def until(condition: Callable[[], Any]) -> Any:
        while not over.is_set():
            if found := condition():
                return found
            time.sleep(0.001)
        return None

    thread = threading.Thread(target=act, args=(until,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def rank_in(folder: Path, rank: int) -> psutil.Process | None:
    """The process of a rank of a run in `folder`."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.environ().get("RANK") == str(rank):
                return process
    return None


def latest(folder: Path) -> Any:
    return folders.latest(folder / "ck")


def test_a_rank_killed_in_the_middle_of_a_save(training: Trainings, killable: Killable) -> None:
    """The checkpoint before it stays the latest, and the next run goes on from there."""
    here = training.folder
    pids = killable.start(here, *training.flags, *LARGE)

    def kill(until: Callable[[Callable[[], Any]], Any]) -> None:
        if until(lambda: latest(here) == 2):
            until((here / "ck" / "iter_0000004.saving").exists)
            os.kill(pids[1], signal.SIGKILL)

    with watching(kill):
        statuses = killable.wait()
    assert statuses[1] == -signal.SIGKILL, "the kill came too late"
    assert latest(here) == 2
    assert folders.problems(here / "ck" / "iter_0000002") == []
    assert folders.iterations(here / "ck") == [2]
    assert len(list((here / "ck").glob("*.saving"))) == 1

    run = training(*LARGE, "--load", "ck").checked()
    assert [iteration.number for iteration in run.iterations] == [3, 4, 5, 6]
    assert latest(here) == 6
    assert list((here / "ck").glob("*.saving")) == []  # iteration 4 was saved in its place


def test_one_training_saves_to_a_folder_at_a_time(training: Trainings) -> None:
    """Two with one --save used to replace each other's checkpoints; the first rank's lock tells the
    second start.
    """
    here = training.folder
    with locked(here / "ck"):
        refused = training(ranks=1)
    assert refused.returncode == 2, refused.tail
    taken = f"pretrain_gpt.py: error: another run writes to ck (process {os.getpid()} on "
    assert taken in refused.output
    assert "choose another folder" in refused.output
    assert list((here / "ck").iterdir()) == []


def train_on_small_disk(
    rank: int, world_size: int, *, file_bytes: int, **run: Any
) -> tuple[int, str]:
    """In a worker: a training run whose files may be so large and no larger."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    return train(rank, world_size, **run)


def test_a_full_disk(training: Trainings) -> None:
    """A limit on the size of files stands in for it: the write fails in the same place, in the same
    way.
    """
    here = training.folder
    training(*LARGE, "--train-iters", "2").checked()
    argv = training.line(*LARGE, "--load", "ck", "--override-opt-param-scheduler")
    for status, output in training.ranks(
        2, train_on_small_disk, argv=argv, folder=str(here), file_bytes=2000 * 1024
    ):
        assert status == 1
        (error,) = [
            line for line in output.splitlines() if line.startswith("pretrain_gpt.py: error: ")
        ]
        assert "the checkpoint of iteration 4 could not be written to ck (rank " in error
        assert "a file could not be written in full" in error
        assert (
            "the newest complete checkpoint is iteration 2: resume with --load ck --ckpt-step 2"
            in error
        )
    assert latest(here) == 2
    assert folders.iterations(here / "ck") == [2]


@pytest.mark.wide
def test_damaged_files_are_refused(training: Trainings) -> None:
    here = training.folder
    training().checked()
    shard = here / "ck" / "iter_0000006" / "__1_0.distcp"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 64
    shard.write_bytes(damaged)
    run = training("--load", "ck")
    assert run.returncode == 2
    assert "__1_0.distcp is damaged: its CRC-32 is " in run.output
    assert (
        "the newest complete checkpoint is iteration 4: resume with --load ck --ckpt-step 4"
        in run.output
    )
    unverified = training(*cli.words("--load ck --no-verify-checkpoint --save ck2"))
    assert unverified.checked().iterations == []


@pytest.mark.wide
def test_sigterm_writes_a_checkpoint_and_the_exit_status_says_so(training: Trainings) -> None:
    """It reaches one rank; both save, and both end with 75, "try again", which torchrun reports."""
    here = training.folder

    def terminate(until: Callable[[Callable[[], Any]], Any]) -> None:
        if until(lambda: latest(here) == 2) and (process := rank_in(here, 1)):
            process.send_signal(signal.SIGTERM)

    with watching(terminate):
        run = cli.torchrun(
            here, *training.flags, "--exit-signal-handler", "--train-iters", "100000", cold=True
        )
    assert run.returncode != 0
    assert "exiting program after receiving SIGTERM" in run.output
    assert run.output.count("exitcode  : 75") >= 1
    assert "exitcode  : 0" not in run.output
    last = run.iterations[-1].number
    assert latest(here) == last
    assert folders.problems(folders.iteration_folder(here / "ck", last)) == []


def step_with_a_death(rank: int, world_size: int) -> float:
    """In a worker: rank 1 dies in the middle of the second step's exchange; how long the others
    take to notice.
    """
    trainer = Trainer(Case())
    tokens = iter(batches(2))
    trainer.train(next(tokens))
    if rank == 1:
        muon = trainer.optimizer.chained_optimizers[0].optimizer
        muon.part.engine.passes.advance = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        trainer.train(next(tokens))
    except Exception as error:
        raise RuntimeError(
            f"stopped after {time.monotonic() - started:.0f} s: {type(error).__name__}"
        ) from error
    return time.monotonic() - started


def test_a_rank_that_dies_during_the_exchange(ranks: Pool) -> None:
    """The others stop with an error and do not wait for it: the answers below come within the
    pool's grace.
    """
    with pytest.raises(RankError) as failure:
        ranks(3, step_with_a_death)
    said = str(failure.value)
    assert "rank 1 of 3: died" in said
    for survivor in (0, 2):
        assert f"rank {survivor} of 3: raised" in said
    assert said.count("stopped after") >= 2


def require_unchanged(
    rank: int, world_size: int, *, folder: str, sums: dict[str, int] | None
) -> str | None:
    """What a rank is told of a checkpoint whose checksums the other rank does not see."""
    folders.read_checksums = lambda _: sums if rank == 0 else None if sums else {"__0_0.distcp": 0}
    folders.problems = lambda *_, **how: []
    try:
        checkpoint_loading._require_sound(Path(folder), verify=True)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("sums", [{"__0_0.distcp": 7}, None])
def test_ranks_that_see_other_checksums_do_not_wait_for_each_other(
    ranks: Pool, tmp_path: Path, sums: dict[str, int] | None
) -> None:
    """A file that a file server shows to one rank alone kept the other one in a collective for
    ever.
    """
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    first, second = ranks(2, require_unchanged, folder=str(tmp_path), sums=sums, timeout_s=60)
    assert first == second
    assert (first is None) == (sums is None)
