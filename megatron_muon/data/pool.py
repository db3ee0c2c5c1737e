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
from megatron_muon.data.tokenizers import TokenizerSpec
from megatron_muon.errors import UserError

_BATCH_CHARACTERS = 1 << 20
_BATCHES_PER_WORKER = 2

Document = tuple[str, str]
Encoded = tuple[str, npt.NDArray[Any]]


def encode_documents(documents: Iterable[Document], spec: TokenizerSpec, workers: int) -> Iterator[Encoded]:
    """Yields (where it stands, ids) for every document, in order; one worker is this process.

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
    tokenizer = tokenizers.build(spec)
    encoded = []
    for place, text in batch:
        try:
            encoded.append((place, tokenizer.encode(text)))
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{place}: the tokenizer does not take this text: {error}") from error
    return encoded
