"""The arguments of `Muon`: what they may be, what iteration they ask for, and messages that speak of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_muon.core.cost import Coefficients, Iteration
from megatron_muon.core.errors import UserError
from megatron_muon.core.numbers import check_number, check_numbers, number_of
from megatron_muon.fsdp.selection import KNOWN, NOTES, OF_ALL, OPTIMIZER, check_betas
from megatron_muon.settings import MuonSettings, choices_of

ADJUST_LR = {
    None: ("shape_scaling", 1.0),
    "original": ("shape_scaling", 1.0),
    "match_rms_adamw": ("spectral", 0.2),
    "spectral": ("spectral", 1.0),
    "unit_rms_norm": ("unit_rms_norm", 1.0),
}
"""`adjust_lr_fn` as scale mode and factor of emerging-optimizers: the first three are torch.optim.Muon's, root of
max(1, rows / cols) and 0.2 times the root of max(rows, cols)."""

_ARGUMENTS = {
    "muon_num_ns_steps": "ns_steps",
    "muon_coefficient_type": "ns_coefficients",
    "adaptive_muon_eps": "moment2_eps",
    "adaptive_muon_beta2": "beta2",
    "adaptive_muon_moment2_method": "moment2_method",
}
"""What messages about flags call them, where it is not the flag's name without `muon`."""

_FLAGS = re.compile(r"--((?:adaptive-)?muon-[a-z0-9-]*[a-z0-9]|lr|weight-decay)(?![a-z0-9-])")
"""Flags that are arguments of `Muon`; others, such as those of `megatron-muon doctor`, are to be typed as they are."""

_NOT_SHARED = ("lr", "exclude", "ns_steps_for")
"""Arguments that mean something else, or are of another form, than the field of `MuonSettings` with such a name."""

NS_COEFFICIENTS, NS_STEPS = (3.4445, -4.775, 2.0315), 5
"""torch.optim.Muon's defaults, which are the set "simple" of emerging-optimizers."""

EPS = 1e-7
"""The default `eps` of torch.optim.Muon: there, momentum of a smaller norm makes a smaller update."""


def iteration_of(
    ns_coefficients: tuple[float, float, float] | Coefficients | str = NS_COEFFICIENTS,
    ns_steps: int = NS_STEPS,
    fp32_matmul_prec: str = Iteration.precision,
    ns: str = MuonSettings.muon_ns,
) -> Iteration:
    """The Newton-Schulz iteration that arguments of `Muon` ask for."""
    if isinstance(ns_coefficients, str):
        return Iteration(ns_coefficients, ns_steps, fp32_matmul_prec, ns)
    try:
        several: Any = (
            ns_coefficients if isinstance(ns_coefficients[0], Sequence) else [ns_coefficients]
        )
        steps = tuple((float(a), float(b), float(c)) for a, b, c in several)
    except (TypeError, ValueError, IndexError):
        raise UserError(
            f"ns_coefficients={ns_coefficients!r} are not numbers (a, b, c), or several such"
        ) from None
    return Iteration(
        "simple" if steps == (NS_COEFFICIENTS,) else steps, ns_steps, fp32_matmul_prec, ns
    )


def settings_of(given: Mapping[str, Any]) -> MuonSettings:
    """The settings that arguments of `Muon` are."""
    flags = {argument: flag for flag, argument in _ARGUMENTS.items()}
    values = {
        flags.get(name, f"muon_{name}"): value
        for name, value in given.items()
        if name not in _NOT_SHARED
    }
    fields = MuonSettings.__dataclass_fields__
    return MuonSettings(
        **{name: value for name, value in values.items() if name in fields and value is not None}
    )


def check(given: Mapping[str, Any]) -> None:
    """Refuse values that no other part would refuse, by a UserError."""
    settings = settings_of(given)
    choices: dict[str, tuple[Any, ...]] = {
        _argument(name): choices_of(name) for name in vars(settings)
    }
    choices["moment2_method"] = (None, *choices["moment2_method"])
    choices |= {
        "fp32_matmul_prec": ("highest", "high", "medium", "low"),
        "adjust_lr_fn": tuple(ADJUST_LR),
    }
    for name, allowed in choices.items():
        if allowed and name in given and given[name] not in allowed:
            shown = ", ".join(map(repr, allowed))
            raise UserError(f"{name}={given[name]!r} does not exist; choose one of {shown}")
    check_numbers(settings)
    for name in ("lr", "weight_decay"):
        check_number(name, given[name], flag=name)
    for name in ("lr", "eps", "weight_decay"):
        if (value := given[f"adamw_{name}"]) is not None:
            check_number("adam_eps" if name == "eps" else name, value, flag=f"adamw_{name}")
    check_number("adam_eps", given["eps"], flag="eps")
    check_betas(given["adamw_betas"], "adamw_betas")
    uncaptured = {
        "offload": "none",
        "momentum_dtype": "fp32",
        "free_buffers": False,
        "metrics_interval": 0,
    }
    for name, value in uncaptured.items() if given["cuda_graph"] else ():
        if given[name] != value:
            raise UserError(
                f"{name}={given[name]!r} is not supported with cuda_graph=True; use"
                f" {name}={value!r}"
            )
    hyperball, shared, adaptive = (
        given["hyperball"],
        given["share_replicated"],
        given["moment2_method"] is not None,
    )
    has_files, has_group = given["offload"] == "nvme", given["process_group"] is not None
    for message, is_wrong in {
        "hyperball=True is not supported with moment2_method; leave one of the two out": (
            hyperball and adaptive
        ),
        "cautious_weight_decay=True has no effect with hyperball=True; leave one of the two out": (
            hyperball and given["cautious_weight_decay"]
        ),
        "offload='nvme' and offload_dir belong together; give both or neither": (
            has_files != (given["offload_dir"] is not None)
        ),
        "process_group is for share_replicated=True or offload='nvme'; leave it out": (
            has_group and not shared and not has_files
        ),
        "share_replicated needs ranks to share with; call torch.distributed.init_process_group()": (
            shared and not dist.is_initialized()
        ),
    }.items():
        if is_wrong:
            raise UserError(message)


def check_loaded(state_dict: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict to load, without what groups of torch.optim.Muon say and here holds for the whole optimizer.

    A UserError where they say something else than this Muon, or are of another optimizer.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    # those that have it were saved here
    for group in (group for group in groups if OPTIMIZER not in group):
        if unknown := sorted(group.keys() - {"params", "eps", *KNOWN, *NOTES, *OF_ALL}):
            raise UserError(
                f"the state to load is of another optimizer: its groups have {', '.join(unknown)},"
                " which Muon does not know, and its momentum means something else; see"
                " docs/questions.md"
            )
        for name in [name for name in (*OF_ALL, "eps") if name in group]:
            theirs, ours = _meaning(name, group.pop(name)), _meaning(name, given[name])
            # the default of each
            if theirs != ours and not (name == "eps" and theirs == EPS and ours == 0.0):
                raise UserError(
                    f"the state to load has {name}={theirs!r}; make this Muon with it, not with"
                    f" {ours!r}"
                )
    return {**state_dict, "param_groups": groups}


def check_groups(groups: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> None:
    """Refuse, by a UserError, what a user has put into a parameter group and holds for the whole optimizer."""
    for number, group in enumerate(groups):
        for name in OF_ALL:
            if name in group and _meaning(name, group[name]) != _meaning(name, given[name]):
                raise UserError(
                    f"{name}={group[name]!r} in parameter group {number} has no effect, as it holds"
                    " for the whole optimizer; pass it to Muon"
                )


def _meaning(name: str, value: Any) -> Any:
    """A setting of `torch.optim.Muon`, alike for values that mean the same."""
    if name == "ns_coefficients":
        return iteration_of(value).coefficient_type
    return (value or "original") if name == "adjust_lr_fn" else number_of(value)


@contextmanager
def in_arguments() -> Iterator[None]:
    """Around what the command line uses too: its messages speak of flags, which here are arguments."""
    try:
        yield
    except UserError as error:
        raise UserError(
            _FLAGS.sub(lambda flag: _argument(flag[1].replace("-", "_")), str(error))
        ) from None


def _argument(flag: str) -> str:
    return _ARGUMENTS.get(flag, flag.removeprefix("muon_"))
