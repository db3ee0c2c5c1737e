"""The commands that README.md and docs/ show: finds them, and says how each is tried.

A command is a line of an indented or fenced block that begins with a program; a backslash joins
lines.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli import ROOT

PROGRAM = re.compile(
    r"(sudo )?([A-Z_]+=(\"[^\"]*\"|\S+) )*"
    r"(megatron-muon|torchrun|tensorboard|pip|sbatch|srun|scancel|scontrol|docker|apptainer|kubectl|python3?"
    r"|source|export|mkdir|cd|git|(\./)?(scripts|examples|requirements)/\S+)(?= |$)"
)
_COMMENT = re.compile(r"\s{2,}#.*$")

STAND_INS = {
    "torchrun ...": "torchrun --nproc-per-node 2",
    "--config ...": "--config configs/quickstart.yaml",
    "--config FILE": "--config configs/quickstart.yaml",
    "/local/nvme": "local-nvme",
    "/scratch/8b": "scratch-8b",
}
"""Names that a reader replaces, and places that this machine lacks."""

ELSEWHERE = {
    r"torchrun .* pretrain_gpt.py --optimizer muon --use-megatron-fsdp$": (
        "functional/test_command_line.py"
    ),
    r"(torchrun --nproc-per-node 2|python) examples/": "functional/test_examples.py",
    r"torchrun --nproc-per-node 2 -m benchmarks\.": "functional/test_examples.py",
    r"torchrun .* --load runs/ddp ": "functional/test_from_upstream.py",
    r"megatron-muon export .* --to torch_dist ": "functional/test_from_upstream.py",
    r"megatron-muon doctor --gpu": "unit/test_gpu_checks.py",
    r"torchrun --nproc-per-node 8 -m megatron_muon\.cli doctor": ("functional/test_doctor_gpu.py"),
    r"megatron-muon plan --config .* --hardware my-h100.yaml": "unit/test_gpu_checks.py",
    r"megatron-muon plan --config configs/moe-large.yaml --world-size 128": (
        "unit/test_plan_command.py"
    ),
    r"python -m benchmarks\.rehearse": "unit/test_plan_command.py",
    r"(CONFIG|SEEDS)=.* \./examples/|(RECIPES=.* )?\./examples/": "unit/test_sweep_loops.py",
    r"\./scripts/(quickstart|test)\.sh": "unit/test_packaging.py",
    r".*--wandb-project": "unit/test_progress.py",
}
"""Commands, by a pattern of their beginning, that another test runs."""

NOT_HERE = {
    **{pattern: f"tests/{file} runs it" for pattern, file in ELSEWHERE.items()},
    r"megatron-muon data prepare --input \$\(": (
        "reads the packages of the environment, found by the shell"
    ),
    r"source \.venv/bin/activate": "tests run in the environment that it activates",
    r"sudo scripts/slurm/local_cluster\.sh (start|stop)": (
        "needs root and SLURM; test_slurm.py does it"
    ),
    r"export SLURM_CONF=": "belongs to the local SLURM cluster",
    r"sbatch --partition urgent .*--wrap": "needs a SLURM cluster",
    r"docker build -f scripts/containers/": (
        "needs a Docker daemon and NVIDIA's registry; see test_clusters_files.py"
    ),
    r"apptainer build ": "needs Apptainer and NVIDIA's registry; see test_clusters_files.py",
    r"kubectl (apply|delete) ": "needs a cluster; test_installed.py runs what its pods run",
    r"scripts/versions\.py ": "makes an environment and tests in it for a quarter of an hour",
}
"""Commands that are not run, by their beginning, with the reason; the files that they name must
exist.
"""


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
    """README.md and every page under docs/."""
    files = (ROOT / "docs").rglob("*.md")
    return ["README.md", *sorted(str(file.relative_to(ROOT)) for file in files)]


def commands(page: str) -> list[Command]:
    """The commands of a page, in their order."""
    found = []
    for block in blocks((ROOT / page).read_text("utf-8")):
        found += [
            Command(page, number, text) for number, text in _joined(block) if PROGRAM.match(text)
        ]
    return found


def with_stand_ins(text: str) -> str:
    """A command with what a reader would put in the place of names."""
    for name, stand_in in STAND_INS.items():
        text = text.replace(name, stand_in)
    return text


def copy_repository(folder: Path) -> None:
    """Copy the files that a reader has, and make what commands expect."""
    files = ("README.md", "pretrain_gpt.py")
    for name in (*files, "docs", "configs", "scripts", "examples", "benchmarks", "megatron_muon"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / "local-nvme").mkdir()
    tasks = re.findall(
        r"^    (--lr .*)$", (ROOT / "docs/clusters.md").read_text("utf-8"), re.MULTILINE
    )
    (folder / "rates.txt").write_text("\n".join(tasks) + "\n", "utf-8")


def blocks(text: str) -> Iterator[list[tuple[int, str]]]:
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
