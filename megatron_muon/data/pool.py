"""Tokenizes documents in order, in this process or in several.

Order and result do not depend on the number of processes. Only a few batches are under way at any time, so
memory stays bounded however long the input is.
"""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy.typing as npt

from megatron_muon.data import tokenizers
from megatron_muon.data.tokenizers import Tokenizer, TokenizerSpec
from megatron_muon.errors import UserError

_BATCH_CHARACTERS = 1 << 20
_BATCHES_PER_WORKER = 2

Document = tuple[str, str]
Encoded = tuple[str, npt.NDArray[Any]]

_tokenizer: Tokenizer | None = None  # of a worker process


def encode_documents(
    documents: Iterable[Document], spec: TokenizerSpec, tokenizer: Tokenizer, workers: int
) -> Iterator[Encoded]:
    """Yields (where it stands, ids) for every document, in order.

    Args:
        documents: (where it stands, text).
        spec: From which each worker builds a tokenizer of its own.
        tokenizer: The same tokenizer, built, for this process.
        workers: 1 tokenizes in this process.

    Raises:
        UserError: A text that the tokenizer does not take; names where it stands.
    """
    if workers == 1:
        for document in documents:
            yield _encode(document, tokenizer)
        return
    # Spawned, not forked: torch and a progress bar have threads, whose locks a fork would copy while held.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(spec,)) as executor:
        under_way: deque[Future[list[Encoded]]] = deque()
        try:
            for batch in _batches(documents):
                under_way.append(executor.submit(_encode_batch, batch))
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


def _encode(document: Document, tokenizer: Tokenizer) -> Encoded:
    place, text = document
    try:
        return place, tokenizer.encode(text)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{place}: the tokenizer does not take this text: {error}") from error


def _start(spec: TokenizerSpec) -> None:
    global _tokenizer
    _tokenizer = tokenizers.build(spec)


def _encode_batch(batch: list[Document]) -> list[Encoded]:
    assert _tokenizer is not None
    return [_encode(document, _tokenizer) for document in batch]
