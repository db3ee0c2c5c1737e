"""`megatron-muon train`: the arguments, and what is shown of a run; `train` does the work.

Of what the ranks print, only this package's warnings, notes and errors are shown; all of it is in
train.log.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.errors import UserError, settling
from megatron_muon.megatron.flags.flag_names import plain
from megatron_muon.megatron.places import CONFIG, LOG, RUN, SUMMARY, read_json
from megatron_muon.tools import screen
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.screen import STOPPING, Screen, Status
from megatron_muon.tools.train import run_folder
from megatron_muon.tools.train.processes import sigterm_unwinds
from megatron_muon.tools.train.run_summary import in_words

if TYPE_CHECKING:
    from megatron_muon.tools.train.resolve import Request
    from megatron_muon.tools.train.train import Experiment, Outcome

DESCRIPTION = """\
Trains what an experiment file says (ENV_VARS, MODEL_ARGS, BASE; Megatron-LM's model_config.yaml load as they are):
launches torchrun with pretrain_gpt.py, shows how it goes in a line for each log interval, and leaves in the run's
folder config.yaml, run.json, train.log (all output of the ranks), tensorboard/ and summary.json.
"""

EXAMPLES = """\
examples:
  megatron-muon train --config configs/quickstart.yaml --nproc 2 --out runs/first
  megatron-muon train --config configs/quickstart.yaml --nproc 2 --optimizer adam --lr 0.001 --out runs/second
  megatron-muon train --config configs/quickstart.yaml --dry-run --train-iters 50
  megatron-muon train --resume --out runs/first

exit status:
  that of the run: 0 finished, 1 failed, 2 a mistake of the user, 16 the loss is not a number (Megatron),
  75 ended by SIGTERM after a checkpoint (start it again with --resume), 130 Ctrl-C, 143 SIGTERM without a checkpoint
"""

_SHOWN = ("megatron-muon: warning: ", "megatron-muon: note: ", "pretrain_gpt.py: error: ")
"""Prefixes of the ranks' lines that are meant for the user."""

_SHORT_S = 60.0
"""A run with less left than this needs no advice on a shorter one."""

_SHORTER = "for less, Ctrl-C (it saves), then --train-iters N or --exit-duration-in-mins N"


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon train`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = "megatron-muon train --config FILE [options] [any flag of pretrain_gpt.py]"
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="experiment file; not needed to --resume --out DIR",
    )
    what.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help=(
            "a flag instead of the file's: lr=0.001, muon_lr=0.01, bf16=true; null takes it away "
            "(repeatable)"
        ),
    )
    parser.take_megatron_flags(
        "any flag of pretrain_gpt.py, among these or after --: --lr 0.001 --train-iters 50"
    )
    what.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="processes on this machine (its GPUs, or 1 where there are none)",
    )
    folder = parser.add_argument_group("the run's folder")
    folder.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=(
            "default: where --tensorboard-dir DIR/tensorboard or --save DIR/checkpoints say, else"
            " runs/NAME-TIME; where the file's own place holds a run, the next free one beside it"
        ),
    )
    folder.add_argument(
        "--resume",
        action="store_true",
        help="go on from the run's own checkpoint, where there is one",
    )
    folder.add_argument(
        "--no-save",
        action="store_true",
        help=(
            "write no checkpoint; without it a training saves at its end, and when Ctrl-C or"
            " SIGTERM ends it"
        ),
    )
    folder.add_argument(
        "--overwrite", action="store_true", help="delete the run in that folder and start over"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--dry-run", action="store_true", help="check and show everything, start and write nothing"
    )
    how.add_argument(
        "--quiet", action="store_true", help="show only the heading, warnings, errors and the end"
    )
    how.add_argument(
        "--verbose",
        action="store_true",
        help=(
            "show every setting, and all output of the ranks instead of a line for each log"
            " interval"
        ),
    )
    how.add_argument(
        "--grace",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="what ranks may take to save after Ctrl-C or SIGTERM, before they are killed (600)",
    )


def run(args: argparse.Namespace) -> int:
    """Trains, or shows what would be trained."""
    if args.quiet and args.verbose:
        raise UserError("--quiet shows less and --verbose shows more; give one of them")
    with settling("reading the command line"):
        request = request_of(args)
    watcher = Watcher(verbose=args.verbose, quiet=args.quiet)
    with watcher.screen:
        watcher.enter(f"checking the settings of {request.config}")
        from megatron_muon.tools.train.train import execute, prepare

        with sigterm_unwinds(), settling("checking the settings"):
            experiment = prepare(request)
        watcher.head(experiment, settings=args.verbose or args.dry_run)
        if args.dry_run:
            watcher.screen.print("dry run: nothing was started or written")
            return 0
        watcher.enter(f"starting the ranks ({experiment.resolved.ranks})")
        outcome = execute(experiment, show=watcher.event)
    watcher.end(outcome, experiment)
    return outcome.status


def request_of(args: argparse.Namespace) -> Request:
    """What the arguments ask for; a UserError for those that do not go together."""
    from megatron_muon.megatron.flags.config_file import pairs
    from megatron_muon.tools.train.node import TO_GO_BACK
    from megatron_muon.tools.train.resolve import Request

    if args.resume and args.overwrite:
        raise UserError("--resume goes on with a run and --overwrite deletes it; give one of them")
    sets = [assignment(text) for text in args.sets]
    typed = [
        *args.flags,
        *(f"--{plain(key)}={value}" for key, value in sets if value.lower() != "null"),
    ]
    if args.no_save and pairs(typed, ("--save",)):
        raise UserError("--no-save writes no checkpoint and --save says where to; give one of them")
    if args.resume and pairs(typed, ("--ckpt-step",)) and not pairs(typed, ("--load",)):
        raise UserError(TO_GO_BACK)
    if args.config is None and not (args.resume and args.out):
        raise UserError(
            "no experiment: give --config FILE, or --resume --out DIR to go on with a run"
        )
    config, ranks = args.config or args.out / CONFIG, args.nproc
    if ranks is None and args.resume and args.out:
        ranks = read_json(args.out / RUN).get("ranks")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # two starts in one second have two folders
    return Request(
        config=str(config),
        sets=(*sets, *((("save", "null"),) if args.no_save else ())),
        flags=tuple(args.flags),
        ranks=ranks,
        out=(
            str(args.out.absolute() if str(args.out).startswith("-") else args.out)
            if args.out
            else None
        ),
        keeps_places=args.config is None,
        default_out=f"runs/{run_folder.name_of(config)}-{stamp}",
        writes=not args.dry_run,
        saves=True,
        resume=args.resume,
        overwrite=args.overwrite,
        grace_s=args.grace,
        command=shlex.join(("megatron-muon", *sys.argv[1:])),
    )


def assignment(text: str) -> tuple[str, str]:
    """Key and value of a `--set`; a UserError where it is not of that form."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip("-"):
        raise UserError(f"--set {text}: write KEY=VALUE, such as --set lr=0.001")
    return key, value


class Watcher:
    """Shows one run: `verbose` all output of the ranks, `quiet` only the heading, warnings, errors and the end."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.screen = Screen(live=not quiet)
        self.status = Status(self.screen)
        self._verbose, self._quiet = verbose, quiet
        self._noted: set[str] = set()

    def enter(self, stage: str) -> None:
        """Starts a stage before the first step; prints a line if there is no live line."""
        self.status.enter(stage)
        if not (self.screen.live or self._quiet or self._verbose):
            self.screen.print(f"{stage} ...")

    def head(self, experiment: Experiment, *, settings: bool) -> None:
        """What runs where; with all settings and the command where asked."""
        resolved, show = experiment.resolved, self.screen.print
        for note in resolved.notes:
            # as the file says: nothing to act on
            if settings or not note.startswith("environment from "):
                self._note(f"megatron-muon: {note}")
        for line in heading(experiment):
            show(screen.wrapped(line, indent=14, width=self.screen.width))
        if settings:
            show(f"\nsettings of {experiment.request.config}")
            for flag in (*resolved.flags, *resolved.filled_in):
                show(f"  {flag.name:<36}  {shlex.join(flag.values) or 'true':<24}  {flag.source}")
            show(f"\ncommand     {experiment.shown_command}\n")

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows an event of the run."""
        kind, show = event["event"], self.screen.print
        if kind == "line":
            if self._verbose:
                show(event["line"])
            elif event["line"].startswith(_SHOWN):
                self._note(event["line"])
        elif kind == "signal":
            self.status.enter(STOPPING)
            show(
                f"{signal.Signals(event['signal']).name}: asking the ranks to end; a second signal"
                " kills them"
            )
        elif (
            kind == "stage"
            and event["stage"]
            and not (self.status.figures or self.status.stage == STOPPING)
        ):
            self.enter(event["stage"])
        else:
            self.status.take(event)
        if kind == "step":
            self._noted.clear()  # what is said again in the next interval is news
        if self._quiet or self._verbose:
            return
        if kind == "step":
            show(screen.step_line(event, self.screen.width))
        elif kind == "estimate" and event["seconds_left"] >= _SHORT_S:
            show(f"about {screen.clock(event['seconds_left'])} left; {_SHORTER}")
        elif kind == "validation":
            show(screen.validation_line(event), "bold")
        elif kind == "saved":
            took = screen.clock(event["seconds"])
            show(f"checkpoint of step {event['step']:,}  took {took}  {event['folder']}")

    def end(self, outcome: Outcome, experiment: Experiment) -> None:
        """How it ended, and what to type next."""
        summary, show = outcome.summary, self.screen.print
        file, log = (experiment.folder.root / name for name in (SUMMARY, LOG))
        if not outcome.started:
            show(f"already finished: {summary['iterations']} iterations; see {file}")
            return
        words = screen.wrapped(in_words(summary), width=self.screen.width)
        show(f"\n{words}", "bold" if outcome.status == 0 else "bold red")
        if summary["error"]:
            show(f"why: {summary['error']}")
        for line in () if self._verbose else outcome.trace:
            show(f"  {line}")
        if summary["go_on"]:
            show(
                f"{'to go on' if summary['checkpoint'] else 'nothing was saved; to start again'}:"
                f" {summary['go_on']}"
            )
        show(f"see {file}, {log}")

    def _note(self, text: str) -> None:
        if text not in self._noted:  # every rank says the same
            self._noted.add(text)
            is_error = text.startswith("pretrain_gpt.py: error")
            shown = text if is_error else screen.wrapped(text, width=self.screen.width)
            self.screen.print(
                shown, "red" if is_error else "yellow" if ": warning: " in text else ""
            )


def heading(experiment: Experiment) -> list[str]:
    """What runs where, in a few lines."""
    resolved, settings = experiment.resolved, experiment.resolved.settings
    words = {
        "num_layers": "layers",
        "hidden_size": "wide",
        "num_attention_heads": "heads",
        "num_experts": "experts",
    }
    shape = ", ".join(f"{settings[key]} {word}" for key, word in words.items() if settings.get(key))
    ranks = f"{resolved.ranks} on {'GPUs' if resolved.device == 'cuda' else 'CPUs'}"
    if settings.get("use_megatron_fsdp"):
        ranks += f", Megatron-FSDP {settings['data_parallel_sharding_strategy']}"
    for kind in ("tensor_model", "pipeline_model", "expert_model", "context"):
        if (size := settings.get(f"{kind}_parallel_size") or 1) > 1:
            ranks += f", {kind.removesuffix('_model')} parallel {size}"
    count = settings.get("train_iters")
    steps = f"{count:,}" if count else f"{settings.get('train_samples') or '?'} samples"
    if (batch := settings.get("global_batch_size")) and (length := settings.get("seq_length")):
        steps = f"{steps} of {batch * length:,} tokens, {batch} sequences of {length}"
    name = run_folder.name_of(Path(experiment.request.config))
    env = screen.printable(" ".join(f"{name}={value}" for name, value in resolved.env.items()))
    rows = {
        "ranks": ranks,
        "steps": steps,
        "environment": env,
        "run folder": experiment.folder.root,
        "going on": experiment.checkpoint and f"from {experiment.checkpoint}",
        "filled in": (
            resolved.filled_in
            and f"{len(resolved.filled_in)} (what this machine needs); --dry-run lists all settings"
        ),
    }
    return [
        # a checkpoint's arguments may tell
        f"{name}: {settings['optimizer']} on a GPT{shape and f' of {shape}'}",
        *(f"  {row:<11} {value}" for row, value in rows.items() if value),
    ]
