"""The settings of Muon under Megatron-FSDP as an optimizer's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from megatron_muon.megatron.flags.refusals import CheckedRun, check
from megatron_muon.megatron.upstream import OptimizerConfig
from megatron_muon.ranges import check_numbers
from megatron_muon.settings import TP_MODE, MuonSettings, word_as_flags


@dataclass
class MuonOptimizerConfig(MuonSettings, OptimizerConfig):
    """megatron-core's OptimizerConfig with this package's settings, each under its flag's name."""

    muon_tp_mode: str = TP_MODE  # a plain OptimizerConfig keeps megatron-core's default


def with_settings(
    config: OptimizerConfig, settings: Mapping[str, Any] | None = None
) -> MuonOptimizerConfig:
    """A config of megatron-core or of a subclass, completed by this package's `settings`.

    Attributes of `config` win, except megatron-core's own defaults for settings that it names too.
    """
    if isinstance(config, MuonOptimizerConfig):
        return config
    names = {field.name for field in fields(MuonOptimizerConfig)}
    given = dict(vars(config))
    for name, value in (settings or {}).items():
        if name not in given or given[name] == getattr(OptimizerConfig, name, names):
            given[name] = value
    return MuonOptimizerConfig(**{name: value for name, value in given.items() if name in names})


@word_as_flags()
def check_supported(config: MuonOptimizerConfig, model_chunks: Sequence[Any]) -> None:
    """Refuse settings that Muon under Megatron-FSDP does not support, with value and remedy."""
    check_numbers(config)
    chunk = model_chunks[0]
    values = SimpleNamespace(**{**vars(chunk.ddp_config), **vars(chunk.config), **vars(config)})
    on_cpu = next(chunk.parameters()).device.type == "cpu"
    check(CheckedRun(values, on_cpu=on_cpu, has_model=True))
