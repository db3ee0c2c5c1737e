"""`megatron-muon submit`: puts a training into SLURM's queue, after its flags have been checked.

It calls `sbatch` with scripts/slurm/pretrain.sbatch, which trains, and requeues itself until the run is finished. What
takes hours to find out in a queue is found here.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_muon import shipped
from megatron_muon.errors import RunFailedError, UserError
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train.processes import ROOT

if TYPE_CHECKING:
    from megatron_muon.tools.train.resolve import Resolved

SCRIPT = shipped.FOLDER / "scripts/slurm/pretrain.sbatch"
LOGS = Path("logs")

_NO_CLUSTER = re.compile("configuration (source|file)|contact slurm controller", re.IGNORECASE)
"""What sbatch says where it knows of no cluster, or reaches none."""
_WHERE = (
    "type this on a login node of a SLURM cluster, or see the command alone with --dry-run; a checkout's "
    "scripts/slurm/local_cluster.sh starts a cluster of your own to try it on"
)

EXAMPLES = """\
examples:
  what would be submitted, without SLURM:
    megatron-muon submit --config configs/quickstart.yaml --nodes 2 --dry-run
  four nodes of eight GPUs, for four hours at a time until it is finished:
    megatron-muon submit --config configs/llama3-8b.yaml --nodes 4 --gpus-per-node 8 --time 4:00:00 -- \\
        --save /scratch/8b --save-interval 500
  a sweep, one line of flags per task, four tasks at once:
    megatron-muon submit --config configs/quickstart.yaml --nodes 1 --array rates.txt --at-once 4
"""

DESCRIPTION = """\
Submit a training to SLURM, with a script that resumes after preemption and time limits.

Needs --save among the configuration's flags or after --, on a disk that all nodes share. See docs/clusters.md.
"""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon submit`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="experiment file, as pretrain_gpt.py takes it")
    add("--nodes", type=positive, required=True, metavar="N", help="nodes of the job")
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--gpus-per-node", type=positive, metavar="G",
        help="GPUs to ask for on each node, with a rank on each")  # fmt: skip
    ranks.add_argument("--nproc-per-node", type=positive, metavar="P",
        help="ranks on each node, where SLURM gives out whole nodes or there are no GPUs "
        "(what the job finds: a rank for each GPU, or one)")  # fmt: skip
    add("--time", metavar="D-HH:MM:SS", help="time limit of one start (the partition's)")
    add("--partition", metavar="NAME", help="partition (the cluster's default)")
    add("--account", metavar="NAME", help="account to charge (the user's default)")
    add("--job-name", metavar="NAME", help="name of the job and its logs (the configuration's name)")
    add("--array", type=Path, metavar="FILE", help="an array job: a task for each line of FILE, which holds its flags")
    add("--at-once", type=positive, metavar="M", help="with --array: tasks that may run at once (no limit)")
    add("--sbatch", action="append", default=[], metavar="OPTION",
        help="one more option for sbatch, such as --sbatch=--qos=high; may be repeated")  # fmt: skip
    add("--dry-run", action="store_true", help="check everything, show the command and the script, submit nothing")
    parser.take_megatron_flags("any flag of pretrain_gpt.py, among these or after --; they win over the file's")


def run(args: argparse.Namespace) -> int:
    """Checks, shows and submits; 0 when the job is queued, or would be."""
    if args.at_once is not None and args.array is None:
        raise UserError(f"--at-once {args.at_once} is for arrays; give --array FILE too, or leave it out")
    args.ranks = args.gpus_per_node or args.nproc_per_node  # on each node; None leaves them to what the job finds
    args.job_name = args.job_name or args.config.stem
    tasks = [()] if args.array is None else read_tasks(args.array)
    runs = check(args, tasks)
    command, env = sbatch(args, len(tasks))
    for name, value in settings(args, len(tasks), runs[0]):
        print(f"{name:<12} {value}")
    typed = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    print(*typed, shlex.join(command), flush=True)
    if args.dry_run:
        print(f"\n{'-' * 20} {SCRIPT} {'-' * 20}\n{SCRIPT.read_text('utf-8')}", end="")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError(f"sbatch is not installed here: {_WHERE}")
    LOGS.mkdir(exist_ok=True)  # SLURM does not, and a job that cannot open its log ends without a word
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode and _NO_CLUSTER.search(done.stderr):
        said = done.stderr.strip().splitlines()[-1].removeprefix("sbatch: ")
        raise UserError(f"sbatch finds no SLURM cluster from here ({said}): {_WHERE}")
    if done.returncode:
        raise RunFailedError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    print(done.stdout, end="")
    return 0


def sbatch(args: argparse.Namespace, tasks: int) -> tuple[list[str], dict[str, str]]:
    """sbatch with its options, the script and the script's arguments; the variables that the script reads."""
    names = ("nodes", "job_name", "gpus_per_node", "time", "partition", "account")
    options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    options["--array"] = args.array and f"1-{tasks}" + (f"%{args.at_once}" if args.at_once else "")
    command = ["sbatch", "--export=ALL", *(f"{key}={value}" for key, value in options.items() if value is not None)]
    command += [*args.sbatch, str(SCRIPT), str(args.config), *args.flags]
    has_python = os.environ.get("VENV") or os.environ.get("CONTAINER_IMAGE")
    env = {
        "MUON_ROOT": str(ROOT) if (ROOT / "pretrain_gpt.py").is_file() else None,
        "VENV": None if has_python else sys.prefix,
        "NPROC_PER_NODE": args.ranks,
        "ARRAY_FLAGS": args.array,
    }
    return command, {name: str(value) for name, value in env.items() if value is not None}


def settings(args: argparse.Namespace, tasks: int, first: Resolved) -> list[tuple[str, str]]:
    """(name, value) of what a user should see; `first` is the first run."""
    each = f"{args.ranks} = {args.nodes * args.ranks} ranks" if args.ranks else "a rank for each GPU, or one"
    ahead = "" if any(option.startswith("--signal") for option in args.sbatch) else "; SIGTERM three minutes ahead"
    array = [] if args.array is None else [("tasks", f"{tasks}, from {args.array}")]
    return [
        ("config", str(args.config)),
        ("flags", shlex.join(args.flags) or "none beside the file's"),
        *array,
        ("nodes", f"{args.nodes} x {each}"),
        ("time limit", (args.time or "the partition’s") + ahead),
        ("checkpoints", "of each task in a folder of its own" if array else _checkpoints(first)),
        ("python", os.environ.get("CONTAINER_IMAGE") or os.environ.get("VENV") or sys.prefix),
        ("logs", f"{LOGS}/{args.job_name}-JOB.log, and for each node {LOGS}/{args.job_name}-JOB-NUMBER-HOST.log"),
    ]


def read_tasks(file: Path) -> list[tuple[str, ...]]:
    """The flags of an array's tasks, one task a line, quoted as in a shell; a UserError names a line without flags."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --array {str(file)!r}: {getattr(error, 'strerror', 'it is not text')}") from None
    if not lines:
        raise UserError(f"--array {file} is empty; write a line of flags for each task, such as: --lr 1e-3 --save a")
    tasks = []
    for number, line in enumerate(lines, 1):
        try:
            flags = shlex.split(line)
        except ValueError as error:
            raise UserError(f"{file}:{number}: {error}; quote as in a shell") from None
        if not flags or not flags[0].startswith("--"):
            raise UserError(f"{file}:{number}: a line holds the flags of a task, found {line!r}; line N is task N")
        tasks.append(tuple(flags))
    return tasks


def check(args: argparse.Namespace, tasks: Sequence[Sequence[str]]) -> list[Resolved]:
    """Every task's run, checked as its ranks would, for their number and, with GPUs, for CUDA; a UserError says all.

    Where the number of ranks is left to what the job finds, its first start says what does not fit.
    """
    from megatron_muon.tools.train.resolve import Request, resolve_here

    device = (("device", "cuda"),) if args.gpus_per_node else ()
    every = Request(str(args.config), device, ranks=args.ranks, nodes=args.nodes, writes=False, resume=True)
    requests = [replace(every, flags=(*args.flags, *task), checks=args.ranks is not None) for task in tasks]
    runs: list[Resolved] = []
    wrong: list[str] = []
    folders: dict[str, int] = {}
    for number, answer in enumerate(resolve_here(requests), 1):
        task = "" if args.array is None else f"{args.array}:{number}: "
        if isinstance(answer, UserError):
            wrong += [f"{task}{line}" for line in str(answer).splitlines()]
            continue
        runs.append(answer)
        save = answer.settings["save"]
        if save is None:
            wrong.append(f"{task}no --save, so the run could not be resumed; add --save DIR, on a disk all nodes share")
        elif answer.settings["save_interval"] is None:
            wrong.append(f"{task}--save {save} needs --save-interval N too; add it after --")
        elif (first := folders.setdefault(save, number)) != number:
            wrong.append(f"{task}--save {save} is that of task {first} too; give each line a --save of its own")
    if wrong:
        raise UserError("\n".join(dict.fromkeys(wrong)))
    return runs


def _checkpoints(run: Resolved) -> str:
    """Where the run begins, as `node.requeueable` settles it."""
    from megatron_muon.checkpoint import files

    save, last = run.settings["save"], run.settings["train_iters"]
    found = files.latest(Path(save))
    if found is None:
        return f"{save}: a first start"
    if isinstance(found, int) and last is not None and found >= last:
        return f"{save}: finished, iteration {found} of {last}; raise --train-iters to go on"
    return f"{save}: goes on from iteration {found}"
