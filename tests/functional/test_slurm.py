"""scripts/slurm on a real SLURM of two nodes on the loopback, from scripts/slurm/local_cluster.sh.

All jobs are submitted at once and run side by side, because each start costs ten seconds of
imports. MUON_REQUIRE_SLURM turns "cannot be installed here" from a skip into a failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_muon.checkpoint import folders
from megatron_muon.tools.train.records import read_events
from tests.functional.test_train import write_config
from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings

SCRIPTS = cli.ROOT / "scripts/slurm"
CLUSTER = SCRIPTS / "local_cluster.sh"
STEPS = 60
"""Some seconds of training: time enough to be preempted."""

FLAGS = f"""
    {" ".join(cli.MUON)} --data-parallel-sharding-strategy optim_grads_params
    --muon-fp32-matmul-prec highest --global-batch-size 4 --train-iters {STEPS}
    --save ck --save-interval 100000 --tensorboard-dir tensorboard --tensorboard-log-interval 1
""".split()
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Cluster:
    """The cluster, and where a job's environment points."""

    env: Mapping[str, str]

    def call(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        """The output of one of SLURM's commands.

        `scontrol` dies by SIGPIPE if the controller, on a busy machine, closes the connection.
        """
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
        for _ in range(3):
            done = subprocess.run(arguments, env=self.env, cwd=cwd, check=False, **how)
            if arguments[0] != "scontrol" or done.returncode != -signal.SIGPIPE:
                break
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, folder: Path, *arguments: str | Path) -> Job:
        """`sbatch ARGUMENTS` in a folder."""
        (folder / "logs").mkdir(parents=True)
        return Job(
            self,
            self.call("sbatch", "--parsable", *arguments, cwd=folder).strip(),
            folder,
        )


@dataclass(frozen=True)
class Job:
    """A job that was submitted in a folder, by its number: 7, or 7_2 for task 2 of an array.

    A task is a job with a number of its own, but that of one of them is the array's too, and then
    stands for all.
    """

    cluster: Cluster
    number: str
    folder: Path

    @property
    def shown(self) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, Restarts, ExitCode, ..."""
        shown = self.cluster.call("scontrol", "show", "job", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def log(self, node: int | None = None) -> str:
        """The log of the batch script, or of a node."""
        kind = ".log" if node is None else f"-{node}-*.log"
        number = self.shown["JobId"] if "_" in self.number else self.number
        found = sorted(self.folder.glob(f"logs/*-{number}{kind}"))
        return "".join(file.read_text("utf-8", errors="replace") for file in found)

    @property
    def iterations(self) -> list[int]:
        """The iterations that it has logged, over all its starts. The last rank logs them."""
        run = cli.Run(0, self.log(1) or self.log(0), 0.0)
        return [iteration.number for iteration in run.iterations]

    def until(self, condition: Callable[[Job], Any], seconds: float = 100.0) -> None:
        """Wait until `condition(job)` is true."""
        deadline = time.monotonic() + seconds
        while not condition(self):
            late = time.monotonic() > deadline
            assert not late, "\n".join(
                (
                    str(self.shown),
                    self.log(),
                    self.log(0)[-5000:],
                ),
            )
            time.sleep(0.2)

    def ended(self) -> str:
        """Its final state, once it is there."""
        self.until(lambda job: job.shown["JobState"] in FINAL)
        return self.shown["JobState"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="muon-slurm-", dir="/tmp"))
    port = 20000 + os.getpid() % 3000 * 3
    env = {**os.environ, "CLUSTER_DIR": str(folder / "cluster"), "BASE_PORT": str(port)}
    line, how = [CLUSTER, "start"], {"capture_output": True, "text": True}
    started = subprocess.run(line, env=env, check=False, timeout=400, **how)
    if started.returncode:
        shutil.rmtree(folder)
        is_refused = re.search("needs root|cannot be|could not install", started.stderr)
        if is_refused and not env.get("MUON_REQUIRE_SLURM"):
            pytest.skip(f"no SLURM here: {started.stderr.splitlines()[-1]}")
        pytest.fail(started.stderr)
    for_jobs = {
        "SLURM_CONF": str(folder / "cluster/slurm.conf"),
        "MUON_ROOT": str(cli.ROOT),
        "VENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RATES": "0.01 none",  # of the sweep
    }
    yield Cluster({**cli.environment(), **env, **for_jobs})
    subprocess.run([CLUSTER, "stop"], env=env, check=True, timeout=120)
    for process in psutil.process_iter(["cmdline"]):
        assert str(folder) not in " ".join(process.info["cmdline"] or ())
    assert list(folder.iterdir()) == []
    folder.rmdir()


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Submits all of this module, and has the first preempted as soon as it is set up."""
    here = tmp_path_factory.mktemp("jobs")
    config = here / "tiny.yaml"
    write_config(config, *cli.TINY, *FLAGS, *cli.make_corpus(here))
    both = ("--nodes=2", "--cpus-per-task=2")
    training = (SCRIPTS / "pretrain.sbatch", "--config", config)
    preempted = cluster.submit(here / "preempted", *both, *training)

    # In the partition whose jobs are never preempted. SLURM looks at time limits twice a minute,
    # and signals a job that might otherwise be signalled late: 30 to 60 seconds after its start.
    tasks = ("--array=0-1", "--partition=urgent", "--time=4", SCRIPTS / "sweep.sbatch")
    for_ever = ("--train-iters", "100000", "--lr-decay-iters", "100000")
    array = cluster.submit(here / "array", *tasks, "--config", config, *for_ever)
    limited = Job(cluster, f"{array.number}_0", array.folder)
    failing = Job(cluster, f"{array.number}_1", array.folder)

    # from there on SIGTERM leads to a checkpoint
    preempted.until(lambda job: "setting random seeds" in job.log(0))
    other = ("--partition=urgent", *both, "--wrap", "sleep 1")
    cluster.submit(here / "urgent", *other).until(lambda job: job.shown["JobState"] == "COMPLETED")
    limited.until(lambda job: job.iterations)
    # it only waits for its limit: the cores are for other tests
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(array.folder):
                process.nice(19)
                # where cores are shared by sessions
                if (session := Path(f"/proc/{process.pid}/autogroup")).exists():
                    session.write_text("19")
    return {"preempted": preempted, "limited": limited, "failing": failing}


def losses(folder: Path) -> dict[int, float]:
    """Training losses by step, from TensorBoard's files."""
    return {point.step: point.value for point in read_events(folder).points("lm loss")}


def test_preempted_requeued_resumed_and_no_step_lost(
    jobs: dict[str, Job], ranks: Pool, tmp_path: Path
) -> None:
    """Two nodes; every iteration once, and the losses of a run that nobody interrupted."""
    job = jobs["preempted"]
    corpus = cli.make_corpus(tmp_path)
    whole = Trainings(
        ranks,
        tmp_path,
        (*cli.TINY, *FLAGS, *corpus),
    )().checked()
    assert len(whole.iterations) == STEPS

    assert job.ended() == "COMPLETED", job.log()
    assert job.shown["Restarts"] == "1"
    assert "ended by SIGTERM (status 75)\npretrain.sbatch: back into the queue" in job.log()
    assert job.iterations == list(range(1, STEPS + 1))
    saved = folders.iterations(job.folder / "ck")
    assert saved[-1] == STEPS
    assert saved[0] < STEPS
    assert "no checkpoint in ck yet: a first start" in job.log(0)
    assert f"continuing from ck, iteration {saved[0]}\n" in job.log(0)
    found = losses(job.folder / "tensorboard")
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found == losses(tmp_path / "tensorboard")


def test_a_failure_is_not_requeued(jobs: dict[str, Job]) -> None:
    """The second task of the sweep, whose learning rate is not a number."""
    job = jobs["failing"]
    assert job.ended() == "FAILED"
    assert (job.shown["ArrayTaskId"], job.shown["ExitCode"]) == ("1", "2:0")
    assert job.log().endswith("failed with status 2: not requeued\n")
    assert "--lr: invalid float value: 'none'" in job.log(0)


@pytest.mark.wide
def test_a_time_limit_leads_to_a_checkpoint_and_back_into_the_queue(jobs: dict[str, Job]) -> None:
    """The first task of the sweep, and that task alone. In the end its user cancels it for good."""
    job = jobs["limited"]
    save = "runs/lr-sweep/lr=0.01,seed=1/checkpoints"
    job.until(lambda job: f"continuing from {save}, iteration" in job.log(0), seconds=200.0)
    saved = folders.latest(job.folder / save)
    assert isinstance(saved, int)
    job.until(lambda job: job.iterations[-1] > saved)
    iterations = job.iterations
    assert iterations == list(range(1, iterations[-1] + 1))
    assert job.shown["ArrayTaskId"] == "0"
    assert int(job.shown["Restarts"]) >= 1
    ended, requeued = (job.log().count(w) for w in ("ended by SIGTERM", "back into the queue"))
    assert ended == requeued == job.log().count(", start ") - 1
    job.cluster.call("scancel", job.number)
    assert job.ended() == "CANCELLED"
