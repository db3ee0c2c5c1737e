"""How many bytes of optimizer state lie on the device, in host memory and on disk: log lines, and `facts.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon import cpu
from megatron_muon.core.optimizer import MOMENTUM, ShardedMuon
from megatron_muon.megatron import FACTS
from megatron_muon.megatron.ranks import of_all_ranks, say
from megatron_muon.offload.store import DEVICE, DISK, HOST, RecordStore


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes what is known of a run for tools into --tensorboard-dir, beside the run's events.

    Args:
        folder: --tensorboard-dir.
        facts: `parameters` of the model; `muon_parameters` and `plan`, its digest, of a Muon; `state_bytes` of all
            ranks together, by kind; `diverged_at`, the iteration that Megatron ended the run at for a number that is
            not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


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
    for optimizer in optimizers:
        for slots in optimizer.state.values():
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):
                    yield slot, value._local_tensor if isinstance(value, DTensor) else value


def _report(name: str, here: Counter[str]) -> int:
    """Prints what the fullest rank has of each place, and all ranks together; all bytes of all ranks."""
    ranks = of_all_ranks(here)
    text = _places({place: max(rank[place] for rank in ranks) for place in (DEVICE, HOST, DISK)})
    if len(ranks) > 1:
        total = _places({place: sum(rank[place] for rank in ranks) for place in (DEVICE, HOST, DISK)})
        text += f" on the fullest rank; on all {len(ranks)} ranks {total}"
    say(f"optimizer state: {name}: {text}")
    return sum(rank.total() for rank in ranks)


def _places(sizes: dict[str, int]) -> str:
    return f"device {_mb(sizes[DEVICE])} MB, host {_mb(sizes[HOST])} MB, disk {_mb(sizes[DISK])} MB"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f}"
