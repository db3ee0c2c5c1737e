"""How many bytes of optimizer state lie on the device, in host memory and on disk: log lines, and `facts.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon import cpu
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.megatron import FACTS
from megatron_muon.offload.store import DEVICE, DISK, HOST, RecordStore

_PLACES = (DEVICE, HOST, DISK)


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes what is known of a run's optimizer for tools, beside the run's events.

    Args:
        folder: --tensorboard-dir.
        facts: `muon_parameters` and `plan`, its digest, of a Muon; `state_bytes` of all ranks together, by kind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


def state_report(chain: Any) -> tuple[str, dict[str, int]]:
    """A line for momentum and one for the rest of the state, of the fullest rank and of all; bytes by kind. Collective.

    Args:
        chain: a `MuonChainedOptimizer`, whose state exists.
    """
    momentum, rest = state_bytes(chain)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (momentum, rest))
    stores = [store for _, muon in _sharded(chain) if isinstance(store := muon.store, RecordStore)]
    kind = f"momentum {stores[0].codec.name if stores else 'fp32'}"
    text = kind
    if staging := sum(store.staging_bytes for store in stores):
        text += f", staged through {_mb(staging)} MB"
    buffered = sorted({str(file.path.parent) for store in stores for file in store.buffered_files()})
    if buffered:
        text += f", through the page cache ({buffered[0]} takes no direct I/O)"
    lines = [
        f"optimizer state: {name}: {_line([one[at] for one in everyone])}" for at, name in enumerate((text, "all else"))
    ]
    return "\n".join(lines), {
        name: sum(sum(one[at].values()) for one in everyone) for at, name in enumerate((kind, "all else"))
    }


def adam_report(optimizer: Any) -> tuple[str, dict[str, int]]:
    """A line for the state of an optimizer of megatron-core, of the fullest rank and of all; bytes by kind. Collective.

    Args:
        optimizer: any MegatronOptimizer, or a chain of them, after its first step.
    """
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    here = dict.fromkeys(_PLACES, 0)
    for member in members:
        inner = getattr(member, "optimizer", None)  # None where a rank has no parameters
        for slots in inner.state.values() if inner is not None else ():
            for value in slots.values():
                if isinstance(value, torch.Tensor):
                    local = value._local_tensor if isinstance(value, DTensor) else value
                    here[HOST if local.device.type == "cpu" and not cpu.installed() else DEVICE] += local.nbytes
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    total = sum(sum(one.values()) for one in everyone)
    return f"optimizer state: all of it: {_line(everyone)}", {"all of it": total}


def state_bytes(chain: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by place on this rank, of momentum and of the rest of the state."""
    momentum, rest = dict.fromkeys(_PLACES, 0), dict.fromkeys(_PLACES, 0)
    for member in chain.chained_optimizers:
        if member.is_stub_optimizer:
            continue
        for slots in member.optimizer.state.values():
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):
                    local = value._local_tensor if isinstance(value, DTensor) else value
                    (momentum if slot == "momentum_buffer" else rest)[DEVICE] += local.nbytes
    for _, muon in _sharded(chain):
        if isinstance(muon.store, RecordStore):
            for place, size in muon.store.bytes.items():
                momentum[place] += size
    return momentum, rest


def _sharded(chain: Any) -> list[tuple[Any, ShardedMuon]]:
    return [
        (member, member.optimizer)
        for member in chain.chained_optimizers
        if not member.is_stub_optimizer and isinstance(member.optimizer, ShardedMuon)
    ]


def _line(ranks: list[Mapping[str, int]]) -> str:
    """What the fullest rank has of each place, and all ranks together."""
    most = {place: max(rank[place] for rank in ranks) for place in _PLACES}
    total = {place: sum(rank[place] for rank in ranks) for place in _PLACES}
    text = f"device {_mb(most[DEVICE])} MB, host {_mb(most[HOST])} MB, disk {_mb(most[DISK])} MB"
    if len(ranks) == 1:
        return text
    return (
        f"{text} on the fullest rank; on all {len(ranks)} ranks device {_mb(total[DEVICE])} MB, host "
        f"{_mb(total[HOST])} MB, disk {_mb(total[DISK])} MB"
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f}"
