"""Checks of what flags name on disk: data, the checkpoint to load, directories to write. They need no torch."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from megatron_muon.checkpoint.files import TRACKER
from megatron_muon.data.vocabulary import check_vocabulary, read_head
from megatron_muon.errors import UserError


def require_data(args: argparse.Namespace) -> None:
    """Refuse missing or damaged data, and a split that leaves a set without documents.

    Raises:
        UserError: names the file and what to type.
    """
    given = [args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path]
    files = (args.data_args_path, args.per_split_data_args_path)
    if args.mock_data or args.skip_train:
        return
    if not any(given) and not any(files):
        raise UserError(
            "no training data: give --data-path PREFIX (made by megatron-muon data prepare), "
            "or --mock-data for random tokens"
        )
    for prefix in (token for paths in given if paths for token in paths):
        if _is_number(prefix):
            continue  # the weight of the prefix that follows
        for suffix in (".bin", ".idx"):
            if not Path(prefix + suffix).exists():
                if prefix.endswith((".bin", ".idx")) and Path(prefix).exists():
                    raise UserError(f"--data-path {prefix}: leave {prefix[-4:]} out; type --data-path {prefix[:-4]}")
                raise UserError(
                    f"{prefix}{suffix} does not exist; --data-path takes the prefix of a .bin and an .idx file; type "
                    f"megatron-muon data prepare --input TEXT --output {prefix}"
                )
        read_head(prefix)
    for prefix in args.data_path or ():
        if not _is_number(prefix):
            _check_split(prefix, args.split or "969, 30, 1")


def check_vocabularies(args: argparse.Namespace) -> None:
    """Refuse data that is there and whose token ids are not those of the run's vocabulary.

    Args:
        args: validated settings, with the padded size of the vocabulary.

    Raises:
        UserError: names the data, its tokenizer and the run's.
    """
    if args.mock_data or args.skip_train:
        return
    given = [args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path]
    for prefix in dict.fromkeys(token for paths in given if paths for token in paths):
        if not _is_number(prefix) and all(Path(prefix + suffix).exists() for suffix in (".bin", ".idx")):
            check_vocabulary(prefix, args)


def _check_split(prefix: str, split: str) -> None:
    """Refuse a set without documents: megatron-core 0.19 would count its epochs for ever."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    _, documents = read_head(prefix)
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, part in zip(("training", "validation", "test"), bounds, strict=True):
        if part is not None and round(part[0] * documents) == round(part[1] * documents):
            raise UserError(
                f"--split {split} leaves no document of {prefix} for {name}: it has {documents:,} in all; prepare more "
                "(a text file is one document, and so is a line of JSONL), or choose another --split: 100,0,0 trains "
                "on all of it"
            )


def check_load(args: argparse.Namespace) -> None:
    """Refuse a --load without a checkpoint, where megatron-core 0.19 would train from scratch after a line in the log.

    A run that loads what it saves itself has none before its first start.
    """
    folder = Path(args.load)
    tracked = (folder / TRACKER).exists()
    if tracked or args.pretrained_checkpoint or (args.save and Path(args.save).resolve() == folder.resolve()):
        return
    raise UserError(
        f"--load {args.load} holds no checkpoint: it has no {TRACKER}; give the --save directory of the run to go on "
        "from, or leave --load out to start from scratch"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_writable(directory: Path, flag: str) -> None:
    """Refuse a directory of `flag` that cannot be written; makes it where it is missing.

    Raises:
        UserError: names it and the reason.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{flag} {directory}: cannot write there ({error.strerror}); choose a directory that this user may write"
        ) from error
