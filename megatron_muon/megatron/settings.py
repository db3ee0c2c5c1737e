"""The settings of Muon under Megatron-FSDP, filled from a run's flags, or by a script by name; see `flags.refusals`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_muon.core.numbers import check_numbers
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags import refusals
from megatron_muon.megatron.patches.fsdp import is_mended
from megatron_muon.settings import TP_MODE, MuonSettings


@dataclass
class MuonOptimizerConfig(MuonSettings, OptimizerConfig):
    """megatron-core's OptimizerConfig with this package's settings (`MuonSettings`), each under its flag's name."""

    muon_tp_mode: str = TP_MODE  # a plain OptimizerConfig keeps megatron-core's default


def require_megatron_fsdp(model_chunks: Sequence[Any]) -> None:
    """Refuse, by a UserError, a model that is not wrapped in Megatron-FSDP, and one whose gradients will be wrong."""
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    if ddp_config is None or not ddp_config.use_megatron_fsdp:
        raise UserError(
            "the model is not wrapped in Megatron-FSDP; wrap it first, or use megatron-core's own optimizer"
        )
    if not is_mended():
        raise UserError(
            "Megatron-FSDP of megatron-core 0.19 gets some gradients wrong; call megatron_muon.mend_megatron_fsdp() "
            "before the model is wrapped"
        )


def check_supported(config: MuonOptimizerConfig, model_chunks: Sequence[Any]) -> None:
    """Refuse, by a UserError with the value and the remedy, what Muon under Megatron-FSDP does not support."""
    check_numbers(config)
    chunk = model_chunks[0]
    on_cpu = next(chunk.parameters()).device.type == "cpu"
    run = refusals.MuonRun(settings=config, model=chunk.config, ddp=chunk.ddp_config, on_cpu=on_cpu, has_model=True)
    refusals.refuse(refusals.muon_rules(run))
