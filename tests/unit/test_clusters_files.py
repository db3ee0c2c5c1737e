"""The files for Kubernetes and for container images: what can be checked of them without either."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

from megatron_muon import cli
from megatron_muon.errors import ExitStatus

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "scripts/containers"
CLAIM, JOB = (
    yaml.safe_load((ROOT / f"scripts/kubernetes/{name}.yaml").read_text())
    for name in ("storage", "pytorchjob")
)
REPLICAS = JOB["spec"]["pytorchReplicaSpecs"]
POD = REPLICAS["Master"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(SCRIPT,) = CONTAINER["args"]
RETRIED = 138
"""The one status that every version of the operator starts again; from 1 to 127 the job has failed.
"""


def test_the_job_has_what_the_operator_requires():
    assert (JOB["apiVersion"], JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(REPLICAS) == {"Master", "Worker"}
    assert all(
        of["restartPolicy"] == "ExitCode" and of["template"]["spec"] == POD
        for of in REPLICAS.values()
    )
    assert CONTAINER["name"] == "pytorch"
    assert [port["name"] for port in CONTAINER["ports"]] == ["pytorchjob-port"]
    nodes = {each["name"]: each["value"] for each in CONTAINER["env"]}
    assert sum(of["replicas"] for of in REPLICAS.values()) == int(nodes["NODES"])
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(nodes["GPUS"])
    name, seconds = nodes["PET_RDZV_CONF"].split("=")
    assert name == "join_timeout"
    assert int(seconds) > 3600, "torchrun gives up after ten minutes"
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    assert volumes["storage"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_pod_types_a_command_that_exists():
    line = SCRIPT.replace("\\\n", " ")
    (command,) = re.findall(
        r"^python3 -m megatron_muon.tools.train.node (.*) &$", line, re.MULTILINE
    )
    values = "GPUS=8 NODES=2 RANK=1 MASTER_ADDR=llama3-8b-master-0 MASTER_PORT=23456"
    for value in values.split():
        command = command.replace(
            "${}".format(*value.split("=")),
            value.partition("=")[2],
        )
    assert "$" not in command
    args = parse_args(shlex.split(command))
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", 1, "8")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "llama3-8b-master-0:23456")
    assert (args.module, args.training_script) == (True, "megatron_muon.pretrain_gpt")
    flags = args.training_script_args
    assert "--save" in flags
    assert (ROOT / flags[flags.index("--config") + 1]).is_file()


@pytest.fixture
def pod(tmp_path):
    """Starts the pod's script with a `python3` of the code that is given."""

    def start(
        code: str,
        rank: int = 0,
        port: int = 1,
    ) -> subprocess.Popen[bytes]:
        command = tmp_path / "python3"
        command.write_text(f"#!/bin/bash\n{code}\n")
        command.chmod(0o755)
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "NODES": "2",
            "GPUS": "8",
        }
        env |= {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.append(
            subprocess.Popen([*CONTAINER["command"], SCRIPT], cwd=tmp_path, env=env),
        )
        return started[-1]

    started: list[subprocess.Popen[bytes]] = []
    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("status", "pods"),
    [
        (0, 0),
        (ExitStatus.FAILURE, 1),
        (ExitStatus.USAGE, 2),
        (ExitStatus.TEMPFAIL, RETRIED),
        (143, RETRIED),
    ],
)
def test_what_is_to_be_started_again_ends_with_a_status_that_the_operator_retries(
    pod, status, pods
):
    assert pod(f"exit {status}").wait(30) == pods


def test_sigterm_reaches_the_training_and_is_waited_for(pod, tmp_path):
    """The script is process 1 of its container: Kubernetes signals it alone, and what it leaves
    behind is killed.
    """
    process = pod(
        "trap 'sleep 0.3; touch saved; exit 75' TERM; touch began; while :; do sleep 0.05; done"
    )
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == RETRIED
    assert (tmp_path / "saved").exists()


def test_other_pods_wait_for_the_first(pod, tmp_path):
    """A pod that came a minute earlier gave up, and the whole job had failed."""
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        process = pod("touch began", rank=1, port=first.getsockname()[1])
        time.sleep(0.3)
        assert process.poll() is None
        first.listen()
        assert process.wait(30) == 0
    assert (tmp_path / "began").exists()


def test_both_recipes_copy_what_the_installation_reads():
    docker, apptainer = (
        (CONTAINERS / name).read_text("utf-8") for name in ("Dockerfile", "Apptainer.def")
    )
    copied = {
        word
        for line in re.findall(r"^COPY (.*) \S+$", docker, re.MULTILINE)
        for word in line.split()
    }
    assert copied == set(re.findall(r"^    (\S+) /opt/megatron-muon/\1$", apptainer, re.MULTILINE))
    assert all((ROOT / name).exists() for name in copied)
    (image,) = re.findall(r"^ARG IMAGE=(\S+)$", docker, re.MULTILINE)
    assert f"From: {image}\n" in apptainer
    for recipe in (docker, apptainer):
        assert "scripts/containers/install.sh" in recipe
    text = "".join(file.read_text("utf-8") for file in CONTAINERS.iterdir())
    shown = set(re.findall(r"megatron-muon ([a-z]+)$", text, re.MULTILINE))
    assert shown == {"quickstart"} <= set(cli.COMMANDS)


# SLURM's scripts, with stand-ins for its commands; test_slurm.py has the real ones


@pytest.fixture
def submit(tmp_path):
    """Runs a script of scripts/slurm as a job would; its exit status, and the words of srun."""
    for name, code in (
        ("scontrol", "echo node0"),
        ("srun", 'printf "%s\\n" "$@"'),
        ("venv/bin/python3", "exit 1"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()  # as in a checkout of Megatron-LM, which is not ours
    job = "SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node0 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NAME=it"
    env = dict(word.split("=") for word in job.split())
    env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}

    def run(
        script: str,
        *flags: str,
        **more: str,
    ) -> tuple[int, list[str]]:
        line = ["bash", ROOT / f"scripts/slurm/{script}.sbatch", *flags]
        given = {**env, **more}
        done = subprocess.run(line, cwd=tmp_path, env=given, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout.splitlines()

    return run


FLAGS = ("--config", "configs/quickstart.yaml", "--lr", "1e-3")


def test_a_job_starts_the_installed_package_or_the_images_where_there_is_no_checkout(
    submit, tmp_path
):
    status, lines = submit("pretrain", *FLAGS, VENV=str(tmp_path / "venv"))
    assert (status, lines[-7:-1]) == (0, ["-m", "megatron_muon.pretrain_gpt", *FLAGS])
    _, lines = submit("pretrain", *FLAGS, CONTAINER_IMAGE="image.sqsh")
    assert lines[lines.index("--container-mounts") + 1] == f"{tmp_path}:{tmp_path}"
    _, lines = submit("pretrain", *FLAGS, CONTAINER_IMAGE="image.sif")
    inside = f"exec --nv --bind {tmp_path}:{tmp_path} --pwd {tmp_path} image.sif python3 -m"
    start = lines.index("apptainer") + 1
    assert lines[start : start + 9] == inside.split()


def test_a_job_that_cannot_start_says_what_to_type(submit, tmp_path):
    venv = {"VENV": str(tmp_path / "venv")}
    for flags, given, says in (
        (FLAGS, {}, "is not a checkout of megatron_muon: type sbatch in one"),
        (("--config", "mine.yaml"), venv, "mine.yaml does not exist"),
        (("configs/quickstart.yaml",), venv, "needs a configuration: sbatch scripts/slurm/"),
        (FLAGS, {"VENV": "/none"}, "/none/bin/python3 does not exist: run scripts/lib/setup.sh"),
    ):
        status, lines = submit("pretrain", *flags, **given)
        assert status == 2
        assert says in lines[-1]


def test_an_array_has_a_task_for_each_rate_and_seed(submit):
    grid = {"RATES": "1e-3 2e-3", "SEEDS": "5 6", "SLURM_ARRAY_JOB_ID": "7"}
    grid |= {"MUON_ROOT": str(ROOT), "CONTAINER_IMAGE": "i"}
    for task, values in enumerate(("1e-3 5", "2e-3 5", "1e-3 6", "2e-3 6")):
        lr, seed = values.split()
        _, lines = submit("sweep", *FLAGS[:2], SLURM_ARRAY_TASK_ID=str(task), **grid)
        folder = f"runs/lr-sweep/lr={lr},seed={seed}"
        flags = f"--lr {lr} --seed {seed} --save {folder}/checkpoints"
        given = f"{flags} --tensorboard-dir {folder}/tensorboard".split()
        at = lines.index("--lr")
        assert lines[at : at + len(given)] == given
    status, lines = submit("sweep", *FLAGS[:2], SLURM_ARRAY_TASK_ID="4", **grid)
    assert (status, lines) == (2, ["sweep.sbatch: no rate for task 4: --array=0-3"])
