"""`megatron-muon sweep`: an experiment file at many settings and seeds, and one table of what came of it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_muon.checkpoint.locks import Lock
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.flag_names import plain
from megatron_muon.megatron.places import LOG
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.screen import progress
from megatron_muon.tools.train import run_folder
from megatron_muon.tools.train.command import assignment
from megatron_muon.tools.train.processes import sigterm_unwinds

if TYPE_CHECKING:
    from megatron_muon.tools.sweep.trials import Plan

DESCRIPTION = """\
Trains an experiment file at every point of a grid with several seeds, each run in its own folder below --out, as
`megatron-muon train` does, and writes results.csv and results.json there. The same command goes on where it was
stopped: runs that are done are skipped, those with a checkpoint resumed, others started again.

--grid KEY=VALUE,VALUE KEY=VALUE,... tries every combination; several --grid are alternatives. A key is a flag of
pretrain_gpt.py without its dashes; KEY=null takes the file's away.
"""

EXAMPLES = """\
examples:
  megatron-muon sweep --config configs/quickstart.yaml --nproc 2 --seeds 3 --set save=null --out runs/compare \\
      --grid optimizer=adam lr=1e-3,2e-3,4e-3 --grid optimizer=muon lr=4e-3,8e-3,1.6e-2
  megatron-muon sweep --config configs/quickstart.yaml --grid lr=4e-3,8e-3 --list-flags > rates.txt
  megatron-muon report runs/compare --out runs/compare/report

exit status:
  0 all runs finished or diverged, 1 a run failed (the others went on), 2 a mistake of the user, 130 Ctrl-C, 143 SIGTERM
"""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon sweep`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", required=True, help="experiment file")
    add(
        "--grid",
        action="append",
        nargs="+",
        metavar="KEY=VALUE,...",
        required=True,
        help="settings to combine; repeat it for alternatives",
    )
    add(
        "--seeds",
        type=positive,
        default=1,
        metavar="N",
        help="run each point with the seeds 1 to N (1)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="a setting of all runs, as of train (repeatable)",
    )
    add("--out", type=Path, metavar="DIR", help="the sweep's folder (runs/NAME-sweep)")
    add(
        "--overwrite",
        action="store_true",
        help="delete runs that were trained with other settings, and train them anew",
    )
    add("--nproc", type=positive, metavar="N", help="processes of each run (GPUs, or 1 without)")
    add(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="runs at once on this machine, which share its cores and GPUs evenly (1)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check all, show runs and commands, start and write nothing",
    )
    add(
        "--list-flags",
        action="store_true",
        help=(
            "print a line of flags for each run, as array tasks of scripts/slurm take them, and end"
        ),
    )
    parser.take_megatron_flags("any flag of pretrain_gpt.py, for all runs, among these or after --")


def run(args: argparse.Namespace) -> int:
    """Runs the sweep, or shows what it would run."""
    from megatron_muon.tools.sweep import trials
    from megatron_muon.tools.train.resolve import Request, check_gpus
    from megatron_muon.tools.train.train import prepare

    sets = tuple(assignment(text) for text in args.sets)
    out = args.out or Path("runs", f"{run_folder.name_of(args.config)}-sweep")
    tasks = trials.tasks_of(args.grid, args.seeds, out)
    _check_flags(args.flags, sets, {key for task in tasks for key, _ in task.settings})
    every = Request(
        config=str(args.config),
        sets=sets,
        flags=tuple(args.flags),
        ranks=args.nproc,
        writes=not (args.dry_run or args.list_flags),
        command=shlex.join(("megatron-muon", *sys.argv[1:])),
    )
    with sigterm_unwinds(), progress(f"checking the settings of {len(tasks)} runs", "runs"):
        plans = trials.resolve(tasks, every)
    if args.list_flags:
        print("\n".join(shlex.join(plan.flags()) for plan in plans))
        return 0
    if args.dry_run:
        for plan in plans:
            print(f"{plan.task.name}: {plan.state}, {plan.task.folder}")
            print(
                f"  {prepare(replace(plan.request, overwrite=True), plan.resolved).shown_command}"
            )
            print(f"  with {shlex.join(plan.flags())}")
        print("dry run: nothing was started or written")
        return 0
    if plans[0].resolved.device == "cuda":
        check_gpus(plans[0].resolved.ranks, plans[0].resolved.gpus, jobs=args.jobs)
    with Lock(
        out / ".sweep.lock", f"a sweep is under way in {out}", "give another --out DIR"
    ).held():
        if not args.overwrite:
            trials.refuse_changed(plans)
        return _run(args, plans, out)


def _run(args: argparse.Namespace, plans: Sequence[Plan], out: Path) -> int:
    from megatron_muon.megatron.provenance import origin
    from megatron_muon.tools.sweep.trials import CSV, JSON, Results, Sweep

    head = {
        "command": plans[0].request.command,
        "config": str(args.config),
        "seeds": args.seeds,
        **origin(),
    }
    tasks = [plan.task for plan in plans]
    sweep = Sweep(plans, args.jobs)
    done = len(plans) - len(sweep.to_do)
    print(f"{len(plans)} runs in {out}: {done} done before, {len(sweep.to_do)} to do", flush=True)
    sweep.run(lambda: Results(tasks).write(out, head))
    results = Results(tasks)
    results.write(out, head)
    print("", results.table(), "", *(f"note: {note}" for note in results.notes), sep="\n")
    print(f"results: {out / CSV}, {out / JSON}")
    if sweep.signal is not None:
        print("stopped; the same command resumes it")
        return 128 + sweep.signal
    failed = [row for row in results.rows if row["outcome"] != "finished" and not row["diverged"]]
    for row in failed:
        print(
            f"{row['outcome']}: see {row['folder']}/{LOG}; the same command tries again",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _check_flags(
    flags: Sequence[str], sets: Iterable[tuple[str, str]], keys: Iterable[str]
) -> None:
    """Refuses what would make all runs one, or give them one place for their files; typed flags win over the grid."""
    typed = {flag.partition("=")[0] for flag in flags}
    varied = {f"--{plain(key)}" for key in keys}
    if twice := typed & varied:
        raise UserError(
            f"{min(twice)} is in --grid and beside it, where it holds for all runs; give it once"
        )
    kept = {f"--{plain(key)}" for key, value in sets if value.lower() not in ("null", "false")}
    if own := {"--seed", "--save", "--tensorboard-dir"} & {*typed, *varied, *kept}:
        raise UserError(
            f"{min(own)}: each run of a sweep has its own folder below --out, and its seed from"
            " --seeds N"
        )
