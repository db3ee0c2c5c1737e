"""Turns text into token ids exactly as Megatron's tokenizers do.

The default is megatron-core's `ByteLevelTokenizer`: a token is a byte of UTF-8, the highest id ends a
document. The training command line of megatron-core 0.19 has no flag that selects it, and needs none: during
training a tokenizer only tells the vocabulary's size and the id that ends a document, which `NullTokenizer`
does with the same values.
"""

import argparse
import dataclasses
import functools
import importlib.util
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_muon.errors import UserError
from megatron_muon.quiet import quiet_imports

BYTE_LEVEL = "ByteLevelTokenizer"
BYTE_LEVEL_VOCAB_SIZE = 257
"""256 byte values and one end-of-document id."""

TOKENIZER_TYPES = (
    BYTE_LEVEL,
    "NullTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
"""The byte-level one, and those of megatron-core's `build_tokenizer` that need at most a model."""

_PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "SFTTokenizer": "transformers",
    "GPT2BPETokenizer": "transformers",
    "BertWordPieceLowerCase": "transformers",
    "BertWordPieceCase": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
"""What a tokenizer needs beside megatron-core, which says so after it has failed, or not at all."""

_BATCH_CHARACTERS = 1 << 20
_BATCHES_PER_WORKER = 2

Document = tuple[str, str]
"""Where it stands, and its text."""

Encoded = tuple[str, npt.NDArray[Any]]
"""Where a document stands, and its ids."""


@dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer, in the words of Megatron's command line; the last id of the byte-level one ends documents."""

    tokenizer_type: str = BYTE_LEVEL
    model: str | None = None
    vocab_size: int | None = None

    def training_flags(self) -> tuple[str, ...]:
        """Returns the flags with which Megatron's training reads what this tokenizer wrote."""
        if self.tokenizer_type == BYTE_LEVEL:
            size = self.vocab_size or BYTE_LEVEL_VOCAB_SIZE
            return ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(size))
        flags = ["--tokenizer-type", self.tokenizer_type]
        if self.model is not None:
            flags += ["--tokenizer-model", self.model]
        if self.vocab_size is not None:
            flags += ["--vocab-size", str(self.vocab_size)]
        return tuple(flags)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer ready for use: text to ids without an end-of-document id, which some tokenizers do not have."""

    encode: Callable[[str], npt.NDArray[Any]]
    vocab_size: int
    eod: int | None


def encode_bytes(text: str) -> npt.NDArray[np.uint8]:
    """Returns the ids of megatron-core's `ByteLevelTokenizer.text_to_ids`, as one array instead of a list."""
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def check_spec(spec: TokenizerSpec) -> None:
    """Refuses, by a `UserError`, what can be seen to be wrong without importing anything."""
    kind, size = spec.tokenizer_type, spec.vocab_size
    if kind not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {kind} is not known; choose one of {', '.join(TOKENIZER_TYPES)}")
    if kind == BYTE_LEVEL:
        if spec.model is not None:
            raise UserError(f"--tokenizer-model {spec.model}: {BYTE_LEVEL} has no model; leave it out")
        if size is not None and size < BYTE_LEVEL_VOCAB_SIZE:
            raise UserError(
                f"--vocab-size {size} is too small for {BYTE_LEVEL}: 256 bytes and an end-of-document id "
                f"need at least {BYTE_LEVEL_VOCAB_SIZE}"
            )
    elif kind == "NullTokenizer":
        if size is None or size < 1:
            raise UserError("NullTokenizer (text that already holds ids) needs --vocab-size N")
    elif spec.model is None:
        raise UserError(f"--tokenizer-type {kind} needs --tokenizer-model PATH_OR_NAME")


@functools.cache
def build(spec: TokenizerSpec) -> Tokenizer:
    """Builds the tokenizer, once in a process; all but the byte-level one import megatron-core, which takes seconds.

    Raises:
        UserError: What `check_spec` refuses, a missing package, or a model that does not load.
    """
    check_spec(spec)
    if spec.tokenizer_type == BYTE_LEVEL:
        size = spec.vocab_size or BYTE_LEVEL_VOCAB_SIZE
        return Tokenizer(encode=encode_bytes, vocab_size=size, eod=size - 1)

    with quiet_imports():
        from megatron.training.config import TokenizerConfig

    args = argparse.Namespace(**{field.name: field.default for field in dataclasses.fields(TokenizerConfig)})
    args.tokenizer_type, args.tokenizer_model = spec.tokenizer_type, spec.model
    args.vocab_size, args.pad_vocab_size = spec.vocab_size, False
    tokenizer = build_megatron(args)
    eod = getattr(tokenizer, "eod", None)
    return Tokenizer(
        encode=lambda text: np.asarray(tokenizer.tokenize(text), dtype=np.int64),
        vocab_size=int(tokenizer.vocab_size),
        eod=None if eod is None else int(eod),
    )


def build_megatron(args: argparse.Namespace) -> Any:
    """Builds megatron-core's tokenizer from arguments in the words of its command line.

    Raises:
        UserError: What `check_spec` refuses, a missing package, or a model that does not load.
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


def encode_documents(documents: Iterable[Document], spec: TokenizerSpec, workers: int) -> Iterator[Encoded]:
    """Yields (where it stands, ids) for every document, in order; one worker is this process.

    Only a few batches are under way at any time, so memory stays bounded however long the input is.

    Raises:
        UserError: a text that the tokenizer does not take; names where it stands.
    """
    batches = _batches(documents)
    if workers == 1:
        for batch in batches:
            yield from _encode(batch, spec)
        return
    # Spawned, not forked: torch and a progress bar have threads, whose locks a fork would copy while held.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as executor:
        under_way: deque[Future[list[Encoded]]] = deque()
        try:
            for batch in batches:
                under_way.append(executor.submit(_encode, batch, spec))
                if len(under_way) > workers * _BATCHES_PER_WORKER:
                    yield from under_way.popleft().result()
            while under_way:
                yield from under_way.popleft().result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document[1])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batch: list[Document], spec: TokenizerSpec) -> list[Encoded]:
    tokenizer = build(spec)
    encoded = []
    for place, text in batch:
        try:
            encoded.append((place, tokenizer.encode(text)))
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{place}: the tokenizer does not take this text: {error}") from error
    return encoded
