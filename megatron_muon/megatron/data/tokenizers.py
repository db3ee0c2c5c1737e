"""Turns text into token ids by Megatron's tokenizers.

The default is megatron-core's `ByteLevelTokenizer`: a token is a byte of UTF-8, and the highest id
ends a document. No flag of megatron-core 0.19's training selects it. None needs to: in training a
tokenizer only states the vocabulary's size and the id that ends a document, and `NullTokenizer` has
the same values.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_muon.errors import UserError, quiet_imports

BYTE_LEVEL = "ByteLevelTokenizer"
IN_TRAINING = "NullTokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
BYTE_LEVEL_VOCAB_SIZE = 257
"""256 byte values and one end-of-document id."""

_PACKAGES = {
    HUGGING_FACE: "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
"""Packages that megatron-core's tokenizers need; it reports a missing one late, or not at all."""

TOKENIZER_TYPES = (BYTE_LEVEL, *_PACKAGES)
"""Tokenizers of `data prepare`."""


class TokenizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tokenizer by the flags of Megatron's command line."""

    tokenizer_type: str = BYTE_LEVEL
    model: str | None = None
    vocab_size: int | None = None

    def in_training(self) -> TokenizerSpec:
        """The tokenizer with which Megatron's training reads this one's data."""
        if self.tokenizer_type != BYTE_LEVEL:
            return self
        return TokenizerSpec(IN_TRAINING, vocab_size=BYTE_LEVEL_VOCAB_SIZE)

    def flags(self) -> list[str]:
        """The flags of Megatron's command line that select it."""
        names = ("--tokenizer-type", "--tokenizer-model", "--vocab-size")
        flags: list[str] = []
        for name, value in zip(names, msgspec.structs.astuple(self), strict=True):
            if value is not None:
                flags += [name, str(value)]
        return flags

    def kind_and_file(self) -> tuple[str, str]:
        """The type, and the model's file name in whatever folder."""
        return self.tokenizer_type, Path(self.model or "").name


def build(spec: TokenizerSpec) -> Any:
    """A tokenizer with `tokenize`, `vocab_size` and `eod`: megatron-core's, except for bytes."""
    if spec.tokenizer_type == BYTE_LEVEL:
        if spec.model is not None:
            raise UserError(
                f"{BYTE_LEVEL} has no --tokenizer-model; leave it out, or give its --tokenizer-type"
            )
        return SimpleNamespace(
            tokenize=lambda text: np.frombuffer(text.encode(), np.uint8),
            vocab_size=BYTE_LEVEL_VOCAB_SIZE,
            eod=BYTE_LEVEL_VOCAB_SIZE - 1,
        )
    with quiet_imports():
        from megatron_muon.megatron.upstream import TokenizerConfig
    defaults = {field.name: field.default for field in dataclasses.fields(TokenizerConfig)}
    args = argparse.Namespace(**defaults)
    args.tokenizer_type = spec.tokenizer_type
    args.tokenizer_model = spec.model
    args.vocab_size = spec.vocab_size
    args.pad_vocab_size = False
    return build_megatron(args)


def build_megatron(args: argparse.Namespace) -> Any:
    """Megatron-core's tokenizer; a missing package or an unreadable model is a UserError."""
    with quiet_imports():
        from megatron_muon.megatron.upstream import build_tokenizer

    kind, model = args.tokenizer_type, args.tokenizer_model
    package = _PACKAGES.get(kind)
    if package and importlib.util.find_spec(package) is None:
        raise UserError(
            f"--tokenizer-type {kind} needs the package {package}; type pip install {package}"
        )
    try:
        return build_tokenizer(args)
    except Exception as error:  # each tokenizer library has its own exceptions
        named = "" if model is None else f" --tokenizer-model {model}"
        raise UserError(
            f"--tokenizer-type {kind}{named}: {' '.join(str(error).split())}; for its data give the"
            " flags that megatron-muon data prepare has printed"
        ) from error


def encode(tokenizer: Any, place: str, text: str) -> npt.NDArray[np.int32]:
    """The ids of the document at `place`, and the id that ends it."""
    try:
        tokens = np.array(tokenizer.tokenize(text), np.int32)
        ids = np.append(tokens, np.int32(tokenizer.eod))
    except (ValueError, TypeError) as error:
        raise UserError(f"{place}: the tokenizer does not take this text: {error}") from error
    return ids
