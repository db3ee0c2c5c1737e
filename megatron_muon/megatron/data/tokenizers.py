"""Turns text into token ids by Megatron's tokenizers.

The default is megatron-core's `ByteLevelTokenizer`: a token is a byte of UTF-8, the highest id ends a document. No flag
of megatron-core 0.19's training selects it, and none has to: there a tokenizer only tells the vocabulary's size and the
id that ends a document, which `NullTokenizer` does with the same values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_muon.errors import UserError, quiet_imports

BYTE_LEVEL, IN_TRAINING, HUGGING_FACE = "ByteLevelTokenizer", "NullTokenizer", "HuggingFaceTokenizer"
BYTE_LEVEL_VOCAB_SIZE = 257
"""256 byte values and one end-of-document id."""

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Names of one tokenizer."""

TOKENIZER_TYPES = (BYTE_LEVEL, IN_TRAINING, HUGGING_FACE, *SENTENCEPIECE, "TikTokenizer")
"""The byte-level one, and those of megatron-core's `build_tokenizer` that need at most a model."""

_HF = (HUGGING_FACE, "SFTTokenizer", "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
_PACKAGES = dict.fromkeys(_HF, "transformers") | dict.fromkeys(SENTENCEPIECE, "sentencepiece")
_PACKAGES["TikTokenizer"] = "tiktoken"
"""What a tokenizer needs beside megatron-core, which says so after it has failed, or not at all."""

_DOCUMENTS_PER_WORKER = 128
"""How many are under way at a time, so that memory stays bounded however long the input is."""

Document = tuple[str, str]
"""Where it stands, and its text."""


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
    kind, size, least = spec.tokenizer_type, spec.vocab_size, BYTE_LEVEL_VOCAB_SIZE
    if kind not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {kind} is not known; choose one of {', '.join(TOKENIZER_TYPES)}")
    if kind == BYTE_LEVEL and spec.model is not None:
        raise UserError(f"--tokenizer-model {spec.model}: {kind} has no model; leave it out")
    if kind == BYTE_LEVEL and size is not None and size < least:
        raise UserError(f"--vocab-size {size} is too small for {kind}, which has {least} ids; give at least {least}")
    if kind == IN_TRAINING and (size is None or size < 1):
        raise UserError(f"{kind} (text that already holds ids) needs --vocab-size N")
    if kind not in (BYTE_LEVEL, IN_TRAINING) and not spec.model:
        raise UserError(f"--tokenizer-type {kind} needs --tokenizer-model PATH_OR_NAME")


@functools.cache
def build(spec: TokenizerSpec) -> Any:
    """Megatron-core's tokenizer: it has `tokenize`, `vocab_size` and, mostly, `eod`. Built once in a process."""
    check_spec(spec)
    with quiet_imports():
        from megatron.core.tokenizers import MegatronTokenizer
        from megatron.training.config import TokenizerConfig
    if spec.tokenizer_type == BYTE_LEVEL:
        eod = (spec.vocab_size or BYTE_LEVEL_VOCAB_SIZE) - 1
        more = {"vocab_size": eod, "special_tokens": ["<eod>"], "_eos_id": eod}
        return MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"}, **more)
    args = argparse.Namespace(**{field.name: field.default for field in dataclasses.fields(TokenizerConfig)})
    args.tokenizer_type, args.tokenizer_model = spec.tokenizer_type, spec.model
    args.vocab_size, args.pad_vocab_size = spec.vocab_size, False
    return build_megatron(args)


def build_megatron(args: argparse.Namespace) -> Any:
    """Builds megatron-core's tokenizer from arguments in the words of its command line.

    What `check_spec` refuses, a missing package, and a model that does not load are UserErrors.
    """
    with quiet_imports():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind in TOKENIZER_TYPES:
        check_spec(TokenizerSpec(kind, model, args.vocab_size))
    files = args.vocab_file and args.merge_file
    if kind == "GPT2BPETokenizer" and not files and importlib.util.find_spec("wget") is None:
        raise UserError(
            f"--tokenizer-type {kind}, Megatron's default, needs --vocab-file FILE and --merge-file FILE; for data of "
            "megatron-muon data prepare give the flags that it printed, such as --tokenizer-type NullTokenizer "
            "--vocab-size N"
        )
    if (package := _PACKAGES.get(kind)) and importlib.util.find_spec(package) is None:
        raise UserError(f"--tokenizer-type {kind} needs the package {package}; type pip install {package}")
    try:
        return build_tokenizer(args)
    except Exception as error:  # each tokenizer library has exceptions of its own
        named = "" if model is None else f" --tokenizer-model {model}"
        raise UserError(f"--tokenizer-type {kind}{named}: {' '.join(str(error).split())}") from error


def encode_documents(
    documents: Iterable[Document], spec: TokenizerSpec, workers: int
) -> Iterator[npt.NDArray[np.int32]]:
    """Yields the ids of every document, in order; one worker is this process."""
    encode = functools.partial(_encode, spec)
    if workers == 1:
        yield from map(encode, documents)
        return
    # Spawned, not forked: torch and a progress bar have threads, whose locks a fork would copy while held.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as executor:
        for group in itertools.batched(documents, workers * _DOCUMENTS_PER_WORKER):
            yield from executor.map(encode, group, chunksize=_DOCUMENTS_PER_WORKER // 4)


def _encode(spec: TokenizerSpec, document: Document) -> npt.NDArray[np.int32]:
    place, text = document
    tokenizer = build(spec)
    try:
        # What the byte-level `tokenize` gives, without a Python integer for each byte.
        is_bytes = spec.tokenizer_type == BYTE_LEVEL
        ids = np.array(np.frombuffer(text.encode(), np.uint8) if is_bytes else tokenizer.tokenize(text), np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{place}: the tokenizer does not take this text: {error}") from error
    if ids.size and (ids.max() >= tokenizer.vocab_size or ids.min() < 0):
        raise UserError(
            f"{place}: token ids reach from {ids.min()} to {ids.max()}, the vocabulary has {tokenizer.vocab_size}; "
            "give a larger --vocab-size"
        )
    return ids.astype(np.int32)
