"""Optimizer state: that of the scalar optimizers from the start, and how many bytes of it lie where.

Saving an fsdp_dtensor checkpoint runs collectives key by key, so ranks whose keys differ wait for each other for ever.
torch's AdamW makes state at the first gradient and none for empty shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.tensor import DTensor

from megatron_muon import cpu
from megatron_muon.core.optimizer import MOMENTUM, ShardedMuon, local_rows
from megatron_muon.megatron.ranks import of_all_ranks, say
from megatron_muon.offload.store import DEVICE, DISK, HOST, RecordStore


def initialize_scalar_state(wrapped: MegatronOptimizer) -> None:
    """Create the state of a wrapped scalar optimizer now, and keep its step counters alike on every rank.

    megatron-core's own initialisation leaves out the step counter (0.19 makes it with a first optimizer step, which a
    resumed run must not take): torch's AdamW has one for each parameter, the FusedAdam of Transformer Engine and Apex
    one for each group. Without it a resumed run would not ask the checkpoint for it and count from 0 again.

    torch's then steps over shards without rows too, where Megatron-FSDP sets no gradient: a checkpoint keeps one
    counter for a parameter, and the rank that writes it may well be one without rows. FusedAdam counts steps of groups,
    and its kernel is not launched for what precedes an empty tensor at a group's end.
    """
    inner = wrapped.optimizer
    wrapped.init_state_fn(inner, wrapped.config)
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        for group in inner.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
                inner.state[parameter].setdefault("step", step)
        inner.register_step_pre_hook(_give_empty_gradients)
    elif type(inner).__name__ == "FusedAdam":
        for group in inner.param_groups:
            if group["params"] and "step" not in group:
                device = group["params"][0].device
                capturable = getattr(inner, "capturable", False)
                group["step"] = torch.zeros(1, dtype=torch.int, device=device) if capturable else 0


def _give_empty_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is None and local_rows(parameter).numel() == 0:
            parameter.grad = torch.zeros_like(parameter.detach())


def report_muon_state(chain: Any) -> dict[str, int]:
    """Prints what momentum and the rest of a `MuonChainedOptimizer`'s state take; bytes by kind. Collective."""
    inner = [member.optimizer for member in chain.chained_optimizers if not member.is_stub_optimizer]
    momentum, rest = Counter[str](), Counter[str]()
    for slot, tensor in _tensors(inner):
        (momentum if slot == MOMENTUM else rest)[DEVICE] += tensor.nbytes
    muons = [one for one in inner if isinstance(one, ShardedMuon)]
    stores = [store for muon in muons if isinstance(store := muon.store, RecordStore)]
    for store in stores:
        momentum.update(store.bytes)
    text = kind = f"momentum {stores[0].codec.name if stores else 'fp32'}"
    if staging := sum(store.staging_bytes for store in stores):
        text += f", staged through {_mb(staging)} MB"
    buffered = sorted({str(file.path.parent) for store in stores for file in store.disk.files if not file.direct})
    if buffered:
        text += f", through the page cache ({buffered[0]} takes no direct I/O)"
    return {kind: _report(text, momentum), "all else": _report("all else", rest)}


def report_state(optimizer: Any) -> dict[str, int]:
    """Prints what the state of megatron-core's optimizer takes after its first step; bytes by kind. Collective."""
    here = Counter[str]()
    inner = [getattr(member, "optimizer", None) for member in getattr(optimizer, "chained_optimizers", [optimizer])]
    for _, tensor in _tensors([one for one in inner if one is not None]):  # None where a rank has no parameters
        here[HOST if tensor.device.type == "cpu" and not cpu.installed() else DEVICE] += tensor.nbytes
    return {"all of it": _report("all of it", here)}


def _tensors(optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """The local tensors of the optimizers' state, each with its slot."""
    for slot, value in (item for one in optimizers for slots in one.state.values() for item in slots.items()):
        if isinstance(value, torch.Tensor):
            yield slot, value._local_tensor if isinstance(value, DTensor) else value


def _report(name: str, here: Counter[str]) -> int:
    """Prints what the fullest rank has of each place, and all ranks together; all bytes of all ranks."""
    ranks = of_all_ranks(here)
    text = _places({place: max(rank[place] for rank in ranks) for place in (DEVICE, HOST, DISK)})
    if len(ranks) > 1:
        text += f" on the fullest rank; on all {len(ranks)} ranks {_places(sum(ranks, Counter()))}"
    say(f"optimizer state: {name}: {text}")
    return sum(rank.total() for rank in ranks)


def _places(sizes: dict[str, int]) -> str:
    return f"device {_mb(sizes[DEVICE])} MB, host {_mb(sizes[HOST])} MB, disk {_mb(sizes[DISK])} MB"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f}"
