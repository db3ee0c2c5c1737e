"""A step of matrices as a CUDA graph. It has never run: no GPU was at hand. What it needs is tested on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_muon.core.errors import UserError

_BEFORE = 2
"""Steps that run as they are: the first makes connections and caches, the second is like all others."""


class CapturedStep:
    """Runs a step twice as it is, then captures it, and from then on replays it.

    Args:
        enqueue: the step; what it enqueues must be the same in every step.
        gradients: finds the gradients, which have to stay where they are.
    """

    def __init__(self, enqueue: Callable[[], None], gradients: Callable[[], Sequence[torch.Tensor | None]]) -> None:
        self._enqueue, self._gradients = enqueue, gradients
        self.forget()

    def forget(self) -> None:
        """Capture anew."""
        self._steps = 0
        self._graph: Any = None
        self._addresses: list[int] = []

    def __call__(self) -> None:
        """One step.

        Raises:
            UserError: a gradient is missing, or lies elsewhere than when the step was captured.
        """
        self._steps += 1
        if self._steps <= _BEFORE:
            self._enqueue()
            return
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in self._gradients()]
        if self._graph is None:
            self._addresses = addresses
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._enqueue()
            self._graph = graph
        if addresses != self._addresses or 0 in addresses:
            raise UserError(
                "cuda_graph=True needs every gradient where it was when the step was captured; call "
                "optimizer.zero_grad(set_to_none=False), or leave cuda_graph out"
            )
        self._graph.replay()
