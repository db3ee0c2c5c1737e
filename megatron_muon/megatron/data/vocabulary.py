"""Checks of prepared data: whether it is whole, and of the vocabulary of a run."""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import Any

import numpy as np

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import OutputPaths
from megatron_muon.megatron.data.tokenizers import IN_TRAINING, TokenizerSpec

_SAMPLE_TOKENS = 1 << 20


def read_head(prefix: str) -> tuple[np.dtype[Any], int]:
    """What the index (`PREFIX.idx`) says first: the dtype of the token ids, and the number of documents.

    Raises:
        UserError: a file is not there, the index is damaged, or `PREFIX.bin` is shorter than it says.
    """
    remedy = f"type: megatron-muon data prepare --input TEXT --output {prefix}"
    for file in (Path(prefix + ".bin"), Path(prefix + ".idx")):
        if not file.exists():
            raise UserError(f"{file} does not exist; give the prefix of a .bin and an .idx file, or {remedy}")
    from megatron.core.datasets.indexed_dataset import _IndexReader

    try:
        index = _IndexReader(str(file), multimodal=False)
        dtype = np.dtype(index.dtype)
        assert dtype.kind in "iu", dtype
        size = Path(prefix + ".bin").stat().st_size
    except (OSError, AssertionError, struct.error, ValueError):  # or of a type unknown to Megatron
        raise UserError(f"{file} is not an index of Megatron's data, or is damaged; {remedy}") from None
    least = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * dtype.itemsize if len(index) else 0
    if size < least:
        raise UserError(f"{prefix}.bin is cut short: {size:,} of {least:,} bytes; copy it again, or prepare it anew")
    return dtype, index.sequence_count


def check_vocabulary(prefix: str, args: argparse.Namespace) -> None:
    """Refuses data that another tokenizer made, or with ids that the model has no row for, by a `UserError`.

    `megatron-muon data prepare` leaves the tokenizer beside the data. Of other data the beginning is looked at. A run's
    NullTokenizer stands for any tokenizer: only the size of its vocabulary counts.
    """
    manifest, rows = OutputPaths(Path(prefix)).read_manifest(), args.padded_vocab_size
    run = TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    if manifest is None:
        ids = np.fromfile(prefix + ".bin", read_head(prefix)[0], count=_SAMPLE_TOKENS)
        differs, size, remedy = False, int(ids.max()) + 1 if ids.size else 0, "the --vocab-size of the data"
        made_with = "a tokenizer that is not known"
    else:
        made = manifest.settings.tokenizer
        reads = made.in_training()
        theirs, ours = ([spec.tokenizer_type, Path(spec.model or "").name] for spec in (reads, run))
        differs = run.tokenizer_type != IN_TRAINING and theirs != ours  # in whatever folder
        size, remedy = manifest.vocab_size or reads.vocab_size or 0, " ".join(reads.flags())
        made_with = " ".join(made.flags()[1:])
    if differs or size > rows:
        raise UserError(
            f"{prefix} was made with {made_with}, a vocabulary of {size}; this run has {' '.join(run.flags()[1:])} and "
            f"a model of {rows} (padded); train with {remedy}, or prepare the text with this run's tokenizer"
        )
