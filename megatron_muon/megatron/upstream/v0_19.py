"""Names and patches that differ between versions, for megatron-core 0.19; `v0_20` for 0.20."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_muon.megatron.upstream import FullyShardedDataParallel, _is_nonlinear_or_embedding
from megatron_muon.patching import Patches

WRAPPER = FullyShardedDataParallel
"""The class around a model in Megatron-FSDP."""

CUT_BY_LAYER = ("optim_grads_params",)
"""Strategies that make buckets of layers; others cut by size."""

SPLIT = ("handle_swiglu_in_state_dict",)
"""Functions that split fused weights in checkpoints."""

IS_LEFT_OUT = _is_nonlinear_or_embedding
"""A function of a parameter, true if megatron-core's own Muon leaves it to Adam."""

PATCHES: tuple[Callable[[Patches], None], ...] = ()
"""Patches for this version alone, under Megatron-FSDP."""


def has_marked(module: Any) -> bool:
    """True if megatron-core itself leaves a weight of this module to Adam."""
    return False
