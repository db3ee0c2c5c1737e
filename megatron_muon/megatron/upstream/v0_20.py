"""Names and patches that differ between versions, for 0.20; `v0_19` describes the names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_muon.megatron.upstream import (
    FullyShardedDataParallelV1,
    _is_muon_excluded,
    get_args,
    training,
)
from megatron_muon.patching import Patches

WRAPPER = FullyShardedDataParallelV1
CUT_BY_LAYER = ("optim", "optim_grads", "optim_grads_params")
SPLIT = ("handle_swiglu_in_state_dict", "handle_mla_down_proj_in_state_dict")
IS_LEFT_OUT = _is_muon_excluded  # which heeds `use_muon`
_MIXERS = ("MambaMixer", "GatedDeltaProductMixer")


def keep_rates(patches: Patches) -> None:
    """Keep each group's rates when a checkpoint is loaded with --override-opt-param-scheduler.

    0.20 then gives all groups --lr and --min-lr, Muon's too.
    """

    @patches.around(training, "load_checkpoint")
    def load_checkpoint(
        load: Callable[..., Any],
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        groups = getattr(optimizer, "param_groups", ())
        before = {id(p): _rates(group) for group in groups for p in group["params"]}
        result = load(ddp_model, optimizer, opt_param_scheduler, *args, **kwargs)
        if opt_param_scheduler is not None and get_args().override_opt_param_scheduler:
            for group in optimizer.param_groups:  # loading has made new ones
                group.update(next((before[id(p)] for p in group["params"]), {}))
            opt_param_scheduler.step(increment=0)
        return result


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("max_lr", "min_lr") if name in group}


PATCHES = (keep_rates,)


def has_marked(module: Any) -> bool:
    """True for Mamba and gated delta products, whose parts 0.20's own Muon cannot split."""
    return type(module).__name__ in _MIXERS
