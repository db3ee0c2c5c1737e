"""The matrices of a `transformers` model under `fully_shard` over all ranks, without ranks.

The model is built on the meta device; nothing is downloaded. Settings are the defaults of `Muon`.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import placement_types

from megatron_muon import shipped
from megatron_muon.core.cost import AUTO, Iteration
from megatron_muon.core.layout import Layout, Shards
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.errors import UserError, reason_of
from megatron_muon.fsdp.selection import select
from megatron_muon.matrices.views import View
from megatron_muon.tools.plan.estimate import Group, Hardware, PlanSettings
from megatron_muon.tools.plan.planned_cuts import placed_shards


def read_transformers(
    path: Path, world_size: int, hardware: Hardware, ep: int = 1
) -> tuple[PlanSettings, list[Group], float]:
    """The matrices of the model that a `transformers` folder or config.json describes.

    The experts of each layer are spread over `ep` ranks before `fully_shard`. The last result is
    the number of AdamW's elements on a rank.

    Raises:
        UserError: transformers is not installed or has no such model, or `ep` is impossible.
    """
    model = _build_on_meta(shipped.find(path))
    selection = select(model)
    matrices = []
    others = 0
    for parameter, choice in selection.choices.items():
        view = choice.view
        if choice.why:
            others += parameter.numel()
            continue
        for matrix, shards in zip(choice, _shards_of(view, world_size, ep), strict=True):
            matrices.append(replace(matrix, shards=shards))
    method = NewtonSchulz(Iteration("simple", 5), scale_mode="shape_scaling")  # Muon's defaults
    settings = PlanSettings(None, hardware.sizes(method, AUTO))
    layout = Layout(world_size, tuple(matrices))
    return settings, [Group("fully_shard", layout)], others / world_size


def _build_on_meta(path: Path) -> Any:
    if not path.exists():  # transformers would take it for a model's name on the hub
        raise UserError(f"--hf {path} does not exist; give a folder or its config.json")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if kind is not None:
                return kind(config)
            automatic = transformers.AutoModelForCausalLM
            return automatic.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = reason_of(error)
        raise UserError(f"--hf {path}: transformers cannot build it: {reason}") from None


@functools.cache
def _shards_of(view: View, world_size: int, ep: int) -> list[Shards]:
    """The shards of each matrix of a parameter, with stacks of experts over `ep` ranks.

    The mesh of experts is `(world_size / ep, ep)`: its first dimension shards the experts of an
    expert-parallel rank, or, where these are fewer than its ranks, the rows of each, evenly, as
    `fully_shard` requires.

    Source: torchtitan's layout, pytorch/torchtitan#1561.
    """
    ranks = np.arange(world_size)
    by_rows = placement_types.Shard(0)
    if ep == 1 or not view.is_stack:
        return placed_shards(view, ranks, [by_rows])
    experts = view.count
    rows = view.shape[1]
    cuts_rows = experts < world_size
    rows_are_even = not cuts_rows or rows % (world_size // ep) == 0
    if experts % ep or world_size % ep or not rows_are_even:
        raise UserError(
            f"--ep {ep} does not spread {experts} experts of {rows} rows evenly over --world-size"
            f" {world_size}; use another number, or 1"
        )
    over_data: Any = placement_types._StridedShard(0, split_factor=ep)
    if cuts_rows:
        over_data = placement_types.Shard(1)
    return placed_shards(view, ranks.reshape(-1, ep), [over_data, by_rows])
