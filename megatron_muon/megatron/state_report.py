"""How many bytes an optimizer's state takes, by kind and place."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from megatron_muon import cpu
from megatron_muon.core.rows import MOMENTUM
from megatron_muon.megatron.flags.named_optimizer import LION, is_class
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.offload.store import DEVICE, HOST, PLACES, RecordStore
from megatron_muon.ranks import numbers_of_all_ranks, say
from megatron_muon.shards import local_part


def report_state(optimizer: Any, *, of_muon: bool = False) -> dict[str, int]:
    """Print the bytes of an optimizer's state, Muon's momentum apart; return them by kind.

    Collective.
    """
    stores: list[RecordStore] = optimizer.stores if of_muon else []
    stored = {store.what: f"{store.what} {store.codec.name}" for store in stores}
    momentum, rest = "", "all of it"
    if of_muon:
        momentum, rest = stored.get("momentum", "momentum fp32"), "all else"
        if is_class(optimizer.config.optimizer) and optimizer.config.optimizer != LION:
            momentum = f"{optimizer.config.optimizer}, of matrices"
    # Every rank reports the same kinds in the same order.
    names = [momentum, *stored.values(), rest] if of_muon else [rest]
    kinds = {name: Counter[str]() for name in names}
    for store in stores:
        kinds[stored[store.what]].update(store.bytes, staged=store.staging_bytes)
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(member, "optimizer", None)
        if inner is None:  # this rank has no parameters of it
            continue
        if of_muon and isinstance(inner, ShardedMuon):
            method = inner.part.waves.method
            kind = rest if method.takes_momentum else momentum
            kinds[kind][HOST if method.keeps_on_host else DEVICE] += inner.part.method_state.nbytes
        for slots in inner.state.values():
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):
                    kind = momentum if of_muon and slot == MOMENTUM else rest
                    tensor = local_part(value)
                    kinds[kind][_place_of(tensor, of_muon=of_muon)] += tensor.nbytes
    return {kind: _report(kind, taken) for kind, taken in kinds.items()}


def _place_of(tensor: torch.Tensor, *, of_muon: bool) -> str:
    is_offloaded = tensor.device.type == "cpu" and not (of_muon or cpu.installed())
    return HOST if is_offloaded else DEVICE


def _report(name: str, taken: Counter[str]) -> int:
    """Print the bytes of one kind, on the fullest rank and on all; return those of all ranks."""
    *places, staging = zip(
        *numbers_of_all_ranks([taken[place] for place in (*PLACES, "staged")]), strict=True
    )
    text = f"optimizer state: {name}"
    if max(staging):
        text += f", staged through {max(staging) / 1e6:,.2f} MB"
    text += f": {_megabytes([max(sizes) for sizes in places])}"
    totals = [sum(sizes) for sizes in places]
    if len(staging) > 1:
        text += f" on the fullest rank; on all {len(staging)} ranks {_megabytes(totals)}"
    say(text)
    return sum(totals)


def _megabytes(sizes: list[int]) -> str:
    named = zip(PLACES, sizes, strict=True)
    return ", ".join(f"{place} {size / 1e6:,.2f} MB" for place, size in named)
