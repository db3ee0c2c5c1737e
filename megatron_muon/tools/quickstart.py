"""`megatron-muon quickstart`: from an empty folder to a trained GPT, by documented commands."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from datetime import datetime
from pathlib import Path

from megatron_muon.errors import ExitStatus, install
from megatron_muon.shipped import QUICKSTART, QUICKSTART_DATA
from megatron_muon.tools.parser import CommandParser, positive

DESCRIPTION = """\
Trains a small GPT on the source code of Python's standard library, with Muon under Megatron-FSDP
on two ranks, in the current folder. It needs no GPU and no download, takes about three minutes on
two free CPU cores, and runs the commands data prepare, train, compare and generate.

--train-iters N shortens the run. Another quickstart writes to runs/quickstart-TIME.
"""

EXAMPLES = """\
examples:
  megatron-muon quickstart
  megatron-muon quickstart --nproc 4 --micro-batch-size 2 --train-iters 50
"""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon quickstart`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = "megatron-muon quickstart [--nproc N] [any flag of pretrain_gpt.py]"
    parser.add_argument("--nproc", type=positive, default=2, metavar="N", help="ranks (default: 2)")
    parser.take_megatron_flags("any flag of pretrain_gpt.py; overrides configs/quickstart.yaml")


def run(args: argparse.Namespace) -> int:
    """Runs the steps until one fails; its exit status."""
    from megatron_muon.cli import main

    out = Path("runs/quickstart")
    if out.exists():
        out = Path(f"{out}-{datetime.now():%Y%m%d-%H%M%S}")
    data = f"data prepare --stdlib --output {QUICKSTART_DATA}".split()
    train = f"train --config {QUICKSTART} --nproc {args.nproc} --out {out}".split()
    if args.flags:
        train += ["--", *args.flags]
    generate = ["generate", "--checkpoint", str(out), "--prompt", "def "]
    for arguments in (data, train, ["compare", str(out)], generate):
        if arguments[0] == "generate" and importlib.util.find_spec("transformers") is None:
            print(f"transformers is not installed, so no text is shown; {install('hf')}")
            break
        print(f"$ megatron-muon {shlex.join(arguments)}", flush=True)
        sys.argv = ["megatron-muon", *arguments]  # the command in the run's records
        if status := main(arguments):
            return status
    return ExitStatus.OK
