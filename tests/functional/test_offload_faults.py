"""What happens to a run whose state is on disk when the disk is full, fails, or it is killed; in
how little memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.checkpoint import folders
from tests.support import cli
from tests.support.case import Case
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


def full_disk(store: Any) -> Callable[[], None]:
    """No file may grow, or be written, beyond the middle of the first one; the answer makes room
    again.
    """
    file = store.disk.file
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.size // 2, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def unreadable(store: Any) -> Callable[[], None]:
    """What the store has open takes writes alone."""
    file = store.disk.file
    other = os.open(
        f"/proc/self/fd/{file._file.fileno()}", os.O_WRONLY | (os.O_DIRECT if file.direct else 0)
    )
    os.dup2(other, file._file.fileno())
    return lambda: None


def train_with(
    rank: int, world_size: int, *, fault: str, on_rank: int, what: str, saving: bool, **run: Any
) -> tuple[int, str]:
    """In a worker: a training run whose store of `what` meets a fault on one rank: at the start of
    its fourth step, or after it, where the save has begun.
    """
    from megatron_muon.megatron.chained import MuonChainedOptimizer

    step, at_hand = (
        MuonChainedOptimizer.step_with_ready_grads,
        MuonChainedOptimizer.main_weights_at_hand,
    )
    undo: list[Callable[[], None]] = []
    done: list[int] = []

    def meet_fault(self: Any) -> None:
        if rank == on_rank and len(done) == FAULTY_STEP:
            store = next(store for store in self.stores if store.what == what)
            undo.append(globals()[fault](store))

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


def with_fault(
    training: Trainings,
    fault: str,
    *flags: str,
    on_rank: int = 1,
    what: str = "momentum",
    saving: bool = False,
) -> str:
    """The error of a run that meets a fault."""
    run = {"argv": [*training.flags, *KINDS[what], *flags], "folder": str(training.folder)}
    answers = training.ranks(
        2, train_with, **run, fault=fault, on_rank=on_rank, what=what, saving=saving
    )
    assert len({status for status, _ in answers}) == 1, "\n".join(
        text[-3000:] for _, text in answers
    )
    assert lying_there(training) == []
    return error_of(
        cli.Run(answers[0][0], "".join(text for _, text in answers), 0.0),
        status=1,
    )


@pytest.mark.parametrize("what", wide_but(["momentum"], KINDS))
def test_a_full_disk_in_the_middle_of_a_step(training: Trainings, what: str) -> None:
    """Every rank stops before the model gets new weights; the checkpoint before stays."""
    error = with_fault(training, "full_disk", "--save", "ck", what=what)
    # the limit holds for both files of all state
    first = "momentum" if what == "momentum" else "main weights"
    assert (
        f"rank 1 cannot write {first} in a file of {training.folder}/momentum at offset " in error
    )
    assert folders.latest(training.folder / "ck") == 2


@pytest.mark.parametrize("saving", wide_but([False], [False, True]))
@pytest.mark.parametrize("what", wide_but(["momentum"], KINDS))
def test_a_disk_that_can_no_longer_be_read(training: Trainings, what: str, saving: bool) -> None:
    """Story: the run went on from zeros and saved them. What is lost is named, and no checkpoint is
    made without it.
    """
    error = with_fault(training, "unreadable", "--save", "ck", on_rank=0, what=what, saving=saving)
    assert f"rank 0 cannot read {what} in " in error
    assert f"Bad file descriptor; {what} of " in error
    assert error.endswith(" is lost on this rank; start again from a checkpoint")
    assert folders.latest(training.folder / "ck") == 2
    again = cli.words("--load ck --train-iters 4 --override-opt-param-scheduler")
    run = training(*KINDS[what], *again).checked()
    assert [iteration.number for iteration in run.iterations] == [3, 4]


# ------------------------------------------------------------------------------------------------
# before the first


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
    assert "cannot take momentum of a rank on " in error
    assert re.search(
        r"[\d,]{6,} bytes \(No space left on device\); choose a directory with room", error
    )
    assert run.iterations == []
    assert lying_there(training) == ["weights.bin"]


def make_stores(
    rank: int, world_size: int, *, folder: str, limit: int | None
) -> tuple[str | None, list[bool]]:
    """In a worker: two stores of a run of which rank 1 alone has momentum; the refusal, and which
    are on disk.
    """
    from megatron_muon.core.layout import Layout, row_sharded
    from megatron_muon.errors import UserError
    from megatron_muon.offload.run import OffloadRun

    if limit is not None and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run = OffloadRun("nvme", "fp32", directory=folder)
    try:
        for rows in ([16, 16], [16, 256]):
            layout = Layout(
                2,
                tuple(
                    row_sharded(
                        f"w{i}",
                        (n, 256),
                        [0, n],
                    )
                    for i, n in enumerate(rows)
                ),
            )
            run.make_store(layout, rank, torch.device("cpu"))
    except UserError as refusal:
        return str(refusal), []
    on_disk = [store.disk.file is not None for store in run.stores]
    run.close()
    return None, on_disk


def test_ranks_without_momentum_take_part(ranks: Pool, tmp_path: Path) -> None:
    """Story: they did not ask for failures with the others, who waited."""
    assert (
        ranks(
            2,
            make_stores,
            folder=str(tmp_path),
            limit=None,
        )
        == [(None, [True, True])] * 2
    )
    assert list(tmp_path.iterdir()) == []

    answers = ranks(2, make_stores, folder=str(tmp_path), limit=1 << 17)
    (refusal, _), (again, _) = answers
    assert again == refusal
    assert [on_disk for _, on_disk in answers] == [[], []]
    assert (
        f", {(16 + 256) * 1024:,} bytes (File too large); choose a directory with room" in refusal
    )
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

LARGE = Case(
    hidden=256,
    heads=4,
    query_groups=4,
    ffn=1024,
    layers=1,
    vocabulary=16384,
    bf16=True,
)
"""0.8 million parameters of Muon, 8.4 of Adam: on one rank 3 MB of momentum, 67 of moments, 37 of
main weights.
"""

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of mallopt(3)

LIMIT_MB = 100
"""What a process may take beyond what it has once the model is there, with gradients and main
weights.
"""


def train_within(rank: int, world_size: int, *, limit_mb: int, setting: dict[str, Any]) -> str:
    """In a worker: two steps of a large model in so much more memory; empty, or what torch says
    when that ends.
    """
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
    # what is freed goes back at once, however threads take turns
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(M_ARENA_MAX, 1)
    try:
        trainer = model.Trainer(LARGE.but(optimizer=setting))
        for _ in range(2):
            trainer.step(lambda name, shape, step: torch.full(tuple(shape), 1e-3))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.wide
def test_a_model_whose_state_does_not_fit_trains_with_it_on_disk(
    ranks: Pool, tmp_path: Path
) -> None:
    nvme = {
        "muon_offload": "nvme",
        "muon_offload_dir": str(tmp_path),
        "muon_offload_buffer_mb": 3.0,
    }
    settings = {"none": {}, "momentum": nvme, "all": {**nvme, "muon_offload_state": "all"}}
    said = {
        name: ranks(1, train_within, limit_mb=LIMIT_MB, setting=setting)[0]
        for name, setting in settings.items()
    }
    assert "can't allocate memory" in said["none"]
    assert "can't allocate memory" in said["momentum"]
    assert said["all"] == ""
