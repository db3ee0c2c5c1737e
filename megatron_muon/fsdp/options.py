"""Arguments of `Muon`: validation, their settings and iteration, their names in messages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_muon.core.cost import Coefficients, Iteration
from megatron_muon.core.numbers import check_number, check_numbers, number_of
from megatron_muon.core.user_errors import UserError, word_settings
from megatron_muon.fsdp.parameter_groups import KNOWN, NOTES, OF_ALL, OPTIMIZER, check_betas
from megatron_muon.settings import MuonSettings, choices_of

ADJUST_LR = {
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

EPS = 1e-7
"""The default `eps` of torch.optim.Muon; momentum of a smaller norm makes a smaller update."""

_SETTINGS = {
    "ns_coefficients": "muon_coefficient_type",
    "ns_steps": "muon_num_ns_steps",
    "moment2_eps": "adaptive_muon_eps",
    "beta2": "adaptive_muon_beta2",
    "moment2_method": "adaptive_muon_moment2_method",
}
"""Settings that have another name than their argument, `muon_` aside."""

_ARGUMENTS = {setting: argument for argument, setting in _SETTINGS.items()}

_NOT_SETTINGS = ("lr", "exclude", "ns_steps_for")
"""Arguments with another meaning or form than the setting with such a name."""

_UNCAPTURED = {"offload": "none", "momentum_dtype": "fp32", "free_buffers": False}
"""The values that a captured step needs."""


def argument_of(setting: str) -> str:
    """The argument of `Muon` for a setting."""
    return _ARGUMENTS.get(setting, setting.removeprefix("muon_"))


word_as_arguments = functools.partial(word_settings, argument_of)
"""Rewords errors about settings with the arguments of `Muon`."""


def iteration_of(
    ns_coefficients: tuple[float, float, float] | Coefficients | str = NS_COEFFICIENTS,
    ns_steps: int = NS_STEPS,
    fp32_matmul_prec: str = Iteration.precision,
    ns: str = MuonSettings.muon_ns,
) -> Iteration:
    """The Newton-Schulz iteration of these arguments."""
    if isinstance(ns_coefficients, str):
        return Iteration(ns_coefficients, ns_steps, fp32_matmul_prec, ns)
    several: Any = ns_coefficients
    try:
        if not isinstance(several[0], Sequence):
            several = [several]
        steps = tuple((float(a), float(b), float(c)) for a, b, c in several)
    except (TypeError, ValueError, IndexError):
        raise UserError(
            f"ns_coefficients={ns_coefficients!r} is not (a, b, c), or a sequence of such"
        ) from None
    coefficients = "simple" if steps == (NS_COEFFICIENTS,) else steps
    return Iteration(coefficients, ns_steps, fp32_matmul_prec, ns)


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
    _check_choices(given, settings)
    check_numbers(settings)
    for name in ("lr", "weight_decay", "adamw_lr", "adamw_weight_decay"):
        if given[name] is not None or not name.startswith("adamw"):
            check_number(name.removeprefix("adamw_"), given[name], setting=name)
    for name in ("eps", "adamw_eps"):
        check_number("adam_eps", given[name], setting=name)
    check_betas(given["adamw_betas"], "adamw_betas")
    _check_combinations(given)


def _check_choices(given: Mapping[str, Any], settings: MuonSettings) -> None:
    choices: dict[str, tuple[Any, ...]] = {
        argument_of(name): choices_of(name) for name in vars(settings)
    }
    choices["moment2_method"] = (None, *choices["moment2_method"])
    choices["fp32_matmul_prec"] = ("highest", "high", "medium", "low")
    choices["adjust_lr_fn"] = tuple(ADJUST_LR)
    for name, allowed in choices.items():
        if allowed and name in given and given[name] not in allowed:
            shown = ", ".join(map(repr, allowed))
            raise UserError(f"{name}={given[name]!r} does not exist; choose one of {shown}")


def _check_combinations(given: Mapping[str, Any]) -> None:
    if given["cuda_graph"]:
        for name, value in {**_UNCAPTURED, "metrics_interval": 0}.items():
            if given[name] != value:
                raise UserError(
                    f"{name}={given[name]!r} is not supported with cuda_graph=True; use"
                    f" {name}={value!r}"
                )
    if given["hyperball"] and given["moment2_method"] is not None:
        raise UserError(
            "hyperball=True is not supported with moment2_method; leave one of the two out"
        )
    if given["hyperball"] and given["cautious_weight_decay"]:
        raise UserError(
            "cautious_weight_decay=True has no effect with hyperball=True; leave one of the two out"
        )
    on_disk = given["offload"] == "nvme"
    if on_disk != (given["offload_dir"] is not None):
        raise UserError("offload='nvme' and offload_dir belong together; give both or neither")
    is_shared = given["share_replicated"]
    if given["process_group"] is not None and not is_shared and not on_disk:
        raise UserError(
            "process_group is for share_replicated=True or offload='nvme'; leave it out"
        )
    if is_shared and not dist.is_initialized():
        raise UserError(
            "share_replicated needs ranks to share with; call"
            " torch.distributed.init_process_group()"
        )


def without_shared_settings(
    state_dict: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict to load, without settings of torch.optim.Muon's groups that are shared here.

    Raises a UserError if they differ from this Muon's, or if the state is another optimizer's.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        if OPTIMIZER in group:  # saved by this class
            continue
        if unknown := sorted(group.keys() - {"params", "eps", *KNOWN, *NOTES, *OF_ALL}):
            raise UserError(
                f"the state to load is of another optimizer: its groups have {', '.join(unknown)},"
                " which Muon does not know, and its momentum means something else; see"
                " docs/questions.md"
            )
        for name, theirs, ours in _differing(group, given, (*OF_ALL, "eps")):
            if name == "eps" and theirs == EPS and ours == 0.0:  # the default of each
                continue
            raise UserError(
                f"the state to load has {name}={theirs!r}; make this Muon with it, not with"
                f" {ours!r}"
            )
        for name in (*OF_ALL, "eps"):
            group.pop(name, None)
    return {**state_dict, "param_groups": groups}


def check_groups(groups: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> None:
    """Raise a UserError for a setting of one group that holds for the whole optimizer."""
    for number, group in enumerate(groups):
        for name, _, _ in _differing(group, given, OF_ALL):
            raise UserError(
                f"{name}={group[name]!r} in parameter group {number} has no effect, as it holds"
                " for the whole optimizer; pass it to Muon"
            )


def _differing(
    group: Mapping[str, Any],
    given: Mapping[str, Any],
    names: Sequence[str],
) -> Iterator[tuple[str, Any, Any]]:
    """The settings of a group that differ from this optimizer's, with both values."""
    for name in names:
        if name in group:
            theirs = _meaning(name, group[name])
            ours = _meaning(name, given[name])
            if theirs != ours:
                yield name, theirs, ours


def _meaning(name: str, value: Any) -> Any:
    """A setting of `torch.optim.Muon`; equal for values with the same meaning."""
    if name == "ns_coefficients":
        return iteration_of(value).coefficient_type
    if name == "adjust_lr_fn":
        return value or "original"
    return number_of(value)
