"""What happens to a run whose momentum is on disk when the disk is full, fails, or is not its own, or it is killed."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.checkpoint import files
from tests.functional.test_checkpoints import differences, saved
from tests.support import cli
from tests.support.killable import Killable, wait_for_iteration
from tests.support.pool import Pool
from tests.support.training import Trainings, train

pytestmark = pytest.mark.timeout(200)

NVME = ("--muon-offload", "nvme", "--muon-offload-dir", "momentum", "--muon-offload-buffer-mb", "0.04")
FLAGS = (
    *(*cli.MUON, "--data-parallel-sharding-strategy", "optim_grads_params", "--muon-fp32-matmul-prec", "highest"),
    *("--global-batch-size", "4", "--train-iters", "6", "--save-interval", "2", *NVME),
    *("--num-workers", "0"),
)
LONG = ("--train-iters", "100000", "--num-workers", "1")
"""Until it is killed; with a forked process beside each rank, which lives on for some seconds."""
FAULTY_STEP = 4


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    (tmp_path / "momentum").mkdir()
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *FLAGS))


def lying_there(training: Trainings) -> list[str]:
    return sorted(path.name for path in (training.folder / "momentum").iterdir())


def error_of(run: cli.Run, *, status: int) -> str:
    """What the run says on each rank, which is one and the same line."""
    assert run.returncode == status, run.tail
    lines = [line for line in run.output.splitlines() if line.startswith("pretrain_gpt.py: error: ")]
    assert len(lines) == 2, run.tail
    assert lines[0] == lines[1]
    assert "Traceback" not in run.output, run.tail
    return lines[0]


# ------------------------------------------------------------------------------------------------ in a step


def full_disk(store: Any) -> Callable[[], None]:
    """No file may grow, or be written, beyond the middle of the first one; the answer makes room again."""
    file = store.disk.file
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.size // 2, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_for_good(store: Any) -> Callable[[], None]:
    """As a full disk, for checkpoints too."""
    full_disk(store)
    return lambda: None


def unreadable(store: Any) -> Callable[[], None]:
    """What the store has open takes writes alone."""
    file = store.disk.file
    other = os.open(f"/proc/self/fd/{file._file.fileno()}", os.O_WRONLY | (os.O_DIRECT if file.direct else 0))
    os.dup2(other, file._file.fileno())
    return lambda: None


def train_with(rank: int, world_size: int, *, fault: str, on_rank: int, **run: Any) -> tuple[int, str]:
    """In a worker: a training run that meets a fault on one rank in the middle of its fourth step."""
    from megatron_muon.core.optimizer import ShardedMuon

    prepare, step = ShardedMuon.prepare, ShardedMuon.step
    undo: list[Callable[[], None]] = []

    def prepare_with_fault(self: Any, indices: Any) -> Any:
        if rank == on_rank and self.store.steps == FAULTY_STEP - 1 and not undo:
            undo.append(globals()[fault](self.store))
        return prepare(self, indices)

    def step_and_mend(self: Any, closure: None = None) -> None:
        step(self)
        while undo:
            undo.pop()()

    ShardedMuon.prepare, ShardedMuon.step = prepare_with_fault, step_and_mend
    return train(rank, world_size, **run)


def with_fault(training: Trainings, fault: str, *flags: str, on_rank: int) -> cli.Run:
    argv = [*training.flags, *flags]
    answers = training.ranks(2, train_with, argv=argv, folder=str(training.folder), fault=fault, on_rank=on_rank)
    assert len({status for status, _ in answers}) == 1, "\n".join(text[-3000:] for _, text in answers)
    return cli.Run(answers[0][0], "".join(text for _, text in answers), 0.0)


@pytest.mark.wide
def test_a_full_disk_in_the_middle_of_a_step(training: Trainings) -> None:
    """The step is finished, its checkpoint is whole, and the run that goes on from it is the undisturbed one."""
    training("--save", "whole").checked()
    assert lying_there(training) == []

    error = error_of(with_fault(training, "full_disk", "--save", "ck", on_rank=1), status=1)
    assert "rank 1 cannot write momentum in " in error
    assert f"in a file of {training.folder}/momentum at offset " in error
    assert "File too large; nothing is lost, what was to be written is kept in memory" in error
    assert error.endswith("Iteration 4 was finished and saved in ck")
    assert lying_there(training) == []
    assert files.latest(training.folder / "ck") == FAULTY_STEP
    assert differences(saved(training, "ck", 4), saved(training, "whole", 4)) == []

    run = training("--load", "ck", "--save", "resumed").checked()
    assert [iteration.number for iteration in run.iterations] == [5, 6]
    assert differences(saved(training, "resumed"), saved(training, "whole")) == []


def test_a_disk_that_can_no_longer_be_read(training: Trainings) -> None:
    """Story: the run went on from zeros and saved them. What is lost is named, and no checkpoint is made without it."""
    error = error_of(with_fault(training, "unreadable", "--save", "ck", on_rank=0), status=1)
    assert "rank 0 cannot read momentum in " in error
    assert "Bad file descriptor; momentum of " in error
    assert error.endswith(" is lost on this rank; start again from a checkpoint")
    assert lying_there(training) == []
    assert files.latest(training.folder / "ck") == 2
    run = training("--load", "ck", "--train-iters", "4", "--override-opt-param-scheduler").checked()
    assert [iteration.number for iteration in run.iterations] == [3, 4]


def test_a_checkpoint_that_finds_no_room_either(training: Trainings) -> None:
    """Both are told in one line, with the checkpoint to go back to."""
    error = error_of(with_fault(training, "full_for_good", "--save", "ck", on_rank=1), status=1)
    assert "rank 1 cannot write momentum in " in error
    assert "Iteration 4 was finished, and is lost: the checkpoint of iteration 4 could not be written to ck" in error
    assert "resume with --load ck --ckpt-step 2" in error
    assert files.latest(training.folder / "ck") == 2
    assert lying_there(training) == []


def test_without_a_place_to_save(training: Trainings) -> None:
    error = error_of(with_fault(training, "full_disk", on_rank=0), status=1)
    assert "rank 0 cannot write momentum in " in error
    assert error.endswith("Iteration 4 was finished; without --save it is lost")
    assert lying_there(training) == []


# ------------------------------------------------------------------------------------------------ before the first


@pytest.fixture
def small_disk(training: Trainings) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = training.folder / "momentum"
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine mounts no tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small(training: Trainings, small_disk: Path) -> None:
    (small_disk / "weights.bin").write_bytes(b"somebody's")
    run = training()
    error = error_of(run, status=2)
    assert "--muon-offload-dir" in error
    assert "is too small (No space left on device): momentum of the ranks on " in error
    needed, of_rank = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+)(?: bytes| of them)", error))
    assert run.iterations == []
    assert lying_there(training) == ["weights.bin"]
    assert needed > of_rank > 0


def make_stores(rank: int, world_size: int, *, folder: str, limit: int | None) -> tuple[str | None, list[bool]]:
    """In a worker: two stores of a run of which rank 1 alone has momentum; the refusal, and which are on disk."""
    from megatron_muon.core.layout import Layout, row_sharded
    from megatron_muon.errors import UserError
    from megatron_muon.offload.run import OffloadRun

    if limit is not None and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run = OffloadRun("nvme", "fp32", directory=folder)
    try:
        for rows in ([16, 16], [16, 256]):
            layout = Layout(2, tuple(row_sharded(f"w{i}", (n, 256), [0, n]) for i, n in enumerate(rows)))
            run.make_store(layout, rank, torch.device("cpu"))
    except UserError as refusal:
        return str(refusal), []
    on_disk = [store.on_disk for store in run.stores]
    run.close()
    return None, on_disk


def test_ranks_without_momentum_take_part(ranks: Pool, tmp_path: Path) -> None:
    """Story: they did not ask for failures with the others, who waited."""
    assert ranks(2, make_stores, folder=str(tmp_path), limit=None) == [(None, [True, True])] * 2
    assert list(tmp_path.iterdir()) == []

    answers = ranks(2, make_stores, folder=str(tmp_path), limit=1 << 17)
    (refusal, _), (again, _) = answers
    assert again == refusal
    assert [on_disk for _, on_disk in answers] == [[], []]
    files_of_rank = (3 * 16 + 256) * 1024
    assert "is too small (File too large): momentum of the ranks on " in refusal
    assert f"need {files_of_rank:,} bytes, {files_of_rank:,} of them on the rank that failed. " in refusal
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ killed


def kill_a_run(training: Trainings, killable: Killable) -> list[int]:
    """Kill the ranks of a run after two steps; their process ids."""
    pids = killable.start(training.folder, *training.flags, *LONG)
    wait_for_iteration(training.folder, pids, 2)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert killable.wait() == [-signal.SIGKILL] * 2
    return pids


def test_a_killed_run_leaves_nothing(training: Trainings, killable: Killable) -> None:
    """Story: its files kept every later start out until somebody had typed a command to remove them."""
    kill_a_run(training, killable)
    assert lying_there(training) == []
    training("--train-iters", "1").checked()


def test_a_second_run_in_the_same_directory(training: Trainings, killable: Killable) -> None:
    """Each has files of its own, and both train on."""
    pids = killable.start(training.folder, *training.flags, *LONG)
    wait_for_iteration(training.folder, pids, 2)
    training("--train-iters", "2").checked()
    log = training.folder / f"run-{pids[-1]}.log"
    last = cli.Run(0, log.read_text(), 0.0).iterations[-1].number
    wait_for_iteration(training.folder, pids, last + 2)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert killable.wait() == [-signal.SIGTERM] * 2
    assert lying_there(training) == []
