"""`megatron-muon train`: the arguments, and what is shown; `train` does the work."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_muon.errors import UserError, settling
from megatron_muon.megatron.flags.names import plain
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train import run_folder
from megatron_muon.tools.train.processes import sigterm_unwinds

if TYPE_CHECKING:
    from megatron_muon.tools.train.resolve import Request

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


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon train`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = "megatron-muon train --config FILE [options] [any flag of pretrain_gpt.py]"
    what = parser.add_argument_group("what to train")
    what.add_argument("--config", type=Path, metavar="FILE", help="experiment file; not needed to --resume --out DIR")
    what.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
        help="a flag instead of the file's: lr=0.001, muon_lr=0.01, bf16=true; null takes it away "
        "(repeatable)")  # fmt: skip
    parser.take_megatron_flags("any flag of pretrain_gpt.py, among these or after --: --lr 0.001 --train-iters 50")
    what.add_argument("--nproc", type=positive, metavar="N",
        help="processes on this machine (its GPUs, or 1 where there are none)")  # fmt: skip
    folder = parser.add_argument_group("the run's folder")
    folder.add_argument("--out", type=Path, metavar="DIR",
        help="default: where --tensorboard-dir DIR/tensorboard or --save DIR/checkpoints say, "
        "else runs/NAME-TIME; where the file's own place holds a run, the next free one beside it")  # fmt: skip
    folder.add_argument("--resume", action="store_true",
        help="go on from the run's own checkpoint, where there is one")  # fmt: skip
    folder.add_argument("--no-save", action="store_true",
        help="write no checkpoint; without it a training saves at its end, and when Ctrl-C or SIGTERM "
        "ends it")  # fmt: skip
    folder.add_argument("--overwrite", action="store_true", help="delete the run in that folder and start over")
    how = parser.add_argument_group("how")
    how.add_argument("--dry-run", action="store_true", help="check and show everything, start and write nothing")
    how.add_argument("--quiet", action="store_true", help="show only the heading, warnings, errors and the end")
    how.add_argument("--verbose", action="store_true",
        help="show every setting, and all output of the ranks instead of a line for each log interval")  # fmt: skip
    how.add_argument("--grace", type=positive, default=600, metavar="SECONDS",
        help="what ranks may take to save after Ctrl-C or SIGTERM, before they are killed (600)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Trains, or shows what would be trained."""
    from megatron_muon.tools.train.watching import Watcher

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
    typed = [*args.flags, *(f"--{plain(key)}={value}" for key, value in sets if value.lower() != "null")]
    if args.no_save and pairs(typed, ("--save",)):
        raise UserError("--no-save writes no checkpoint and --save says where to; give one of them")
    if args.resume and pairs(typed, ("--ckpt-step",)) and not pairs(typed, ("--load",)):
        raise UserError(TO_GO_BACK)
    if args.config is None and not (args.resume and args.out):
        raise UserError("no experiment: give --config FILE, or --resume --out DIR to go on with a run")
    config, ranks = args.config or args.out / run_folder.CONFIG, args.nproc
    if ranks is None and args.resume and args.out:
        ranks = run_folder.read_json(args.out / run_folder.RUN).get("ranks")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # two starts in one second have two folders
    return Request(
        config=str(config),
        sets=(*sets, *((("save", "null"),) if args.no_save else ())),
        flags=tuple(args.flags),
        ranks=ranks,
        out=str(args.out.absolute() if str(args.out).startswith("-") else args.out) if args.out else None,
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
