"""Prepares rows beside a GPU's products, on a stream of its own, where momentum is staged to that GPU.

Which stream does what, and what it waits for:

    in, out     copies of momentum to the device and back (`store`): "out" waits for `prepare`, and for no products
    prepare     momentum, look-ahead of a wave's rows: waits for "in", and for the readers of rows two waves ago
    products    the caller's: packs rows, starts collectives, orthogonalises, applies updates: waits for its rows

The exchange asks for rows of the next waves when the products of a wave are enqueued. The host then waits for disk and
copies while the GPU has these products to do; as no copy lies behind them, the ring does not fill. Packing needs no
stream of its own: it lies between two waves' products, as without offload. The rows of two waves exist at most: when a
third is asked for, `prepare` waits for the products before the last, and the host, if the ring is full, with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_muon.core.exchange.steps import RowPhases

_WAVES = 2


class PrepareStream:
    """Runs `prepare` of a step on a stream of its own, on a GPU: stands before the rows of the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def step(self, rows: RowPhases) -> Iterator[RowPhases]:
        """Around the exchange of a step, which is given what this yields in the place of `rows`."""
        self._rows = rows
        self._products = torch.cuda.current_stream(self._device)
        # What has been given of each wave: rows, and the event behind which they have been read.
        self._given: list[tuple[list[torch.Tensor], Any]] = []
        self._rows_of_wave: list[torch.Tensor] = []
        self._finalized = False
        self._stream.wait_stream(self._products)  # gradients, and the weights of the step before
        yield self
        self._products.wait_stream(self._stream)  # whoever reads momentum and weights next
        self._given, self._rows_of_wave = [], []

    def prepare(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """As the optimizer's, on this stream."""
        if self._finalized:  # the products of a wave are enqueued, and another one begins
            self._given.append((self._rows_of_wave, self._products.record_event()))
            self._rows_of_wave, self._finalized = [], False
            if len(self._given) == _WAVES:
                self._stream.wait_event(self._given[0][1])  # before the memory of these rows is used again
                del self._given[0]
        with torch.cuda.stream(self._stream):
            rows = self._rows.prepare(indices)
        self._products.wait_stream(self._stream)
        self._rows_of_wave += rows
        return rows

    def finalize(self, indices: Sequence[int], updates: Sequence[torch.Tensor], finite: torch.Tensor) -> None:
        """The optimizer's."""
        self._rows.finalize(indices, updates, finite)
        self._finalized = self._finalized or bool(self._rows_of_wave)
