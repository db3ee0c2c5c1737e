"""Prepares rows beside a GPU's products, on a stream of its own, where momentum is staged to that GPU.

Which stream does what, and what it waits for:

    in, out     copies of momentum to the device and back (`store`): "out" waits for `prepare`, and for no products
    prepare     decay, momentum, look-ahead of a wave's rows: waits for "in", and for the readers of rows two waves ago
    products    the caller's: packs rows, starts collectives, orthogonalises, applies updates: waits for its rows

The exchange asks for rows of the next waves when the products of a wave are enqueued. The host then waits for disk and
copies while the GPU has these products to do; as no copy lies behind them, the ring does not fill. Packing needs no
stream of its own: it lies between two waves' products, as without offload. The rows of two waves exist at most: when a
third is asked for, `prepare` waits for the products before the last, and the host, if the ring is full, with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_muon.core.exchange.steps import Advance, Apply

_WAVES = 2


class PrepareStream:
    """Runs the steps of an exchange with preparation on a stream of its own.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, exchange: Callable[[Advance, Apply], None], advance: Advance, apply: Apply) -> None:
        """One step: `exchange(advance, apply)`."""
        products = torch.cuda.current_stream(self._device)
        # What has been given of each wave: rows, and the event behind which they have been read.
        given: list[tuple[list[torch.Tensor], Any]] = []
        rows_of_wave: list[torch.Tensor] = []
        applied = False

        def prepare(indices: Sequence[int]) -> list[torch.Tensor]:
            nonlocal applied, rows_of_wave
            if applied:  # the products of a wave are enqueued, and another one begins
                given.append((rows_of_wave, products.record_event()))
                rows_of_wave, applied = [], False
                if len(given) == _WAVES:
                    self._stream.wait_event(given[0][1])  # before the memory of these rows is used again
                    del given[0]
            with torch.cuda.stream(self._stream):
                rows = advance(indices)
            products.wait_stream(self._stream)
            rows_of_wave += rows
            return rows

        def apply_and_note(*update: Any) -> None:
            nonlocal applied
            apply(*update)
            applied = applied or bool(rows_of_wave)

        self._stream.wait_stream(products)  # gradients, and the weights of the step before
        exchange(prepare, apply_and_note)
        products.wait_stream(self._stream)  # whoever reads momentum and weights next
