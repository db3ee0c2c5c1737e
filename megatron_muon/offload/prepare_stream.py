"""Prepares rows beside a GPU's products, on a stream of its own, where momentum is staged to that GPU.

Which stream does what, and what it waits for:

    in, out     copies of momentum to the device and back (`store`): "out" waits for `prepare`, and for no products
    prepare     momentum, look-ahead of a wave's rows: waits for "in", and for the readers of the buffer that it fills
    products    the caller's: packs rows, starts collectives, orthogonalises, applies updates: waits for its rows

The exchange asks for rows of the next waves when the products of a wave are enqueued. The host then waits for disk and
copies while the GPU has these products to do; as no copy lies behind them, the staging memory does not fill. Rows have
two buffers, in turn: when a third wave is asked for, `prepare` waits for the products before the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_muon.core.exchange import RowPhases
from megatron_muon.core.wave import Chunk


class PrepareStream:
    """Stands before the rows of a step, whose `prepare` it runs on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def step(self, rows: RowPhases) -> Iterator[RowPhases]:
        """Around the exchange of a step, which is given what this yields in the place of `rows`."""
        self._rows = rows
        self._products = torch.cuda.current_stream(self._device)
        self._read: dict[int, Any] = {}  # by buffer: the event behind which its rows have been packed
        self._stream.wait_stream(self._products)  # gradients, and the weights of the step before
        yield self
        self._products.wait_stream(self._stream)  # whoever reads momentum and weights next

    def prepare(self, chunk: Chunk) -> None:
        """As the optimizer's, on this stream."""
        if (event := self._read.get(chunk.prepared.data_ptr())) is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            self._rows.prepare(chunk)
        self._products.wait_stream(self._stream)

    def packed(self, chunk: Chunk) -> None:
        """Note that the buffer may be filled again behind what has been enqueued so far."""
        self._read[chunk.prepared.data_ptr()] = self._products.record_event()

    def apply(self, chunk: Chunk) -> None:
        """The optimizer's."""
        self._rows.apply(chunk)
