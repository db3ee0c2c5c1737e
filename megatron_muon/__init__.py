"""Muon for sharded models: every matrix is orthogonalized whole, wherever its shards are.

Fully sharded data parallelism (ZeRO) leaves each rank with a few rows of a matrix, while Muon needs
the whole momentum matrix; the package brings the two together. For any PyTorch model, under FSDP2,
Megatron-FSDP, DDP or nothing:

    optimizer = megatron_muon.Muon(model, lr=0.02, adamw_lr=3e-4)   # after the model is sharded

For Megatron under its own command line (`pretrain_gpt.py`), in its scripts, and in custom training
loops:

    megatron_muon.enable()    # before Megatron parses flags or calls get_megatron_optimizer

Importing this package is cheap and changes nothing: neither torch nor megatron-core is imported,
nothing is patched. What is named above is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_muon.version import __version__

if TYPE_CHECKING:
    from megatron_muon.fsdp.foreign_state import momentum_from
    from megatron_muon.fsdp.muon import Muon
    from megatron_muon.fsdp.sharded import Sharded
    from megatron_muon.megatron.enable import enable
    from megatron_muon.megatron.factory import get_megatron_muon_optimizer
    from megatron_muon.megatron.muon_config import MuonOptimizerConfig
    from megatron_muon.megatron.patches.fsdp import mend_megatron_fsdp, patch_megatron_fsdp
    from megatron_muon.qk_clip import QKClip

__all__ = [
    "Muon",
    "MuonOptimizerConfig",
    "QKClip",
    "Sharded",
    "__version__",
    "enable",
    "get_megatron_muon_optimizer",
    "mend_megatron_fsdp",
    "momentum_from",
    "patch_megatron_fsdp",
]

_PLACES = {
    "Muon": "megatron_muon.fsdp.muon",
    "MuonOptimizerConfig": "megatron_muon.megatron.muon_config",
    "QKClip": "megatron_muon.qk_clip",
    "Sharded": "megatron_muon.fsdp.sharded",
    "enable": "megatron_muon.megatron.enable",
    "get_megatron_muon_optimizer": "megatron_muon.megatron.factory",
    "mend_megatron_fsdp": "megatron_muon.megatron.patches.fsdp",  # the former name
    "momentum_from": "megatron_muon.fsdp.foreign_state",
    "patch_megatron_fsdp": "megatron_muon.megatron.patches.fsdp",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from megatron_muon.errors import missing_extra

    try:
        return getattr(importlib.import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(missing_extra(error) or str(error)) from error
