"""Turns text into token ids by Megatron's tokenizers.

The default is megatron-core's `ByteLevelTokenizer`: a token is a byte of UTF-8, the highest id ends
a document. No flag of megatron-core 0.19's training selects it, and none has to: there a tokenizer
only tells the vocabulary's size and the id that ends a document, which `NullTokenizer` does with
the same values.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_muon.errors import UserError, quiet_imports

BYTE_LEVEL, IN_TRAINING, HUGGING_FACE = (
    "ByteLevelTokenizer",
    "NullTokenizer",
    "HuggingFaceTokenizer",
)
BYTE_LEVEL_VOCAB_SIZE = 257
"""256 byte values and one end-of-document id."""

_PACKAGES = {
    HUGGING_FACE: "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
"""What a tokenizer needs beside megatron-core, which says so after it has failed, or not at all."""

TOKENIZER_TYPES = (BYTE_LEVEL, *_PACKAGES)
"""Those of `data prepare`."""


class TokenizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """Which tokenizer, in the words of Megatron's command line; the last id of the byte-level one ends documents."""

    tokenizer_type: str = BYTE_LEVEL
    model: str | None = None
    vocab_size: int | None = None

    def in_training(self) -> TokenizerSpec:
        """That with which Megatron's training reads what this one wrote."""
        if self.tokenizer_type != BYTE_LEVEL:
            return self
        return TokenizerSpec(IN_TRAINING, vocab_size=self.vocab_size or BYTE_LEVEL_VOCAB_SIZE)

    def flags(self) -> list[str]:
        """The flags of Megatron's command line that select it."""
        flags = ("--tokenizer-type", "--tokenizer-model", "--vocab-size")
        named = zip(flags, msgspec.structs.astuple(self), strict=True)
        return [str(word) for flag, value in named if value is not None for word in (flag, value)]


def check_spec(spec: TokenizerSpec) -> None:
    """Refuses, by a `UserError`, what can be seen to be wrong without importing anything."""
    kind, size = spec.tokenizer_type, spec.vocab_size
    if kind == BYTE_LEVEL and size not in (None, BYTE_LEVEL_VOCAB_SIZE):
        raise UserError(
            f"{kind} has {BYTE_LEVEL_VOCAB_SIZE} ids, not --vocab-size {size}; leave it out"
        )
    if kind == BYTE_LEVEL and spec.model is not None:
        raise UserError(
            f"{kind} has no --tokenizer-model; leave it out, or give its --tokenizer-type"
        )
    if kind in _PACKAGES and not spec.model:
        raise UserError(f"--tokenizer-type {kind} needs --tokenizer-model PATH_OR_NAME")


def build(spec: TokenizerSpec) -> Any:
    """Megatron-core's tokenizer, except for bytes: it has `tokenize`, `vocab_size` and `eod`."""
    if spec.tokenizer_type == BYTE_LEVEL:
        size = spec.vocab_size or BYTE_LEVEL_VOCAB_SIZE
        ids = {
            "tokenize": lambda text: np.frombuffer(text.encode(), np.uint8),
            "vocab_size": size,
            "eod": size - 1,
        }
        return SimpleNamespace(**ids)
    with quiet_imports():
        from megatron.training.config import TokenizerConfig
    args = argparse.Namespace(
        **{field.name: field.default for field in dataclasses.fields(TokenizerConfig)}
    )
    args.tokenizer_type, args.tokenizer_model = spec.tokenizer_type, spec.model
    args.vocab_size, args.pad_vocab_size = spec.vocab_size, False
    return build_megatron(args)


def build_megatron(args: argparse.Namespace) -> Any:
    """Megatron-core's tokenizer; a missing package, and a model that does not load, are UserErrors."""
    with quiet_imports():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    kind, model = args.tokenizer_type, args.tokenizer_model
    if (package := _PACKAGES.get(kind)) and importlib.util.find_spec(package) is None:
        raise UserError(
            f"--tokenizer-type {kind} needs the package {package}; type pip install {package}"
        )
    try:
        return build_tokenizer(args)
    except Exception as error:  # each tokenizer library has exceptions of its own
        named = "" if model is None else f" --tokenizer-model {model}"
        words, flags = (
            " ".join(str(error).split()),
            "the flags that megatron-muon data prepare has printed",
        )
        raise UserError(
            f"--tokenizer-type {kind}{named}: {words}; for its data give {flags}"
        ) from error


def encode(tokenizer: Any, place: str, text: str) -> npt.NDArray[np.int32]:
    """The ids of a document that stands at `place`, and the one that ends it."""
    try:
        ids = np.append(np.array(tokenizer.tokenize(text), np.int32), np.int32(tokenizer.eod))
    except (ValueError, TypeError) as error:
        raise UserError(f"{place}: the tokenizer does not take this text: {error}") from error
    if ids.max() >= tokenizer.vocab_size:
        raise UserError(
            f"{place}: the tokenizer gives the id {ids.max()}, and has a vocabulary of"
            f" {tokenizer.vocab_size}"
        )
    return ids
