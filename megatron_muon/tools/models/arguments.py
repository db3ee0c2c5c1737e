"""Arguments that commands on checkpoints share; importable without torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_muon.tools.parser import CommandParser

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_checkpoint_arguments(parser: CommandParser) -> None:
    """Adds the arguments that say which checkpoint to read, and how."""
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR",
        help="a run's folder, its --save directory, or one iteration's folder")  # fmt: skip
    parser.add_argument("--tokenizer", metavar="DIR",
        help="a tokenizer that transformers loads, instead of the run's (export: none writes none)")  # fmt: skip
    parser.add_argument("--no-verify-checkpoint", action="store_true",
        help="do not compare the files with their checksums first")  # fmt: skip


def add_model_arguments(parser: CommandParser) -> None:
    """Adds the arguments that say where the model runs, and how."""
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (auto)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto",
        help="of the computation (auto: the run's on a GPU, float32 on a CPU)")  # fmt: skip


def not_negative(text: str) -> float:
    """A number of at least 0, for argparse."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, found {text!r}")
    return value


def fraction(text: str) -> float:
    """A number above 0 and up to 1, for argparse."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, found {text!r}")
    return value


def above_zero(text: str) -> float:
    """A number above 0, for argparse."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, found {text!r}")
    return value


def seed(text: str) -> int:
    """A seed that torch takes, for argparse."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**63 - 1}, found {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
