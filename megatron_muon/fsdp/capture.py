"""A step of matrices as a CUDA graph.

It has never run on a GPU: none was at hand. Tests replay recorded operations on a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_muon.core.errors import UserError
from megatron_muon.core.rows import local_rows

_BEFORE = 2
"""Steps that run as they are: the first makes connections and caches, the second is like all others."""


class CapturedStep:
    """Runs a step of these parameters twice as it is, then captures it, and from then on replays it.

    A graph works on the memory that the captured step worked on. So learning rate and decay of the groups become
    tensors, fp32 on the device, for schedulers to fill; a decay of zero stays a number, as no operation reads it.
    """

    def __init__(
        self, enqueue: Callable[[], None], parameters: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]]
    ) -> None:
        self._enqueue, self._groups = enqueue, groups
        self._held = [parameter for parameter in parameters if local_rows(parameter).numel()]
        self._steps = 0
        self._graph: Any = None
        self._captured: list[Any] = []
        device = local_rows(parameters[0]).device
        for group in groups:
            for name in ("lr", "weight_decay")[: 1 + bool(group["weight_decay"])]:
                group[name] = torch.tensor(float(group[name]), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        """One step.

        Raises:
            UserError: a gradient, a learning rate or a decay is missing, or is not where the captured step has it.
        """
        self._steps += 1
        if self._steps <= _BEFORE:
            self._enqueue()
            return
        fixed = self._fixed()
        if None in fixed or (self._graph is not None and fixed != self._captured):
            raise UserError(
                "cuda_graph=True needs gradients, lr and weight_decay in the same tensors in every step; call "
                "optimizer.zero_grad(set_to_none=False) and group['lr'].fill_(value), or leave cuda_graph out"
            )
        if self._graph is None:
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._enqueue()
            self._graph, self._captured = graph, fixed
        self._graph.replay()

    def _fixed(self) -> list[Any]:
        """The addresses of what the step reads; None of a gradient that is missing; a number as it is."""
        gradients = [None if p.grad is None else local_rows(p.grad).data_ptr() for p in self._held]
        numbers = [group[name] for group in self._groups for name in ("lr", "weight_decay")]
        return gradients + [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in numbers]
