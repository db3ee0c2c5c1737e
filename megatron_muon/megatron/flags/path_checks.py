"""Checks of what flags name on disk: data, and the checkpoint to load. They need no torch."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megatron_muon.checkpoint.files import TRACKER
from megatron_muon.core.numbers import is_number
from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import check_vocabulary, read_head


def require_data(args: argparse.Namespace) -> None:
    """Refuse missing or damaged data, and a split that leaves a set without documents."""
    if args.mock_data or args.skip_train:
        return
    prefixes = _prefixes(args)
    if not (prefixes or args.data_args_path or args.per_split_data_args_path):
        made = "(made by megatron-muon data prepare)"
        raise UserError(f"no training data: give --data-path PREFIX {made}, or --mock-data for random tokens")
    for prefix in prefixes:
        read_head(prefix)
        if prefix in (args.data_path or ()):
            _check_split(prefix, args.split or "969, 30, 1", needs_validation=bool(args.eval_iters))


def check_vocabularies(args: argparse.Namespace) -> None:
    """Refuse data whose token ids are not of the vocabulary of a run, of which the tokenizer is built."""
    for prefix in _prefixes(args) if not (args.mock_data or args.skip_train) else ():
        if Path(prefix + ".bin").exists():
            check_vocabulary(prefix, args)


def _prefixes(args: argparse.Namespace) -> list[str]:
    """The prefixes of the data, without the weights of blends."""
    given = (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path)
    tokens = dict.fromkeys(token for paths in given for token in paths or ())
    return [token for token in tokens if not is_number(token)]


def _check_split(prefix: str, split: str, *, needs_validation: bool) -> None:
    """Refuse a set without documents: megatron-core 0.19 would count its epochs for ever, or leave training out."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    if not re.fullmatch(r"[\d.]+(,[\d.]+){,2}", split.replace(" ", "")):  # Megatron ignores all other letters
        raise UserError(f"--split {split}: write three numbers, such as 98,2,0 for training, validation and test")
    _, documents = read_head(prefix)
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, part in zip(("training", "validation", "test"), bounds, strict=True):
        needed = name == "training" or (name == "validation" and needs_validation)
        first, end = part or (0.0, 0.0)
        if (needed or part is not None) and round(first * documents) == round(end * documents):
            raise UserError(
                f"--split {split} leaves no document of {prefix} for {name}: it has {documents:,} in all; prepare more "
                "(a text file or a line of JSONL is one), or give --split 100,0,0 --eval-iters 0 to train on all"
            )


def check_load(args: argparse.Namespace) -> None:
    """Refuse a --load without a checkpoint, where megatron-core 0.19 would train from scratch after a line in the log.

    A run that loads what it saves itself has none before its first start.
    """
    folder = Path(args.load)
    is_own = args.save and Path(args.save).resolve() == folder.resolve()
    if not ((folder / TRACKER).exists() or args.pretrained_checkpoint or is_own):
        raise UserError(f"--load {folder} holds no checkpoint, as it has no {TRACKER}; give a run's --save directory")
