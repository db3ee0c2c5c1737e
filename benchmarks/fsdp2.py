"""muon-fsdp2 as a method of `python -m benchmarks.step`: another implementation, on FSDP2's shards of these matrices.

`fully_shard` cuts the benchmark's matrices, and muon-fsdp2's optimizer steps on the shards. As of
0.3.0 the i-th matrix belongs to rank i modulo the ranks: momentum's rows are gathered there, up to
8 matrices ahead, and after Newton-Schulz the update's rows are scattered, one matrix after the
other. A step changes its gradients in place, so `prepare()` puts them back before each, outside the
time: nothing runs forward or backward. CPU over gloo only.

What differs from `owner`, beyond the scheme:

- Everything travels in fp32.
- Newton-Schulz has 5 steps and Keller Jordan's coefficients, in bf16 whatever `--ns-dtype` says.
- A qkv matrix is one block of `(3H, H)`, not three of `(H, H)`: that is fewer operations.
- Shards are of equal size: rows that the ranks do not divide would end the processes.

Newton-Schulz is compiled at the first steps (a C++ compiler is needed), which belong to the
warm-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.peers import timed
from megatron_muon.core.probe import PhaseTimer
from megatron_muon.patching import Patches


class Fsdp2Muon:
    """muon-fsdp2's optimizer on matrices that FSDP2 has cut, to be used as `prepare()`, `step()`, `prepare()`, ...

    `step()` is collective. Needs torch's process group.

    Args:
        weights: whole matrices `(rows, cols)`, fp32, the same on every rank; the ranks divide all
            rows.
        gradients: this rank's rows of each matrix's gradient; not changed.
        momentum: Muon's beta; Nesterov's look-ahead is on.
        weight_decay: decoupled.
    """

    ns_dtype = torch.bfloat16

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        import muon_fsdp2

        model = torch.nn.ParameterList(torch.nn.Parameter(weight.clone()) for weight in weights)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        self.matrices: list[DTensor] = list(model.parameters())  # type: ignore[arg-type]
        self._gradients = tuple(gradients)
        for matrix, gradient in zip(self.matrices, self._gradients, strict=True):
            matrix.grad = DTensor.from_local(gradient.clone(), mesh, matrix.placements)
        group = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": True,
            "rms_scale": False,
        }
        self._model = model
        self._optimizer: Any = muon_fsdp2.Muon(
            [{"params": self.matrices, "use_muon": True, **group}]
        )

    def prepare(self) -> None:
        """Puts the gradients back."""
        for matrix, gradient in zip(self.matrices, self._gradients, strict=True):
            assert isinstance(matrix.grad, DTensor)
            matrix.grad.to_local().copy_(gradient)

    def step(self) -> None:
        """One step of Muon, and nothing else."""
        self._optimizer.step()

    def attach(self, timer: PhaseTimer) -> Patches:
        """Time the phases of the step and count what its collectives bring, until the result's `undo()`.

        Assembling a matrix counts as `apply`.

        Raises:
            RuntimeError: a function that makes a phase is gone.
        """
        import muon_fsdp2

        patches = Patches()
        for owner, name, phase in (
            (muon_fsdp2, "apply_momentum", "momentum"),
            (muon_fsdp2, "zeropower_via_newtonschulz5", "orthogonalize"),
            # waiting for the owner's Newton-Schulz is in it
            (muon_fsdp2, "scatter", "scatter_wait"),
            (muon_fsdp2.Fsdp1dWork, "start", "gather"),  # without what is within it: momentum
            (muon_fsdp2.Fsdp1dWork, "finish", "apply"),  # without the others
        ):
            patches.wrap(owner, name, functools.partial(timed, timer, phase))
        patches.wrap(
            muon_fsdp2, "gather", functools.partial(_gather, timer), takes=("tensor", "gather_list")
        )
        patches.wrap(muon_fsdp2, "scatter", functools.partial(_scatter, timer))
        return patches


def _gather(timer: PhaseTimer, gather: Callable[..., Any]) -> Callable[..., Any]:
    """Times waiting for what `gather` started as `gather_wait`, and counts it."""

    def watched(sent: torch.Tensor, parts: list[torch.Tensor] | None, **kwargs: Any) -> Any:
        timer.received((len(parts) - 1) * sent.nbytes if parts is not None else 0)
        return SimpleNamespace(wait=timed(timer, "gather_wait", gather(sent, parts, **kwargs).wait))

    return watched


def _scatter(timer: PhaseTimer, scatter: Callable[..., Any]) -> Callable[..., Any]:
    def counted(
        received: torch.Tensor, scatter_list: list[torch.Tensor] | None, **kwargs: Any
    ) -> Any:
        timer.received(received.nbytes if scatter_list is None else 0)
        return scatter(received, scatter_list, **kwargs)

    return counted
