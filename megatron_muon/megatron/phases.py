"""Where a step's time goes, what it sends and what memory it takes, measured in single steps.

Methods of the optimizer and its exchange are wrapped for a few steps and put back; the timed steps run without any of
it. A wrapped method that has been renamed is an error, not a missing figure.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.exchange import AllGatherExchange, LocalExchange, OwnerExchange, SharedExchange
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.patching import Patches

PHASES = (
    "momentum",
    "gather",
    "gather_wait",
    "orthogonalize",
    "send_back",
    "scatter_wait",
    "apply",
    "other",
)
"""In the order of the step. momentum: decay, momentum and look-ahead; gather: packing rows and starting the exchange;
gather_wait: waiting for rows (for the all-gather scheme, all of its gathering); orthogonalize: assembly and iteration;
send_back: packing the update's rows; scatter_wait: waiting for them; other: what lies between."""

_MUON = {"_advance": "momentum", "_apply": "apply"}
_OWNER = {
    "_fill_gap": "orthogonalize",
    "_orthogonalize": "orthogonalize",
    "_send_back": "send_back",
    "_receive": "scatter_wait",
}
_ALLGATHER = {"_gather": "gather_wait", "orthogonalize": "orthogonalize"}
_SHARED = {"_orthogonalize": "orthogonalize", "_receive": "scatter_wait"}


def synchronize(device: torch.device) -> None:
    """Wait for a GPU's queue; nothing to wait for on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timers:
    """Sums seconds by phase; a phase within another counts for itself alone.

    On CUDA each phase is synchronised, so phases that overlap elsewhere do not here.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: Counter[str] = Counter()
        self._device = device
        self._within = [0.0]

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to `phase`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            start = time.perf_counter()
            result = call(*args, **kwargs)
            synchronize(self._device)
            elapsed = time.perf_counter() - start
            self.seconds[phase] += elapsed - self._within.pop()  # type: ignore[assignment]
            self._within[-1] += elapsed
            return result

        return timed


def attach(optimizer: torch.optim.Optimizer, timers: Timers) -> Patches:
    """Time the phases of `optimizer`, until the result's `undo()`.

    Raises:
        RuntimeError: a method that makes a phase is gone.
    """
    patches = Patches()
    if not isinstance(optimizer, ShardedMuon):
        patches.wrap(optimizer, "step", functools.partial(timers.timed, "apply"))
        return patches
    _wrap(patches, optimizer, _MUON, timers)
    exchange = optimizer.exchange
    if isinstance(exchange, AllGatherExchange):
        _wrap(patches, exchange, _ALLGATHER, timers)
    elif isinstance(exchange, OwnerExchange):
        _wrap(patches, exchange, _OWNER, timers)
        patches.wrap(exchange, "_gather", functools.partial(_gather, timers))
    elif isinstance(exchange, SharedExchange):
        _wrap(patches, exchange, _SHARED, timers)
    elif isinstance(exchange, LocalExchange):
        for _, batch in exchange._parts:
            patches.wrap(batch, "orthogonalize", functools.partial(timers.timed, "orthogonalize"))
    return patches


def _wrap(patches: Patches, owner: Any, phase_of: dict[str, str], timers: Timers) -> None:
    for name, phase in phase_of.items():
        patches.wrap(owner, name, functools.partial(timers.timed, phase))


def _gather(timers: Timers, gather: Callable[..., Any]) -> Callable[..., Any]:
    """Times packing as `gather`, and waiting for what it started as `gather_wait`."""
    packing = timers.timed("gather", gather)

    def gather_and_watch(*args: Any) -> Any:
        in_flight = packing(*args)
        in_flight.wait = timers.timed("gather_wait", in_flight.wait)
        return in_flight

    return gather_and_watch


class ByteCounter:
    """Counts the bytes that this rank receives from others in the collectives that exchanges use."""

    def __init__(self) -> None:
        self.received = 0
        self._patches = Patches()

    def __enter__(self) -> ByteCounter:
        self._patches.wrap(dist, "all_to_all_single", self._all_to_all, takes=("output_split_sizes",))
        self._patches.wrap(dist, "all_gather_into_tensor", self._all_gather, takes=("output_tensor", "input_tensor"))
        self._patches.wrap(dist, "broadcast", self._broadcast, takes=("group_src",))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.undo()

    def _all_to_all(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(output: torch.Tensor, input: torch.Tensor, received: list[int], *args: Any, **kwargs: Any) -> Any:
            rank = dist.get_rank(kwargs.get("group"))
            self.received += (sum(received) - received[rank]) * output.element_size()
            return call(output, input, received, *args, **kwargs)

        return counted

    def _all_gather(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.received += (output.numel() - input.numel()) * output.element_size()
            return call(output, input, *args, **kwargs)

        return counted

    def _broadcast(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group_src") != dist.get_rank(kwargs.get("group")):
                self.received += tensor.nbytes
            return call(tensor, *args, **kwargs)

        return counted


def peak_extra_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that `step` holds beyond what was there before it.

    On CUDA the caching allocator's count of allocated bytes; on CPU the sum of the allocations and releases that the
    profiler sees in this thread. Allocations of gloo and of the math libraries themselves are in neither.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        held += size
        peak = max(peak, held)
    return peak
