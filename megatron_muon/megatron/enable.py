"""Muon in another Megatron script or a custom training loop; see docs/own-megatron.md."""

from __future__ import annotations

import gc
from typing import Any

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.flags.flag_names import did_you_mean
from megatron_muon.megatron.flags.refusals import FIELDS
from megatron_muon.megatron.provenance import check_versions

_enabled: dict[str, Any] | None = None


def enable(**settings: Any) -> None:
    """Let Megatron train with Muon under Megatron-FSDP where flags or a config ask for it.

    Call it before megatron.training parses flags, or in a custom loop before
    `get_megatron_optimizer`; a second call does nothing. This package's flags, validation,
    optimizer, checkpoints and corrections of Megatron-FSDP then work as in pretrain_gpt.py; the log
    names the patches. Without `--optimizer muon --use-megatron-fsdp`, or a config that says the
    same, Megatron is unchanged. With these flags a machine without a GPU uses the CPU.

    Args:
        settings: defaults of `MuonSettings`; flags and attributes of the config win.

    Raises:
        UserError: too late, an unknown setting, settings that differ from an earlier call's, or
            another megatron-core.
    """
    global _enabled
    for name in settings.keys() - set(FIELDS):
        near = did_you_mean(name, FIELDS) or "; Megatron's own belong in its config"
        raise UserError(f"megatron_muon.enable has no setting {name}{near}")
    if _enabled is not None:
        if settings not in ({}, _enabled):
            before = _enabled or "no settings"
            raise UserError(f"megatron_muon.enable was called before, with {before}; call it once")
        return
    warning = check_versions()
    with quiet_imports():
        from megatron_muon.megatron.patches import install
        from megatron_muon.megatron.upstream import global_vars
        from megatron_muon.patching import Patches
        from megatron_muon.ranks import say

    if global_vars._GLOBAL_ARGS is not None or _has_megatrons_muon():
        raise UserError(f"megatron_muon.enable comes too late; {install.TOO_LATE}")
    if warning:
        say(f"megatron-muon: {warning}")
    install.follow(Patches(), settings)
    _enabled = settings


def _has_megatrons_muon() -> bool:
    """True if megatron-core's own Muon has shards of Megatron-FSDP, which it trains wrong."""
    from megatron_muon.megatron.upstream import emerging_optimizers

    muon = getattr(emerging_optimizers, "TensorParallelMuon", ())  # absent without its package
    for optimizer in (each for each in gc.get_objects() if issubclass(type(each), muon)):
        for group in optimizer.param_groups:
            if any(hasattr(p, "megatron_fsdp_dist_index") for p in group["params"]):
                return True
    return False
