"""Muon in a Megatron script or a training loop of one's own; docs/own-megatron.md."""

from __future__ import annotations

import gc
from typing import Any

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.flags.flag_names import did_you_mean
from megatron_muon.megatron.flags.refusals import FIELDS
from megatron_muon.megatron.provenance import check_versions

_enabled: dict[str, Any] | None = None


def enable(**settings: Any) -> None:
    """Let Megatron train with Muon under Megatron-FSDP where flags or an optimizer's config say so; twice is once.

    Call it before megatron.training parses flags, or in a loop of one's own before
    `get_megatron_optimizer`. This package's flags, validation, optimizer, checkpoints and
    corrections of Megatron-FSDP are then those of pretrain_gpt.py; the log names the patches.
    Without `--optimizer muon --use-megatron-fsdp`, or a config that says the same, Megatron is as
    before. With these flags the CPU stands in for a GPU where there is none.

    Args:
        settings: of `MuonSettings`, where no flag and no attribute of the config says otherwise.

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
            raise UserError(
                f"megatron_muon.enable was called before, with {_enabled or 'no settings'}; call it"
                " once"
            )
        return
    check_versions()
    with quiet_imports():
        from megatron.core.optimizer import emerging_optimizers
        from megatron.training import global_vars

        from megatron_muon.megatron.patches import install
        from megatron_muon.patching import Patches

    theirs = getattr(emerging_optimizers, "TensorParallelMuon", ())  # there only if its package is
    muons = [each for each in gc.get_objects() if issubclass(type(each), theirs)]
    shards = [
        hasattr(p, "megatron_fsdp_dist_index")
        for one in muons
        for group in one.param_groups
        for p in group["params"]
    ]
    if global_vars._GLOBAL_ARGS is not None or any(shards):
        raise UserError(f"megatron_muon.enable comes too late; {install.TOO_LATE}")
    install.follow(Patches(), settings)
    _enabled = settings
