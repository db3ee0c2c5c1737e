"""Checks of prepared data: whether it is whole, and of the vocabulary of a run."""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import Any

import numpy as np

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import OutputPaths, model_digest
from megatron_muon.megatron.data.tokenizers import IN_TRAINING, SENTENCEPIECE, TokenizerSpec

_SAMPLE_TOKENS = 1 << 20


def read_head(prefix: str) -> tuple[np.dtype[Any], int]:
    """What the index (`PREFIX.idx`) says first: the dtype of the token ids, and the number of documents.

    Raises:
        UserError: the index cannot be read or is damaged, or `PREFIX.bin` is shorter than it says.
    """
    from megatron.core.datasets.indexed_dataset import _IndexReader

    file = prefix + ".idx"
    try:
        index = _IndexReader(file, multimodal=False)
        dtype = np.dtype(index.dtype)
        assert dtype.kind in "iu", dtype
        size = Path(prefix + ".bin").stat().st_size
    except OSError as error:
        raise UserError(f"{error.filename or file} cannot be read ({error.strerror})") from None
    except (AssertionError, struct.error, ValueError):  # another file, one cut short, or of a type unknown to Megatron
        raise UserError(
            f"{file} is not an index of Megatron's data, or is damaged; type: "
            f"megatron-muon data prepare --input TEXT --output {prefix}"
        ) from None
    least = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * dtype.itemsize if len(index) else 0
    if size < least:
        raise UserError(f"{prefix}.bin is cut short: {size:,} of {least:,} bytes; copy it again, or prepare it anew")
    return dtype, index.sequence_count


def require_files(prefix: str, flag: str) -> None:
    """Refuses a prefix, given by a flag, without PREFIX.bin or PREFIX.idx."""
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).exists():
            if prefix.endswith((".bin", ".idx")) and Path(prefix).exists():
                raise UserError(f"{flag} {prefix}: leave {prefix[-4:]} out; type {flag} {prefix[:-4]}")
            raise UserError(
                f"{prefix}{suffix} does not exist; {flag} takes the prefix of a .bin and an .idx file; type "
                f"megatron-muon data prepare --input TEXT --output {prefix}"
            )


def check_vocabulary(prefix: str, args: argparse.Namespace) -> None:
    """Refuses data that another tokenizer made, or with ids that the model has no row for, by a `UserError`.

    `megatron-muon data prepare` leaves the tokenizer beside the data. Of other data the beginning is looked at. A run's
    NullTokenizer stands for any tokenizer: only the size of its vocabulary counts.
    """
    manifest = OutputPaths(Path(prefix)).read_manifest()
    rows = args.padded_vocab_size
    if manifest is None:
        ids = np.fromfile(prefix + ".bin", read_head(prefix)[0], count=_SAMPLE_TOKENS)
        if ids.size and (largest := ids.max()) >= rows:
            raise UserError(
                f"{prefix} holds token id {largest}, and the model has {rows} (--tokenizer-type {args.tokenizer_type}, "
                "vocabulary padded); give the tokenizer or --vocab-size with which the data was made"
            )
        return
    run, made = TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size), manifest.settings.tokenizer
    reads = made.in_training()
    size = manifest.vocab_size or reads.vocab_size or 0
    differs = run.tokenizer_type != IN_TRAINING and not _is_same(reads, run, manifest.settings.tokenizer_digest)
    if differs or size > rows:
        made_with, has = (" ".join(spec.flags()[1:]) for spec in (made, run))
        raise UserError(
            f"{prefix} was made with {made_with}, a vocabulary of {size}; this run has {has} and a model of {rows} "
            f"(padded); train with {' '.join(reads.flags())}, or prepare the text with this run's tokenizer"
        )


def _is_same(made: TokenizerSpec, run: TokenizerSpec, digest: str) -> bool:
    """Whether two are the same tokenizer, by the digest of its files where both are known, else by its name."""
    kinds = {made.tokenizer_type, run.tokenizer_type}
    if len(kinds) > 1 and not kinds <= {*SENTENCEPIECE}:
        return False
    if made.model == run.model:
        return True
    if digest and (found := model_digest(run)):
        return digest == found
    return Path(made.model or "").name == Path(run.model or "").name
