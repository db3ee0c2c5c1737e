"""The package as it is installed from a wheel, in folders that hold nothing of the repository; what
a pod runs.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.functional.test_train import write_config
from tests.support import cli

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]

QUICKSTART_S, POD_S = 400, 240


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment in which the wheel is installed, beside the packages of this
    one.
    """
    folder, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    names = "setup.py pyproject.toml MANIFEST.in README.md LICENSE configs scripts megatron_muon"
    paths = [cli.ROOT / name for name in names.split()]
    subprocess.run(["cp", "-r", *paths, source], check=True)
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    # pip of this environment, for the other: a .pth is not followed where pip looks for what is
    # installed
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", source], check=True)
    return folder / "bin"


def environment(installed: Path) -> dict[str, str]:
    """Nothing of the repository on Python's path."""
    env = {**os.environ, "PATH": f"{installed}:{os.environ['PATH']}"}
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        env.pop(name, None)
    return env


def test_a_quickstart_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    short = "--train-iters 2 --eval-interval 2 --eval-iters 1 --save-interval 2"
    line = [installed / "megatron-muon", "quickstart", *short.split()]
    options = {
        "cwd": tmp_path,
        "env": environment(installed),
        "capture_output": True,
        "text": True,
        "check": False,
    }
    done = subprocess.run(line, timeout=QUICKSTART_S, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"taking the package's own, {installed.parent}" in done.stderr
    assert "after 2 iterations" in done.stdout
    assert (tmp_path / "runs/quickstart/checkpoints/iter_0000002").is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"data", "runs"}
    for command in (
        "plan --hf configs/transformers/llama3-8b.json --world-size 64",
        "train --config configs/quickstart.yaml --dry-run --out runs/other",
    ):
        done = subprocess.run(
            [installed / "megatron-muon", *command.split()], timeout=QUICKSTART_S, **options
        )
        assert done.returncode == 0, done.stderr[-3000:]


Start = Callable[[int], subprocess.Popen[bytes]]


@pytest.fixture
def pod(installed: Path, tmp_path: Path, corpus: tuple[str, ...]) -> Iterator[Start]:
    """Starts what a pod of scripts/kubernetes/pytorchjob.yaml runs, with what the operator sets, on
    a tiny model.
    """
    job = yaml.safe_load((cli.ROOT / "scripts/kubernetes/pytorchjob.yaml").read_text("utf-8"))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    more = "--train-iters 60 --save ck --global-batch-size 4".split
    write_config(tmp_path / "tiny.yaml", *cli.MUON, *cli.TINY, *corpus, *more())
    script = container["args"][0].replace("configs/llama3-8b.yaml", "tiny.yaml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int) -> subprocess.Popen[bytes]:
        given = f"""
            OMP_NUM_THREADS=1 NODES=2 GPUS=1 RANK={rank} MASTER_ADDR=localhost MASTER_PORT={port}
            WORLD_SIZE=2 PYTHONUNBUFFERED=1 PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK={rank}
            PET_MASTER_PORT={port} PET_MASTER_ADDR=localhost GLOO_SOCKET_IFNAME=lo
        """
        env = environment(installed) | dict(word.split("=") for word in given.split())
        with (tmp_path / f"pod-{rank}.log").open("ab") as log:
            command = [*container["command"], script]
            started.append(
                subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log),
            )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()


def test_pods_are_started_again_after_a_signal_and_go_on(pod: Start, tmp_path: Path) -> None:
    """A drained node signals one pod: all end with the status that is retried, and their successors
    finish the run.
    """
    worker, master = pod(1), pod(0)
    logs = [tmp_path / f"pod-{rank}.log" for rank in range(2)]

    def said() -> str:
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())

    deadline = time.monotonic() + POD_S
    while not any(
        re.search(r"iteration +5/ +60", log.read_text(errors="replace"))
        for log in logs
        if log.exists()
    ):
        assert master.poll() is None, said()
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)
    worker.send_signal(signal.SIGTERM)
    assert (worker.wait(POD_S), master.wait(POD_S)) == (138, 138), said()
    latest = int(
        (tmp_path / "runs/llama3-8b/checkpoints/latest_checkpointed_iteration.txt").read_text()
    )
    assert 5 <= latest < 60
    master, worker = pod(0), pod(1)
    assert (worker.wait(POD_S), master.wait(POD_S)) == (0, 0), said()
    assert (tmp_path / "runs/llama3-8b/checkpoints/iter_0000060").is_dir()
    went_on = f"continuing from runs/llama3-8b/checkpoints, iteration {latest}"
    assert went_on in logs[0].read_text()
