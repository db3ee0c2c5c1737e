"""Compares the settings of a Muon between ranks before its first collective, which may hang or abort where they differ.

It goes through the store by which the ranks found each other: a few small requests from each rank, with a time limit
that no backend has to keep.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_muon.core.errors import UserError

TIME_LIMIT = timedelta(minutes=5)
"""How long a rank waits for the others to make their Muon; some may still be reading a model."""

_OF_RANKS = ("params", "process_group", "offload_dir", "muon_offload_dir")
"""What may differ: objects of each process, and a directory of each node."""


def compare_settings(settings: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Compare settings, and those of parameter groups, between ranks. Collective over these.

    A UserError on every rank with the first setting that differs and both values, or the ranks that do not answer.
    """
    if len(ranks) < 2 or dist.get_backend() == "fake":
        return
    shared = dict(settings)
    for number, group in enumerate(groups):
        shared |= {f"{name} of parameter group {number}": group[name] for name in group if name not in _OF_RANKS}
    mine = {name: _shown(each) for name, each in shared.items() if name not in _OF_RANKS and not callable(each)}
    rank, key = dist.get_rank(), hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    store = c10d.PrefixStore(f"megatron_muon/{key}", c10d._get_default_store())
    store = c10d.PrefixStore(str(store.add(f"made on {rank}", 1)), store)  # a Muon after the other
    try:
        if rank == ranks[0]:
            store.set("settings", json.dumps(mine))
        store.wait(["settings"], TIME_LIMIT)
        first = json.loads(store.get("settings"))
        for name in dict.fromkeys([*first, *mine]):
            one, two = (values.get(name, "not set") for values in (first, mine))
            if one != two:
                store.set("difference", f"{name} is {one} on rank {ranks[0]} and {two} on rank {rank}")
                break
        store.set(f"rank {rank}", "")
        if store.add("ranks", 1) == len(ranks):
            store.set("all", "")
        store.wait(["all"], TIME_LIMIT)
    except RuntimeError as error:
        absent = [other for other in ranks if not store.check([f"rank {other}"]) and other != rank]
        raise UserError(
            f"rank {rank} has waited {TIME_LIMIT.total_seconds():g} s for ranks {reprlib.repr(absent)} to make this "
            f"Muon; make it on each of the ranks {reprlib.repr(list(ranks))}, with the same share_replicated, "
            "process_group and offload"
        ) from error
    if store.check(["difference"]):
        raise UserError(f"{store.get('difference').decode()}; give every rank the same settings")


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)
