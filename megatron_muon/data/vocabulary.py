"""What prepared data is, from its index, manifest and first ids, and whether it is of the vocabulary of a run."""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import Any

import numpy as np

from megatron_muon.data.corpus import OutputPaths, model_digest
from megatron_muon.data.tokenizers import TokenizerSpec
from megatron_muon.errors import UserError

_NO_TOKENIZER = "NullTokenizer"
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Names of one tokenizer."""

_SAMPLE_TOKENS = 1 << 20


def read_head(prefix: str) -> tuple[np.dtype[Any], int]:
    """What the index (`PREFIX.idx`) says first: the dtype of the token ids, and the number of documents.

    Raises:
        UserError: the index cannot be read, is not an index, or is cut short.
    """
    from megatron.core.datasets.indexed_dataset import _IndexReader

    file = Path(prefix + ".idx")
    try:
        index = _IndexReader(str(file), multimodal=False)
        dtype = np.dtype(index.dtype)
        assert dtype.kind in "iu", dtype
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); give this user the right to read it") from None
    except (AssertionError, struct.error, ValueError):  # another file, one cut short, or of a type unknown to Megatron
        raise UserError(
            f"{file} is not an index of Megatron's data, or is damaged; type: "
            f"megatron-muon data prepare --input TEXT --output {prefix}"
        ) from None
    return dtype, index.sequence_count


def check_vocabulary(prefix: str, args: argparse.Namespace) -> None:
    """Refuse data that another tokenizer made, or with ids that the model has no row for.

    `megatron-muon data prepare` leaves the tokenizer beside the data. Of other data the beginning is looked at. A run's
    NullTokenizer stands for any tokenizer: only the size of its vocabulary counts.

    Raises:
        UserError: names both tokenizers, or the size and the id.
    """
    manifest = OutputPaths(Path(prefix)).read_manifest()
    rows = args.padded_vocab_size
    if manifest is None:
        largest = _largest_id(prefix)
        if largest >= rows:
            raise UserError(
                f"{prefix} holds token id {largest}, and the model has {rows} (--tokenizer-type {args.tokenizer_type}, "
                "vocabulary padded); give the tokenizer or --vocab-size with which the data was made"
            )
        return
    made = TokenizerSpec(*manifest["settings"]["tokenizer"])
    flags = made.training_flags()
    theirs = TokenizerSpec(flags[1], made.model, made.vocab_size)
    runs = TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    size = manifest.get("vocab_size") or int(dict(zip(flags[::2], flags[1::2], strict=True)).get("--vocab-size", 0))
    if runs.tokenizer_type != _NO_TOKENIZER and not _same(theirs, runs, manifest["settings"]["tokenizer_digest"]):
        raise UserError(
            f"{prefix} was made with {_shown(made)}, this run has {_shown(runs)}; train with {' '.join(flags)}, or "
            "prepare the text with this run's tokenizer"
        )
    if size > rows:
        raise UserError(
            f"{prefix} was made with {_shown(made)}, a vocabulary of {size}; this run's {_shown(runs)} gives the model "
            f"{rows} (padded); train with {' '.join(flags)}"
        )


def _same(made: TokenizerSpec, runs: TokenizerSpec, digest: str) -> bool:
    """Whether two are the same tokenizer, by the digest of its files where both are known, else by its name."""
    kinds = {
        _SENTENCEPIECE[0] if kind in _SENTENCEPIECE else kind for kind in (made.tokenizer_type, runs.tokenizer_type)
    }
    if len(kinds) > 1 or made.model == runs.model:
        return len(kinds) == 1
    found = model_digest(runs)
    if digest and found:
        return digest == found
    return Path(made.model or "").name == Path(runs.model or "").name


def _shown(spec: TokenizerSpec) -> str:
    more = {"--tokenizer-model": spec.model, "--vocab-size": spec.vocab_size}
    return " ".join([spec.tokenizer_type, *(f"{flag} {value}" for flag, value in more.items() if value is not None)])


def _largest_id(prefix: str) -> int:
    """The largest id of the first tokens."""
    dtype, _ = read_head(prefix)
    ids = np.fromfile(prefix + ".bin", dtype, count=_SAMPLE_TOKENS)
    return int(ids.max()) if ids.size else 0
