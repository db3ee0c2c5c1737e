"""The settings of Muon under Megatron-FSDP, filled from a run's flags, or by a script by name; see `flags.refusals`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_muon.core.numbers import check_numbers
from megatron_muon.megatron.flags import refusals
from megatron_muon.settings import TP_MODE, MuonSettings, word_as_flags


@dataclass
class MuonOptimizerConfig(MuonSettings, OptimizerConfig):
    """megatron-core's OptimizerConfig with this package's settings (`MuonSettings`), each under its flag's name."""

    muon_tp_mode: str = TP_MODE  # a plain OptimizerConfig keeps megatron-core's default


def with_settings(
    config: OptimizerConfig, settings: Mapping[str, Any] | None = None
) -> MuonOptimizerConfig:
    """A config of megatron-core or of a subclass with this package's settings: its own attributes, else `settings`.

    Of some settings megatron-core has the name too; its default there says nothing.
    """
    if isinstance(config, MuonOptimizerConfig):
        return config
    names = {field.name for field in fields(MuonOptimizerConfig)}
    unsaid = [
        name
        for name in settings or {}
        if getattr(OptimizerConfig, name, names) == vars(config).get(name)
    ]
    given = {
        **(settings or {}),
        **{name: value for name, value in vars(config).items() if name not in unsaid},
    }
    return MuonOptimizerConfig(**{name: value for name, value in given.items() if name in names})


@word_as_flags()
def check_supported(config: MuonOptimizerConfig, model_chunks: Sequence[Any]) -> None:
    """Refuse, by a UserError with the value and the remedy, what Muon under Megatron-FSDP does not support."""
    check_numbers(config)
    chunk = model_chunks[0]
    on_cpu = next(chunk.parameters()).device.type == "cpu"
    values = SimpleNamespace(**{**vars(chunk.ddp_config), **vars(chunk.config), **vars(config)})
    refusals.refuse(
        refusals.muon_rules(refusals.MuonRun(values=values, on_cpu=on_cpu, has_model=True))
    )
