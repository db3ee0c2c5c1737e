"""`megatron-muon sweep`: an experiment file at many settings and seeds, and one table of what came of it.

This module has the arguments and what is shown; `grid` says what is tried, `trials` runs it, `results` sums up.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_muon.errors import UserError
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.progress import progress
from megatron_muon.tools.sweep.grid import Point, Task, parse_grids, tasks_of
from megatron_muon.tools.train import run_folder
from megatron_muon.tools.train.command import assignment
from megatron_muon.tools.train.processes import sigterm_unwinds
from megatron_muon.tools.train.screen import is_terminal

if TYPE_CHECKING:
    from megatron_muon.tools.sweep.trials import Plan
    from megatron_muon.tools.train.train import Outcome

DESCRIPTION = """\
Trains an experiment file at every point of a grid with several seeds, each run in its own folder below --out, as
`megatron-muon train` does, and writes results.csv and results.json there. The same command goes on where it was
stopped: runs that are done are skipped, those with a checkpoint resumed, others started again.

--grid KEY=VALUE,VALUE KEY=VALUE,... tries every combination. Several --grid are alternatives, each for itself, so that
AdamW and Muon get their own learning rates:

  --grid optimizer=adam lr=1e-3,2e-3,4e-3  --grid optimizer=muon lr=4e-3,8e-3,1.6e-2

A key is a flag of pretrain_gpt.py without its dashes; KEY=null takes the file's away. Seeds are 1 to N of --seeds N,
the same for every point.
"""

EXAMPLES = """\
examples:
  megatron-muon sweep --config configs/quickstart.yaml --nproc 2 --grid lr=4e-3,8e-3,1.6e-2
  megatron-muon sweep --config configs/quickstart.yaml --nproc 2 --seeds 3 --set save=null --out runs/compare \\
      --grid optimizer=adam lr=1e-3,2e-3,4e-3 --grid optimizer=muon lr=4e-3,8e-3,1.6e-2
  megatron-muon sweep --config configs/quickstart.yaml --grid lr=4e-3,8e-3 --dry-run
  megatron-muon sweep --config configs/quickstart.yaml --grid lr=4e-3,8e-3 --list-flags > rates.txt
  megatron-muon report runs/compare --out runs/compare/report

exit status:
  0 all runs finished or diverged, 1 a run failed (the others went on), 2 a mistake of the user, 130 Ctrl-C, 143 SIGTERM
"""


_TABLE_WIDTH = 200
"""The table of results is not squeezed into less; a narrower terminal breaks its lines."""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon sweep`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = (
        "megatron-muon sweep --config FILE --grid KEY=VALUE,... [KEY=...] [--grid ...] [options] "
        "[any flag of pretrain_gpt.py]"
    )
    what = parser.add_argument_group("what to try")
    what.add_argument("--config", type=Path, metavar="FILE", required=True, help="experiment file")
    what.add_argument("--grid", action="append", nargs="+", metavar="KEY=VALUE,...", required=True,
        help="settings to combine; repeat it for alternatives")  # fmt: skip
    what.add_argument("--seeds", type=positive, default=1, metavar="N", help="run each point with the seeds 1 to N (1)")
    what.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
        help="a setting of all runs, as of train (repeatable)")  # fmt: skip
    parser.take_megatron_flags("any flag of pretrain_gpt.py, for all runs, among these or after --")
    where = parser.add_argument_group("where")
    where.add_argument("--out", type=Path, metavar="DIR", help="the sweep's folder (runs/NAME-sweep)")
    where.add_argument("--overwrite", action="store_true",
        help="delete runs that were trained with other settings, and train them anew")  # fmt: skip
    where.add_argument("--nproc", type=positive, metavar="N", help="processes of each run (GPUs, or 1 without)")
    where.add_argument("--jobs", type=positive, default=1, metavar="N",
        help="runs at once on this machine, which share its cores and GPUs evenly (1)")  # fmt: skip
    how = parser.add_argument_group("how")
    how.add_argument(
        "--dry-run", action="store_true", help="check all, show runs and commands, start and write nothing"
    )
    how.add_argument("--list-flags", action="store_true",
        help="print a line of flags for each run, as array tasks of scripts/slurm take them, and end")  # fmt: skip
    how.add_argument("--grace", type=positive, default=600, metavar="SECONDS",
        help="what ranks may take to save after Ctrl-C or SIGTERM, before they are killed (600)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the sweep, or shows what it would run."""
    from megatron_muon.tools.sweep import trials
    from megatron_muon.tools.train.resolve import Request, check_gpus
    from megatron_muon.tools.train.train import prepare

    points = parse_grids(args.grid)
    sets = tuple(assignment(text) for text in args.sets)
    _check_flags(sets, args.flags, [setting for point in points for setting in point.settings])
    out = args.out or Path("runs", f"{run_folder.name_of(args.config)}-sweep")
    tasks = tasks_of(points, args.seeds, out)
    every = Request(
        config=str(args.config),
        sets=sets,
        flags=tuple(args.flags),
        ranks=args.nproc,
        writes=not (args.dry_run or args.list_flags),
        grace_s=args.grace,
        command=shlex.join(("megatron-muon", *sys.argv[1:])),
    )
    with sigterm_unwinds(), progress(f"checking the settings of {len(tasks)} runs", "runs"):
        plans = trials.resolve(tasks, every)
    if args.list_flags:
        print("\n".join(shlex.join(plan.flags()) for plan in plans))
        return 0
    if args.dry_run:
        for plan in plans:
            changed = "".join(f" ({change})" for change in plan.changes()[:1])
            print(f"{plan.task.name}: {plan.state}{changed}, {plan.task.folder}")
            print(f"  {prepare(replace(plan.request, overwrite=True), plan.resolved).shown_command}")
            print(f"  with {shlex.join(plan.flags())}")
        print("dry run: nothing was started or written")
        return 0
    if plans[0].resolved.device == "cuda":
        check_gpus(plans[0].resolved.ranks, plans[0].resolved.gpus, jobs=args.jobs)
    with trials.only_one(out):
        plans = [replace(plan) for plan in plans]  # the states that their folders have now
        if not args.overwrite:
            trials.refuse_changed(plans)
        return _run(args, points, plans, out)


def _run(args: argparse.Namespace, points: Sequence[Point], plans: Sequence[Plan], out: Path) -> int:
    from rich.console import Console

    from megatron_muon.megatron.provenance import origin
    from megatron_muon.tools.sweep.results import CSV, JSON, Results, Row
    from megatron_muon.tools.sweep.trials import Sweep
    from megatron_muon.tools.train.run_summary import in_words

    head = {"command": plans[0].request.command, "config": str(args.config), "seeds": args.seeds, **origin()}
    rows = {plan.task: Row.of(plan.task) for plan in plans}
    sweep = Sweep(plans, args.jobs)
    to_do = len(sweep.to_do)
    print(f"{len(plans)} runs in {out}: {len(plans) - to_do} done before, {to_do} to do", flush=True)
    failed: dict[Task, str] = {}

    def ended(plan: Plan, outcome: Outcome) -> None:
        if outcome.summary["outcome"] in ("failed", "refused", "killed") and not outcome.summary["diverged"]:
            failed[plan.task] = in_words(outcome.summary, why=True)
        rows[plan.task] = Row.of(plan.task)
        Results(points, list(rows.values())).write(out, head)

    with sweep.screen:
        sweep.run(ended)
    results = Results(points, list(rows.values()))
    results.write(out, head)
    console = Console(highlight=False, soft_wrap=True, no_color=not is_terminal())
    console.width = max(console.width, _TABLE_WIDTH)
    console.print()
    console.print(results.table())
    if any(results.best):
        measure = results.final.replace("loss_last", "training loss").replace("_", " ")
        print(f"<- best: the lowest mean {measure} of an optimizer, where all seeds have finished")
    for note in results.notes():
        print(f"note: {note}")
    print(f"\nresults: {out / CSV}, {out / JSON}")
    if sweep.signal is not None:
        print("stopped; the same command resumes it")
        return 128 + sweep.signal
    for task, words in failed.items():
        print(f"failed: {task.name}: {words}; see {task.folder / run_folder.LOG}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {len(plans)} runs failed; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


def _check_flags(settings: Sequence[tuple[str, str]], typed: Sequence[str], in_grid: Sequence[tuple[str, str]]) -> None:
    """Refuses what would make all runs one, or give them one place for their files; typed flags win over the grid."""
    flags = [token.partition("=")[0] for token in typed]
    if twice := next((flag for key, _ in in_grid if (flag := _flag(key)) in flags), None):
        raise UserError(f"{twice} is in --grid and beside it, where it holds for all runs; give it once")
    given = [(f"{key}={value}", _flag(key), value) for key, value in (*settings, *in_grid)]
    for shown, flag, value in (*given, *((flag, flag, "") for flag in flags)):
        if flag == "--seed":
            raise UserError(f"{shown} is that of one run; seeds come from --seeds N, which takes 1 to N")
        if flag == "--tensorboard-dir" or (flag == "--save" and value.lower() not in ("null", "false")):
            raise UserError(
                f"{shown}: every run of a sweep has its own folder below --out; with {flag} in the experiment file "
                f"each writes there, and --set {flag[2:]}=null takes it away"
            )


def _flag(key: str) -> str:
    """The flag that a key of --set or --grid names."""
    return f"--{key.lstrip('-').replace('_', '-').lower()}"
