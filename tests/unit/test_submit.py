"""`megatron-muon submit`: what it finds before a job is queued, and the exact command that it would
type.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_muon import cli, shipped
from megatron_muon.checkpoint import folders
from megatron_muon.errors import ExitStatus
from megatron_muon.tools import submit as command_module
from megatron_muon.tools.train.processes import ROOT

CONFIG = """\
MODEL_ARGS:
  --num-layers: 2
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 32
  --max-position-embeddings: 32
  --micro-batch-size: 1
  --train-iters: 100
  --tokenizer-type: NullTokenizer
  --vocab-size: 256
  --mock-data: true
  --lr: 0.01
  --save: ck
  --save-interval: 10
"""


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """Runs `submit --config run.yaml --nodes 2 --dry-run ARGUMENTS` where no SLURM is; (status,
    output, errors).
    """
    monkeypatch.chdir(tmp_path)
    for name in ("VENV", "CONTAINER_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("run.yaml").write_text(CONFIG)

    def run(*arguments: str, dry: bool = True) -> tuple[int, str, str]:
        line = [
            "submit",
            "--config",
            "run.yaml",
            "--nodes",
            "2",
            *(["--dry-run"] if dry else []),
            *arguments,
        ]
        return cli.main(line), *capsys.readouterr()

    return run


def command(output: str) -> list[str]:
    """The sbatch line."""
    (line,) = [
        line for line in output.splitlines() if " sbatch " in line and line.startswith("MUON_ROOT=")
    ]
    return shlex.split(line)


EVERY_OPTION = (
    *(
        "--gpus-per-node",
        "8",
        "--time",
        "4:00:00",
        "--partition",
        "gpu",
        "--account",
        "me",
        "--job-name",
        "it",
    ),
    *("--sbatch=--qos=high", "--sbatch=--exclusive", "--", "--lr", "1e-3"),
)


@pytest.mark.parametrize(
    ("image", "arguments", "env", "options", "flags"),
    [
        ("", (), [f"VENV={sys.prefix}"], ["--job-name=run"], []),
        (
            "image.sqsh",
            EVERY_OPTION,
            ["NPROC_PER_NODE=8"],  # an image has its own Python
            [
                "--job-name=it",
                "--gpus-per-node=8",
                "--time=4:00:00",
                "--partition=gpu",
                "--account=me",
                "--qos=high",
                "--exclusive",
            ],
            ["--lr", "1e-3"],
        ),
    ],
)
def test_a_dry_run_shows_the_command(submit, monkeypatch, image, arguments, env, options, flags):
    """Every option reaches sbatch, and flags its script."""
    monkeypatch.setenv("CONTAINER_IMAGE", image)
    status, output, _ = submit(*arguments)
    assert status == 0
    assert command(output) == [
        *(f"MUON_ROOT={ROOT}", *env, "sbatch", "--export=ALL", "--nodes=2", *options),
        *(str(ROOT / "scripts/slurm/pretrain.sbatch"), "run.yaml", *flags),
    ]
    assert "ck: a first start" in output
    assert re.search("logs/(run|it)-JOB.log", output)
    assert not Path("logs").exists()


def test_it_says_from_where_the_run_goes_on(submit):
    Path("ck").mkdir()
    Path("ck", folders.TRACKER).write_text("30")
    assert "ck: goes on from iteration 30\n" in submit()[1]
    status, _, errors = submit("--", "--ckpt-step", "20")
    assert (status, errors.count("to go back, start another run in a folder of its own")) == (
        ExitStatus.USAGE,
        1,
    )
    assert submit("--", "--ckpt-step", "20", "--load", "pretrained")[0] == 0


def test_what_ranks_would_refuse_is_refused_before_the_queue(submit):
    """For CUDA and the job's ranks, on a login node without a GPU, each task by its line."""
    Path("runs.txt").write_text(
        "--save a --global-batch-size 8\n--save b --global-batch-size 16 --lr -1 --min-lr 0\n"
    )
    status, output, errors = submit(
        "--array", "runs.txt", "--gpus-per-node", "4", "--", "--hidden-size", "66"
    )
    assert (status, output) == (2, "")
    heads = (
        r"runs\.txt:{}: megatron-core refuses .*assert args.hidden_size % args.num_attention_heads"
        r" == 0"
    )
    assert re.search(heads.format(1), errors)
    assert re.search(r"runs\.txt:2: --lr -1 ", errors)
    assert errors.count("\n") == 2


def test_an_array_has_a_task_for_each_line(submit):
    Path("rates.txt").write_text("--lr 1e-3 --save 'runs/one of them'\n--lr 2e-3 --save runs/b\n")
    status, output, _ = submit("--array", "rates.txt", "--at-once", "1", "--nproc-per-node", "1")
    assert status == 0
    assert "--array=1-2%1" in command(output)
    assert "ARRAY_FLAGS=rates.txt" in command(output)


UNSAVED = "without --save DIR and --save-interval N the run could not be resumed"


@pytest.mark.parametrize(
    ("change", "tasks", "arguments", "message"),
    [
        ("--lr: -> --lrr:", None, (), "does not know --lrr; did you mean --lr?"),
        ("", None, ("--", "--no-such-flag"), "unknown flag --no-such-flag"),
        ("", None, ("--", "--unset", "save"), UNSAVED),
        ("--save-interval: 10 -> --seed: 1", None, (), UNSAVED),
        (
            "",
            None,
            ("--nproc-per-node", "4", "--", "--tensor-model-parallel-size", "3"),
            "world size (8) is not",
        ),
        ("", None, ("--array", "none.txt"), "--array none.txt: [Errno 2] No such file"),
        ("", None, ("--at-once", "2"), "--at-once 2 is for arrays; give --array FILE too"),
        ("", "", (), "--array rates.txt is empty; write a line of flags for each task"),
        ("", "--lr 1e-3 --save 'a\n", (), "--array rates.txt: No closing quotation"),
        (
            "",
            "--lr 1e-3\n\n",
            (),
            "rates.txt:2: a line holds the flags of a task, and this one is blank",
        ),
        ("", "--lr 1e-3\n--lr 2e-3\n", (), "rates.txt:2: --save ck is that of an earlier line too"),
        (
            "",
            "--lr 1e-3 --save a\n--lrr 2e-3 --save b\n",
            (),
            "unknown flag --lrr; did you mean --lr?",
        ),
    ],
)
def test_what_would_fail_after_hours_in_the_queue(submit, change, tasks, arguments, message):
    if change:
        Path("run.yaml").write_text(CONFIG.replace(*change.split(" -> ")))
    if tasks is not None:
        Path("rates.txt").write_text(tasks)
        arguments = ("--array", "rates.txt")
    status, output, errors = submit(*arguments)
    assert status == ExitStatus.USAGE
    assert errors.startswith("megatron-muon: error: ")
    assert message in errors
    assert "sbatch" not in output


def test_what_sbatch_refuses_and_that_it_is_missing_is_one_line(submit, tmp_path):
    status, _, errors = submit(dry=False)
    assert status == ExitStatus.USAGE
    assert re.search("sbatch is not installed here.*scripts/slurm/local_cluster.sh start", errors)
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\nprintf 'sbatch: error: Invalid qos\\nspecification\\n' >&2\nexit 1\n"
    )
    sbatch.chmod(0o755)
    status, _, errors = submit(dry=False)
    assert (
        status,
        errors.count("sbatch refused the job: sbatch: error: Invalid qos specification"),
    ) == (1, 1)


def test_an_installed_package_needs_no_checkout(submit, tmp_path, monkeypatch):
    monkeypatch.setattr(command_module, "ROOT", tmp_path)
    status, output, _ = submit(
        "--config", "configs/quickstart.yaml", "--", "--save", "ck", "--save-interval", "10"
    )
    assert status == 0
    (line,) = [
        line for line in output.splitlines() if " sbatch " in line and line.startswith("VENV=")
    ]
    words = shlex.split(line)
    script, config = words[words.index("--job-name=quickstart") + 1 :][:2]
    assert Path(script) == shipped.FOLDER / "scripts/slurm/pretrain.sbatch"
    assert config == "configs/quickstart.yaml", "nodes may have the package elsewhere, in an image"


def test_the_script_starts_the_installed_package_where_there_is_no_checkout(tmp_path):
    for name, code in (
        ("scontrol", "echo node0"),
        ("srun", 'printf "%s\\n" "$@"'),
        ("venv/bin/python3", "exit 1"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()  # as in a checkout of Megatron-LM, which is not ours
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NAME": "it",
    }
    env = {**job, "SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}

    def starts(config: str, **more: str) -> tuple[int, list[str]]:
        line = [
            "bash",
            str(shipped.FOLDER / "scripts/slurm/pretrain.sbatch"),
            config,
            "--lr",
            "1e-3",
        ]
        done = subprocess.run(
            line, cwd=tmp_path, env={**env, **more}, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.splitlines()

    status, lines = starts("configs/quickstart.yaml", VENV=str(tmp_path / "venv"))
    assert status == 0
    module = [
        "-m",
        "megatron_muon.pretrain_gpt",
        "--config",
        "configs/quickstart.yaml",
        "--lr",
        "1e-3",
    ]
    assert lines[lines.index("--rdzv-id") + 2 :][: len(module)] == module
    status, lines = starts("configs/quickstart.yaml", CONTAINER_IMAGE="image.sqsh")
    assert lines[lines.index("--container-mounts") + 1] == f"{tmp_path}:{tmp_path}"
    status, lines = starts("configs/quickstart.yaml", CONTAINER_IMAGE="image.sif")
    inside = [
        *("apptainer", "exec", "--nv", "--bind", f"{tmp_path}:{tmp_path}", "--pwd", str(tmp_path)),
        "image.sif",
    ]
    inside += ["python3", "-m", "megatron_muon.tools.train.node"]
    assert lines[lines.index("apptainer") :][: len(inside)] == inside
    assert starts("configs/quickstart.yaml")[0] == 2, "nobody says where the package is"
    assert starts("mine.yaml", VENV=str(tmp_path / "venv"))[0] == 2
