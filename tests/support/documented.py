"""The commands that README.md and docs/ show: finds them, and says how each is tried.

A command is a line of an indented or fenced block that begins with a program; a backslash joins lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli import ROOT

PROGRAM = re.compile(
    r"(sudo )?([A-Z_]+=\S+ )*"
    r"(megatron-muon|torchrun|tensorboard|pip|sbatch|srun|scancel|scontrol|docker|apptainer|kubectl|python3?"
    r"|source|export|mkdir|cd|git|(\./)?(scripts|examples|requirements)/\S+)(?= |$)"
)
_COMMENT = re.compile(r"\s{2,}#.*$")

STAND_INS = {
    "torchrun ...": "torchrun --nproc-per-node 2",
    "--config ...": "--config configs/quickstart.yaml",
    "--config FILE": "--config configs/quickstart.yaml",
    "--config my.yaml": "--config configs/quickstart.yaml",
    "/local/nvme": "local-nvme",
    "/scratch/8b": "scratch-8b",
}
"""Names that a reader replaces, and places that this machine lacks."""

NOT_HERE = {
    r"megatron-muon data prepare --input \$\(": "reads the packages of the environment, found by the shell",
    r"source \.venv/bin/activate": "tests run in the environment that it activates",
    r"sudo scripts/slurm/local_cluster\.sh (start|stop)": "needs root and SLURM; test_slurm.py does it",
    r"export SLURM_CONF=": "belongs to the local SLURM cluster",
    r"sbatch --partition urgent .*--wrap": "needs a SLURM cluster",
    r"docker build -f scripts/containers/": "needs a Docker daemon and NVIDIA's registry; see test_clusters_files.py",
    r"apptainer build ": "needs Apptainer and NVIDIA's registry; see test_clusters_files.py",
    r"kubectl (apply|delete) ": "needs a cluster; test_installed.py runs what its pods run",
    r"scripts/versions\.py ": "makes an environment and tests in it for a quarter of an hour",
}
"""Commands that are not run, by their beginning, with the reason; the files that they name must exist."""

LEFT_OUT = {
    **{pattern: reason for pattern, reason in NOT_HERE.items() if not pattern.startswith(("source", "megatron-muon"))},
    r"\./scripts/(quickstart|test)\.sh": "sets up an environment; the quickstart has run before the first command",
    r"pip install": "installs packages; Reader.pip checks that the extras exist",
    r"torchrun --nproc-per-node 2 pretrain_gpt.py --optimizer muon --use-megatron-fsdp$": "test_command_line.py",
    r".*--config \.\.\./|export DATA_PATH=": "needs a checkout of Megatron-LM; see test_train.py",
    r".*--wandb-project": "needs wandb; see test_wandb.py",
    r".*--nnodes 2": "needs a second machine",
    r"(?!.*--dry-run).*(megatron-muon submit|sbatch)": "needs a SLURM cluster; Reader tries it dry",
    r".*--peers deepspeed": "needs DeepSpeed; see test_bench_peers.py",
    r"\./examples/": "sweeps for an hour; see test_sweep.py",
}
"""Commands that are not typed, by a pattern of their beginning, with the reason."""


@dataclass(frozen=True)
class Command:
    """A documented command.

    Attributes:
        page: file, relative to the repository.
        line: its first line's number.
        text: as it would be typed, without the comment behind it.
    """

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages() -> list[str]:
    """README.md and every page under docs/, but for those that `megatron-muon report` has written."""
    files = (file for file in (ROOT / "docs").rglob("*.md") if file.name != "report.md")
    return ["README.md", *sorted(str(file.relative_to(ROOT)) for file in files)]


def commands(page: str) -> list[Command]:
    """The commands of a page, in their order."""
    found = []
    for block in _blocks((ROOT / page).read_text("utf-8")):
        found += [Command(page, number, text) for number, text in _joined(block) if PROGRAM.match(text)]
    return found


def names_of_tests(file: Path) -> set[str]:
    """The names of a file's tests."""
    return set(re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE))


def _blocks(text: str) -> Iterator[list[tuple[int, str]]]:
    """Code blocks: numbered lines without their indentation."""
    block: list[tuple[int, str]] = []
    fenced, after_blank = False, True
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or (line.startswith("    ") and (after_blank or block)):
            block.append((number, line if fenced else line[4:]))
        elif line.strip() and block:
            yield block
            block = []
        after_blank = not line.strip()
    if block:
        yield block


def _joined(block: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Whole commands: continued lines in one."""
    lines = iter(block)
    for number, line in lines:
        text = line
        while text.endswith("\\"):
            text = text[:-1].rstrip() + " " + next(lines)[1].strip()
        yield number, _COMMENT.sub("", text).strip()
