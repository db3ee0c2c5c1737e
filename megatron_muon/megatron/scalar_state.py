"""Optimizer state: that of the scalar optimizers from the start, and how many bytes of it lie where.

Saving an fsdp_dtensor checkpoint runs collectives key by key, so ranks whose keys differ wait for
each other for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.tensor import DTensor

from megatron_muon import cpu
from megatron_muon.core.optimizer import MOMENTUM
from megatron_muon.core.ranks import numbers_of_all_ranks, say
from megatron_muon.core.rows import local_rows
from megatron_muon.offload.store import DEVICE, HOST, PLACES, RecordStore


def initialize_scalar_state(wrapped: MegatronOptimizer) -> None:
    """Create the state of a wrapped scalar optimizer now, and keep its step counters alike on every rank.

    0.19 makes the step counter with a first optimizer step, which a resumed run must not take;
    without it the run would not ask the checkpoint for it and count from 0 again.
    """
    wrapped.init_state_fn(wrapped.optimizer, wrapped.config)
    keep_counters_alike(wrapped.optimizer)


def keep_counters_alike(inner: torch.optim.Optimizer) -> None:
    """Give a scalar optimizer its step counters now: torch's AdamW one for each parameter, FusedAdam for each group.

    torch's then steps over shards without rows too, where Megatron-FSDP sets no gradient: a
    checkpoint keeps one counter for a parameter, and the rank that writes it may well be one
    without rows. FusedAdam gets no such gradients: its kernel is not launched for what precedes an
    empty tensor at a group's end.
    """
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        for group in inner.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                step = torch.zeros(
                    (), dtype=torch.float32, device=parameter.device if on_device else "cpu"
                )
                inner.state[parameter].setdefault("step", step)
        inner.register_step_pre_hook(_give_empty_gradients)
    elif type(inner).__name__ == "FusedAdam":
        for group in (group for group in inner.param_groups if group["params"]):
            on_device = torch.zeros(1, dtype=torch.int, device=group["params"][0].device)
            group.setdefault("step", on_device if getattr(inner, "capturable", False) else 0)


def _give_empty_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ):
        if parameter.grad is None and local_rows(parameter).numel() == 0:
            parameter.grad = torch.zeros_like(parameter.detach())


def report_state(optimizer: Any, *, of_muon: bool = False) -> dict[str, int]:
    """Print what an optimizer's state takes, momentum of Muon and all else apart; bytes by kind. Collective."""
    stores: list[RecordStore] = optimizer.stores if of_muon else []
    what = {store.what: f"{store.what} {store.codec.name}" for store in stores}
    rest, momentum = (
        ("all else", what.get("momentum", "momentum fp32")) if of_muon else ("all of it", "")
    )
    kinds: dict[str, Counter[str]] = {
        kind: Counter() for kind in (momentum, *what.values(), rest) if kind
    }
    for store in stores:
        kinds[what[store.what]].update(store.bytes, staged=store.staging_bytes)
    members = [
        getattr(member, "optimizer", None)
        for member in getattr(optimizer, "chained_optimizers", [optimizer])
    ]
    # None where a rank has no parameters
    inner = [member for member in members if member is not None]
    for slot, value in (
        item for one in inner for slots in one.state.values() for item in slots.items()
    ):
        if isinstance(value, torch.Tensor):
            tensor = value._local_tensor if isinstance(value, DTensor) else value
            place = (
                HOST if tensor.device.type == "cpu" and not (of_muon or cpu.installed()) else DEVICE
            )
            kinds[momentum if of_muon and slot == MOMENTUM else rest][place] += tensor.nbytes
    return {kind: _report(kind, taken) for kind, taken in kinds.items()}


def _report(name: str, taken: Counter[str]) -> int:
    """Print what this kind takes on the fullest rank and on all; all bytes of all ranks."""
    *ranks, staging = zip(
        *numbers_of_all_ranks([taken[place] for place in (*PLACES, "staged")]), strict=True
    )
    text = f"optimizer state: {name}"
    if max(staging):
        text += f", staged through {max(staging) / 1e6:,.2f} MB"
    text += f": {_shown([max(sizes) for sizes in ranks])}"
    in_all = [sum(sizes) for sizes in ranks]
    if len(staging) > 1:
        text += f" on the fullest rank; on all {len(staging)} ranks {_shown(in_all)}"
    say(text)
    return sum(in_all)


def _shown(sizes: Sequence[int]) -> str:
    return ", ".join(
        f"{place} {size / 1e6:,.2f} MB" for place, size in zip(PLACES, sizes, strict=True)
    )
