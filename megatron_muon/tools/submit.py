"""`megatron-muon submit`: puts a training into SLURM's queue, after its flags have been checked.

It calls `sbatch` with scripts/slurm/pretrain.sbatch, which trains, and requeues itself until the
run is finished. What takes hours to find out in a queue is found here.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_muon import shipped
from megatron_muon.errors import RunFailedError, UserError
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train.processes import ROOT

SCRIPT = shipped.FOLDER / "scripts/slurm/pretrain.sbatch"
LOGS = Path("logs")

EXAMPLES = """\
examples:
  megatron-muon submit --config configs/quickstart.yaml --nodes 2 --dry-run
  megatron-muon submit --config configs/llama3-8b.yaml --nodes 4 --gpus-per-node 8 --time 4:00:00 -- \\
      --save /scratch/8b --save-interval 500
  megatron-muon submit --config configs/quickstart.yaml --nodes 1 --array rates.txt --at-once 4
"""

DESCRIPTION = """\
Submits a training to SLURM, with a script that resumes after preemption and time limits. Needs --save, on a disk that
all nodes share. See docs/clusters.md.
"""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon submit`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="experiment file, as pretrain_gpt.py takes it",
    )
    add("--nodes", type=positive, required=True, metavar="N", help="nodes of the job")
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--gpus-per-node",
        type=positive,
        metavar="G",
        help="GPUs to ask for on each node, with a rank on each",
    )
    ranks.add_argument(
        "--nproc-per-node",
        type=positive,
        metavar="P",
        help=(
            "ranks on each node, where SLURM gives out whole nodes or there are no GPUs "
            "(what the job finds: a rank for each GPU, or one)"
        ),
    )
    add("--time", metavar="D-HH:MM:SS", help="time limit of one start (the partition's)")
    add("--partition", metavar="NAME", help="partition (the cluster's default)")
    add("--account", metavar="NAME", help="account to charge (the user's default)")
    add(
        "--job-name", metavar="NAME", help="name of the job and its logs (the configuration's name)"
    )
    add(
        "--array",
        type=Path,
        metavar="FILE",
        help="an array job: a task for each line of FILE, which holds its flags",
    )
    add(
        "--at-once",
        type=positive,
        metavar="M",
        help="with --array: tasks that may run at once (no limit)",
    )
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more option for sbatch, such as --sbatch=--qos=high; may be repeated",
    )
    add("--dry-run", action="store_true", help="check everything, show the command, submit nothing")
    parser.take_megatron_flags(
        "any flag of pretrain_gpt.py, among these or after --; they win over the file's"
    )


def run(args: argparse.Namespace) -> int:
    """Checks, shows and submits; 0 when the job is queued, or would be."""
    if args.at_once is not None and args.array is None:
        raise UserError(
            f"--at-once {args.at_once} is for arrays; give --array FILE too, or leave it out"
        )
    # on each node; None leaves them to what the job finds
    args.ranks = args.gpus_per_node or args.nproc_per_node
    args.job_name = args.job_name or args.config.stem
    tasks = [()] if args.array is None else read_tasks(args.array)
    for line in check(args, tasks):
        print(line)
    print(
        f"logs: {LOGS}/{args.job_name}-JOB.log, and for each node"
        f" {LOGS}/{args.job_name}-JOB-NUMBER-HOST.log"
    )
    command, env = sbatch(args, len(tasks))
    print(
        *(f"{name}={shlex.quote(value)}" for name, value in env.items()),
        shlex.join(command),
        flush=True,
    )
    if args.dry_run:
        return 0
    # SLURM does not, and a job that cannot open its log ends without a word
    LOGS.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError(
            "sbatch is not installed here: type this on a login node of a SLURM cluster; a"
            " checkout's scripts/slurm/local_cluster.sh starts a cluster of your own to try it on"
        ) from None
    if done.returncode:
        raise RunFailedError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    print(done.stdout, end="")
    return 0


def sbatch(args: argparse.Namespace, tasks: int) -> tuple[list[str], dict[str, str]]:
    """sbatch with its options, the script and the script's arguments; the variables that the script reads."""
    names = ("nodes", "job_name", "gpus_per_node", "time", "partition", "account")
    options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    options["--array"] = args.array and f"1-{tasks}" + (f"%{args.at_once}" if args.at_once else "")
    command = [
        "sbatch",
        "--export=ALL",
        *(f"{key}={value}" for key, value in options.items() if value is not None),
    ]
    command += [*args.sbatch, str(SCRIPT), str(args.config), *args.flags]
    has_python = os.environ.get("VENV") or os.environ.get("CONTAINER_IMAGE")
    env = {
        "MUON_ROOT": ROOT if (ROOT / "pretrain_gpt.py").is_file() else None,
        "VENV": None if has_python else sys.prefix,
        "NPROC_PER_NODE": args.ranks,
        "ARRAY_FLAGS": args.array,
    }
    return command, {name: str(value) for name, value in env.items() if value is not None}


def read_tasks(file: Path) -> list[tuple[str, ...]]:
    """The flags of an array's tasks, one task a line, quoted as in a shell."""
    try:
        tasks = [tuple(shlex.split(line)) for line in file.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--array {file}: {error}") from None
    if not tasks:
        raise UserError(
            f"--array {file} is empty; write a line of flags for each task, such as: --lr 1e-3"
            " --save a"
        )
    if () in tasks:
        raise UserError(
            f"--array {file}:{tasks.index(()) + 1}: a line holds the flags of a task, and this one"
            " is blank"
        )
    return tasks


def check(args: argparse.Namespace, tasks: Sequence[Sequence[str]]) -> list[str]:
    """Checks every task's run as its ranks would, for their number and, with GPUs, for CUDA; a UserError says all.

    Where the number of ranks is left to what the job finds, its first start says what does not fit.
    Returns a line for each task: where it begins.
    """
    from megatron_muon.checkpoint import folders
    from megatron_muon.megatron.flags.config_file import pairs
    from megatron_muon.tools.train.node import TO_GO_BACK
    from megatron_muon.tools.train.resolve import Request, resolve_here

    device = (("device", "cuda"),) if args.gpus_per_node else ()
    every = Request(
        str(args.config), device, ranks=args.ranks, nodes=args.nodes, writes=False, resume=True
    )
    requests = [
        replace(every, flags=(*args.flags, *task), checks=args.ranks is not None) for task in tasks
    ]
    begins: dict[str, str] = {}
    wrong: list[str] = []
    for number, (request, answer) in enumerate(
        zip(requests, resolve_here(requests), strict=True), 1
    ):
        task = "" if args.array is None else f"{args.array}:{number}: "
        if isinstance(answer, UserError):
            wrong += [f"{task}{line}" for line in str(answer).splitlines()]
        elif (save := answer.settings["save"]) is None or answer.settings["save_interval"] is None:
            wrong.append(
                f"{task}without --save DIR and --save-interval N the run could not be resumed; add"
                " them"
            )
        elif save in begins:
            wrong.append(
                f"{task}--save {save} is that of an earlier line too; give each line a --save of"
                " its own"
            )
        else:
            found, load = (
                folders.latest(Path(save)),
                dict(answer.flag_values).get("--load", (save,)),
            )
            if found is not None and load == (save,) and pairs(request.flags, ("--ckpt-step",)):
                wrong.append(f"{task}{TO_GO_BACK}")
            begins[save] = "a first start" if found is None else f"goes on from iteration {found}"
    if wrong:
        raise UserError("\n".join(dict.fromkeys(wrong)))
    return [f"{save}: {start}" for save, start in begins.items()]
