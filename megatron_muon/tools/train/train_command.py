"""`megatron-muon train`: its arguments; `train` does the work and `watcher` shows it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from megatron_muon.errors import ExitStatus, UserError, settling
from megatron_muon.megatron.flags.config_file import given_flags
from megatron_muon.megatron.places import CONFIG, RUN, SAVE, read_json
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train.processes import sigterm_unwinds
from megatron_muon.tools.train.resolve import resolve
from megatron_muon.tools.train.train import execute, torchrun
from megatron_muon.tools.train.watcher import Watcher

DESCRIPTION = """\
Trains from an experiment file (ENV_VARS, MODEL_ARGS, BASE; Megatron-LM's model_config.yaml files
load unchanged): launches torchrun with pretrain_gpt.py, shows one line per log interval, and writes
config.yaml, run.json, train.log (all output of the ranks), tensorboard/, checkpoints/ and
summary.json to the run's folder.
"""

EXAMPLES = """\
examples:
  megatron-muon train --config configs/quickstart.yaml --nproc 2 --out runs/first
  megatron-muon train --config configs/quickstart.yaml --optimizer adam --lr 0.001 --out runs/second
  megatron-muon train --config configs/quickstart.yaml --dry-run --train-iters 50
  megatron-muon train --resume --out runs/first
"""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon train`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = "megatron-muon train --config FILE [options] [any flag of pretrain_gpt.py]"
    parser.take_megatron_flags(
        "any flag of pretrain_gpt.py, here or after --: --lr 0.001 --train-iters 50; overrides the"
        " file. --unset FLAG removes a flag set there"
    )
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="experiment file; optional with --resume --out DIR",
    )
    add(
        "--nproc",
        type=positive,
        metavar="N",
        help="ranks on this machine (default: one per GPU, or 1 without GPUs)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="the run's folder, for all output that no flag redirects (default: runs/NAME-TIME)",
    )
    add(
        "--resume",
        action="store_true",
        help="continue from the run's own checkpoint, if there is one",
    )
    add(
        "--no-save",
        action="store_true",
        help="write no checkpoint (by default, a run saves at its end and on Ctrl-C or SIGTERM)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check and show all settings without starting or writing anything",
    )


def run(args: argparse.Namespace) -> int:
    """Trains, or shows what would be trained."""
    complete(args)
    watcher = Watcher()
    with watcher.screen:
        watcher.enter(f"checking the settings of {args.config}")
        with sigterm_unwinds(), settling("checking the settings"):
            experiment = resolve(args)
        command = shlex.join(["torchrun", *torchrun(experiment)])
        watcher.head(experiment, command, all_settings=args.dry_run)
        if args.dry_run:
            watcher.screen.print("dry run: nothing was started or written")
            return ExitStatus.OK
        watcher.enter(f"starting the ranks ({experiment.ranks})")
        summary = execute(experiment, show=watcher.event)
    watcher.end(summary, experiment.root)
    return int(summary["status"])


def complete(args: argparse.Namespace) -> None:
    """Completes the arguments; a UserError for some that exclude each other."""
    if args.no_save and SAVE in given_flags(args.flags):
        raise UserError("--no-save writes no checkpoint and --save says where to; give one of them")
    if args.resume:
        if args.out is None:
            raise UserError("--resume continues the run in a folder; give --out DIR")
        args.config = args.config or args.out / CONFIG
        args.nproc = args.nproc or read_json(args.out / RUN).get("ranks")
    if args.config is None:
        raise UserError("give --config FILE, or --resume --out DIR to continue a run")
