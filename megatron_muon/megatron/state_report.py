"""The log's lines on optimizer state: how many bytes lie on the device, in host memory and on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon import cpu
from megatron_muon.core.optimizer import MOMENTUM, ShardedMuon
from megatron_muon.megatron.ranks import of_all_ranks, say
from megatron_muon.offload.store import DEVICE, DISK, HOST, RecordStore


def report_muon_state(chain: Any) -> None:
    """Prints what momentum and the rest of the state of a `MuonChainedOptimizer` take. Collective."""
    inner = [member.optimizer for member in chain.chained_optimizers if not member.is_stub_optimizer]
    momentum, rest = Counter[str](), Counter[str]()
    for slot, tensor in _tensors(inner):
        (momentum if slot == MOMENTUM else rest)[DEVICE] += tensor.nbytes
    muons = [one for one in inner if isinstance(one, ShardedMuon)]
    stores = [store for muon in muons if isinstance(store := muon.store, RecordStore)]
    for store in stores:
        momentum.update(store.bytes)
    text = f"momentum {stores[0].codec.name if stores else 'fp32'}"
    if staging := sum(store.staging_bytes for store in stores):
        text += f", staged through {_mb(staging)} MB"
    if buffered := sorted({str(file.path.parent) for store in stores for file in store.buffered_files()}):
        text += f", through the page cache ({buffered[0]} takes no direct I/O)"
    _report(text, momentum)
    _report("all else", rest)


def report_state(optimizer: Any) -> None:
    """Prints what the state of an optimizer of megatron-core takes, or of a chain, after its first step. Collective."""
    here = Counter[str]()
    inner = [getattr(member, "optimizer", None) for member in getattr(optimizer, "chained_optimizers", [optimizer])]
    for _, tensor in _tensors([one for one in inner if one is not None]):  # None where a rank has no parameters
        here[HOST if tensor.device.type == "cpu" and not cpu.installed() else DEVICE] += tensor.nbytes
    _report("all of it", here)


def _tensors(optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """The local tensors of the optimizers' state, each with its slot."""
    for optimizer in optimizers:
        for slots in optimizer.state.values():
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):
                    yield slot, value._local_tensor if isinstance(value, DTensor) else value


def _report(name: str, here: Counter[str]) -> None:
    """Prints what the fullest rank has of each place, and all ranks together."""
    ranks = of_all_ranks(here)
    text = _places({place: max(rank[place] for rank in ranks) for place in (DEVICE, HOST, DISK)})
    if len(ranks) > 1:
        total = _places({place: sum(rank[place] for rank in ranks) for place in (DEVICE, HOST, DISK)})
        text += f" on the fullest rank; on all {len(ranks)} ranks {total}"
    say(f"optimizer state: {name}: {text}")


def _places(sizes: dict[str, int]) -> str:
    return f"device {_mb(sizes[DEVICE])} MB, host {_mb(sizes[HOST])} MB, disk {_mb(sizes[DISK])} MB"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f}"
