"""`megatron-muon quickstart`: from an empty folder to a trained GPT, by commands that its reader can type as well."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_muon import exit_codes
from megatron_muon.command_parser import CommandParser, positive

DESCRIPTION = """\
Train a small GPT on the source of Python's standard library, with Muon under Megatron-FSDP, on two ranks: in the
current folder, without a GPU, and without a download. Two CPU cores do it in about three minutes:

  1. data/stdlib.bin and .idx, made from the standard library; kept for the next time
  2. megatron-muon train --config configs/quickstart.yaml --nproc 2 --out runs/quickstart
  3. megatron-muon summary runs/quickstart
  4. megatron-muon generate --checkpoint runs/quickstart --untrained: what the model writes, before and after

Where runs/quickstart holds a run, the next one goes to runs/quickstart-2, and so on: none is written over.
"""

EXAMPLES = """\
examples:
  megatron-muon quickstart
  megatron-muon quickstart --muon-lr 0.01
  megatron-muon quickstart --nproc 4 -- --data-parallel-sharding-strategy optim

exit status:
  that of the first step that ends with another than 0
"""

_CONFIG = "configs/quickstart.yaml"
_OUT = Path("runs/quickstart")


@dataclass(frozen=True)
class Quickstart:
    """One run of the quickstart: its folder, its ranks, and flags of pretrain_gpt.py that win over the file's."""

    out: Path
    nproc: int
    flags: tuple[str, ...] = ()


def _prepare(_: Quickstart) -> list[str]:
    # Of another Python's library the text is made anew; text that is up to date stays.
    return ["data", "prepare", "--stdlib", "--output", "data/stdlib", "--overwrite"]


def _train(of: Quickstart) -> list[str]:
    flags = ["--", *of.flags] if of.flags else []
    return ["train", "--config", _CONFIG, "--nproc", str(of.nproc), "--out", str(of.out), *flags]


def _sum_up(of: Quickstart) -> list[str]:
    return ["summary", str(of.out)]


def _write(of: Quickstart) -> list[str]:
    return ["generate", "--checkpoint", str(of.out), "--prompt", "def ", "--untrained", "--wrap", "96"]


STEPS: tuple[Callable[[Quickstart], list[str]], ...] = (_prepare, _train, _sum_up, _write)
"""The commands, in their order, as the arguments of `megatron-muon`."""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon quickstart`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = "megatron-muon quickstart [--nproc N] [any flag of pretrain_gpt.py]"
    parser.add_argument("--nproc", type=positive, default=2, metavar="N", help="ranks (2)")
    parser.take_megatron_flags("any flag of pretrain_gpt.py, here or after --; they win over the file's")


def run(args: argparse.Namespace) -> int:
    """Takes the steps, until one fails; its exit status."""
    from megatron_muon.cli import main

    of = Quickstart(free_folder(), args.nproc, tuple(args.flags))
    for step in STEPS:
        arguments = step(of)
        if step is _write and importlib.util.find_spec("transformers") is None:
            print("transformers is not installed, so the model writes nothing: pip install 'megatron-muon[hf]'")
            break
        print(f"$ megatron-muon {shlex.join(arguments)}", flush=True)
        sys.argv = ["megatron-muon", *arguments]  # which the run's records name as its command
        if status := main(arguments):
            return status
    return exit_codes.OK


def free_folder() -> Path:
    """The first of runs/quickstart, runs/quickstart-2, ... that holds no run; what a failed start left may stay."""
    folders = (_OUT.with_name(f"{_OUT.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([_OUT], folders) if not (folder / "tensorboard").exists())
