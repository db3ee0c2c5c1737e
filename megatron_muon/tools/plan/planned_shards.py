"""The matrices of a `transformers` model under `fully_shard` over all ranks, without ranks.

The model is built on the meta device; nothing is downloaded. Settings are the defaults of `Muon`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon import shipped
from megatron_muon.core.cost import Iteration
from megatron_muon.core.layout import Layout, Matrix, Shard, whole
from megatron_muon.core.memory import Memory
from megatron_muon.errors import UserError, install
from megatron_muon.tools.plan.estimate import Group, Hardware, PlanSettings, plan_group
from megatron_muon.tools.plan.training_step import elementwise_ms

if TYPE_CHECKING:
    from megatron_muon.fsdp.views import View


def read_transformers(
    path: Path, world_size: int, hardware: Hardware, ep: int = 1
) -> tuple[PlanSettings, list[Group]]:
    """The matrices of the model that a `transformers` folder or config.json describes.

    The experts of each layer are spread over `ep` ranks before `fully_shard`.

    Raises:
        UserError: transformers is not installed or has no such model, or `ep` is impossible.
    """
    from megatron_muon.fsdp.selection import select

    model = _build_on_meta(shipped.find(path))
    selection = select(model)
    views = dict.fromkeys(selection.views.values())
    if ep > 1 and not any(view.is_stack for view in views):
        raise UserError(f"--hf {path} has no stacks of experts for Muon; leave --ep {ep} out")
    shards_of = {view: _shards_of(view, world_size, ep) for view in views}
    matrices = []
    for parameter, view in selection.views.items():
        rows = selection.choices[parameter].split or whole(view.matrix[0])
        names = view.names(selection.name(parameter))
        for name, shards in zip(names, shards_of[view], strict=True):
            matrices.append(Matrix(name, view.matrix, shards, rows))
    return _fully_sharded(world_size, matrices, hardware)


def _build_on_meta(path: Path) -> Any:
    import torch

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"--hf needs transformers ({error}); {install('hf')}") from None
    if not path.exists():
        raise UserError(f"--hf {path} does not exist; give a model's folder or its config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if kind is not None:
                return kind(config)
            automatic = transformers.AutoModelForCausalLM
            return automatic.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        version = transformers.__version__
        raise UserError(f"--hf {path}: transformers {version} cannot build it: {reason}") from None


def _fully_sharded(
    ranks: int, matrices: Iterable[Matrix], hardware: Hardware
) -> tuple[PlanSettings, list[Group]]:
    iteration = hardware.iterate(Iteration("simple", 5))  # the defaults of Muon
    settings = PlanSettings(None, Memory(2, iteration))
    return settings, [Group("fully_shard", Layout(ranks, tuple(matrices)))]


def step_ms(shapes: Sequence[tuple[int, int]], ranks: int, hardware: Hardware) -> float:
    """Milliseconds of a step on matrices of these shapes, elementwise passes included."""
    from megatron_muon.fsdp.views import View

    shards_of = {shape: _shards_of(View(shape), ranks, 1)[0] for shape in dict.fromkeys(shapes)}
    matrices = [Matrix(str(number), shape, shards_of[shape]) for number, shape in enumerate(shapes)]
    settings, (group,) = _fully_sharded(ranks, matrices, hardware)
    held = sum(map(math.prod, shapes)) / ranks
    elementwise = elementwise_ms(held, held, settings, hardware)
    return plan_group(group, settings, hardware).step_ms + elementwise


def _shards_of(view: View, world_size: int, ep: int) -> list[tuple[Shard, ...]]:
    """The shards of each matrix of a parameter, with stacks of experts over `ep` ranks.

    The mesh of experts is `(world_size / ep, ep)`: its first dimension shards the experts of an
    expert-parallel rank, or, where these are fewer than its ranks, the rows of each, evenly, as
    `fully_shard` requires.

    Source: torchtitan's layout, pytorch/torchtitan#1561.
    """
    import numpy as np
    from torch.distributed.tensor import placement_types

    from megatron_muon.fsdp.cuts import placed_shards

    ranks, cut = np.arange(world_size), placement_types.Shard
    if ep == 1 or not view.is_stack:
        return placed_shards(view, ranks, [cut(0)])
    experts, rows = view.count, view.shape[1]
    cuts_rows = experts < world_size
    possible = []
    for size in range(1, experts + 1):
        if experts % size or world_size % size:
            continue
        rows_are_even = size == 1 or rows % (world_size // size) == 0
        if rows_are_even or not cuts_rows:
            possible.append(size)
    if ep not in possible:
        raise UserError(
            f"--ep {ep} does not spread {experts} experts of {rows} rows evenly over --world-size"
            f" {world_size}; use one of {', '.join(map(str, possible))}"
        )
    over_data = cut(1) if cuts_rows else placement_types._StridedShard(0, split_factor=ep)
    return placed_shards(view, ranks.reshape(-1, ep), [over_data, cut(0)])
