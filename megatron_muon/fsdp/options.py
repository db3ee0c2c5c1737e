"""Arguments of `Muon`: validation, their settings and iteration, their names in messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_muon.core.cost import Iteration
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.errors import UserError, word_settings
from megatron_muon.fsdp.parameter_groups import ADAMW, OPTIMIZER, check_range
from megatron_muon.fsdp.part import NUMBERS
from megatron_muon.proven import check_iteration, check_steps_for
from megatron_muon.ranges import check_numbers
from megatron_muon.settings import MuonSettings, choices_of

ADJUST_LR: dict[Any, tuple[str, float]] = {
    None: ("shape_scaling", 1.0),
    "original": ("shape_scaling", 1.0),
    "match_rms_adamw": ("spectral", 0.2),
    "spectral": ("spectral", 1.0),
    "unit_rms_norm": ("unit_rms_norm", 1.0),
}
"""`adjust_lr_fn` as scale mode and factor of emerging-optimizers. The first three are
torch.optim.Muon's: sqrt(max(1, rows / cols)), and 0.2 * sqrt(max(rows, cols))."""

NS_COEFFICIENTS = (3.4445, -4.775, 2.0315)
NS_STEPS = 5
"""Defaults of torch.optim.Muon, which are the set "simple" of emerging-optimizers."""

_SETTINGS = {
    "ns_coefficients": "muon_coefficient_type",
    "ns_steps": "muon_num_ns_steps",
    "moment2_eps": "adaptive_muon_eps",
    "beta2": "adaptive_muon_beta2",
    "moment2_method": "adaptive_muon_moment2_method",
    "optimizer": "matrix_optimizer",
    "arguments": "matrix_optimizer_args",
}
"""Settings that have another name than their argument, `muon_` aside."""

_ARGUMENTS = {setting: argument for argument, setting in _SETTINGS.items()}

_NOT_SETTINGS = ("lr", "exclude", "matrices", "ns_steps_for")
"""Arguments with another meaning or form than the setting with such a name."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "moment2_method": (None, *choices_of("adaptive_muon_moment2_method")),
    "fp32_matmul_prec": ("highest", "high", "medium", "low"),
    "adjust_lr_fn": tuple(ADJUST_LR),
}
"""Choices of arguments that are not those of a setting."""

_REQUIRED: dict[str, dict[str, Any]] = {
    "cuda_graph": {
        "offload": "none",
        "momentum_dtype": "fp32",
        "free_buffers": False,
        "metrics_interval": 0,
    },
    "hyperball": {"moment2_method": None, "cautious_weight_decay": False},
}
"""The values that other arguments need beside one that is True."""


def argument_of(setting: str) -> str:
    """The argument of `Muon` for a setting."""
    return _ARGUMENTS.get(setting, setting.removeprefix("muon_"))


word_as_arguments = functools.partial(word_settings, argument_of)
"""Rewords errors about settings with the arguments of `Muon`."""


def _coefficients(given: Any) -> Any:
    """The coefficients of each step, or the name of a set."""
    if isinstance(given, str):
        return given
    several = given if isinstance(given[0], Sequence) else [given]
    steps = tuple(tuple(map(float, step)) for step in several)
    return "simple" if steps == (NS_COEFFICIENTS,) else steps


def method_of(given: Mapping[str, Any], device: torch.device) -> NewtonSchulz:
    """The iteration of the arguments of `Muon`, with its scale, on a device."""
    iteration = Iteration(
        _coefficients(given["ns_coefficients"]),
        given["ns_steps"],
        given["fp32_matmul_prec"],
        given["ns"],
    )
    check_iteration(iteration)
    check_steps_for(iteration, given["ns_steps_for"] or {})
    scale_mode, factor = ADJUST_LR[given["adjust_lr_fn"]]
    return NewtonSchulz(
        iteration,
        scale_mode=scale_mode,
        extra_scale_factor=factor,
        eps=given["eps"],
        scaled=given["moment2_method"] is None,
        device=device,
    )


def with_defaults(
    groups: Sequence[dict[str, Any]], given: Mapping[str, Any]
) -> Sequence[dict[str, Any]]:
    """The groups of a selection with the numbers of AdamW, whose defaults torch does not have."""
    for group in groups:
        if group[OPTIMIZER] != ADAMW:
            continue
        for name in ("lr", "weight_decay", "betas", "eps"):
            value = given[f"adamw_{name}"]
            if value is None and name in NUMBERS:
                value = given[name]
            group.setdefault(name, value)
    return groups


def settings_of(given: Mapping[str, Any]) -> MuonSettings:
    """The arguments as settings."""
    settings = MuonSettings()
    for name, value in given.items():
        setting = _SETTINGS.get(name, f"muon_{name}")
        is_setting = hasattr(settings, setting) and name not in _NOT_SETTINGS
        if is_setting and value is not None:
            setattr(settings, setting, value)
    return settings


def check_options(given: Mapping[str, Any]) -> None:
    """Raise a UserError for values that nothing later refuses."""
    settings = settings_of(given)
    choices = {argument_of(setting): choices_of(setting) for setting in vars(settings)} | _CHOICES
    for name, value in given.items():
        allowed = None if name in _NOT_SETTINGS else choices.get(name)
        if allowed and value not in allowed:
            shown = ", ".join(map(repr, allowed))
            raise UserError(f"{name}={value!r} does not exist; choose one of {shown}")
    check_numbers(settings)
    for name, value in given.items():
        check_range(name.removeprefix("adamw_"), value, name)
    for argument, required in _REQUIRED.items():
        for name, value in required.items():
            if given[argument] and given[name] != value:
                raise UserError(
                    f"{name}={given[name]!r} is not supported with {argument}=True; use"
                    f" {name}={value!r}"
                )
    if (given["offload"] == "nvme") != (given["offload_dir"] is not None):
        raise UserError("offload='nvme' and offload_dir belong together; give both or neither")
