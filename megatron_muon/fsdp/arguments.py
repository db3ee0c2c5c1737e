"""The arguments of `Muon`: what they may be, what iteration they ask for, and messages that speak of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_muon.core.cost import AUTO, Coefficients, Iteration
from megatron_muon.core.errors import UserError
from megatron_muon.core.exchange import GATHERED, LOCAL, OWNER, SHARED
from megatron_muon.core.numbers import check_number
from megatron_muon.fsdp.selection import KNOWN, NOTES, OF_ALL, OPTIMIZER
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

_ARGUMENTS_OF = {argument: flag for flag, argument in _ARGUMENTS.items()}

_FLAGS = r"(?:adaptive-)?muon-[a-z0-9-]*[a-z0-9]|lr|weight-decay"
"""Flags that are arguments of `Muon`; others, such as those of `megatron-muon doctor`, are to be typed as they are."""


NS_COEFFICIENTS, NS_STEPS = (3.4445, -4.775, 2.0315), 5
"""torch.optim.Muon's defaults, which are the set "simple" of emerging-optimizers."""


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
        several: Any = ns_coefficients if isinstance(ns_coefficients[0], Sequence) else [ns_coefficients]
        steps = tuple((float(a), float(b), float(c)) for a, b, c in several)
    except (TypeError, ValueError, IndexError):
        raise UserError(f"ns_coefficients={ns_coefficients!r} are not numbers (a, b, c), or several such") from None
    return Iteration("simple" if steps == (NS_COEFFICIENTS,) else steps, ns_steps, fp32_matmul_prec, ns)


_NOT_SHARED = ("lr", "exclude", "ns_steps_for")
"""Arguments that mean something else, or are of another form, than the field of `MuonSettings` with such a name."""


def _fields(given: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that are fields of `MuonSettings`, with the field's name."""
    fields = {name: _ARGUMENTS_OF.get(name, f"muon_{name}") for name in given if name not in _NOT_SHARED}
    return {name: field for name, field in fields.items() if field in MuonSettings.__dataclass_fields__}


def settings_of(given: Mapping[str, Any]) -> MuonSettings:
    """The settings that arguments of `Muon` are."""
    values = {field: given[name] for name, field in _fields(given).items() if given[name] is not None}
    return MuonSettings(**values)


def check(given: Mapping[str, Any]) -> None:
    """Refuse values that no other part would refuse, by a UserError."""
    for name, choices in {
        **{name: choices_of(field) for name, field in _fields(given).items() if choices_of(field)},
        "fp32_matmul_prec": ("highest", "high", "medium", "low"),
        "adjust_lr_fn": tuple(ADJUST_LR),
        "moment2_method": (None, *choices_of("adaptive_muon_moment2_method")),
    }.items():
        if given[name] not in choices:
            raise UserError(f"{name}={given[name]!r} does not exist; choose one of {', '.join(map(repr, choices))}")
    check_variants(given)
    numbers = {
        "adamw_lr": "lr",
        "adamw_eps": "adam_eps",
        "adamw_weight_decay": "weight_decay",
        "exchange_buffer_mb": "muon_exchange_buffer_mb",
        "offload_fraction": "muon_offload_fraction",
        "offload_buffer_mb": "muon_offload_buffer_mb",
        "metrics_interval": "muon_metrics_interval",
        "eps": "adam_eps",
    }
    for name, kind in numbers.items():
        if given[name] is not None:
            check_number(kind, given[name], flag=name)
    if not isinstance(given["adamw_betas"], Sequence) or len(given["adamw_betas"]) != 2:
        raise UserError(f"adamw_betas={given['adamw_betas']!r} are not two numbers")
    for place, beta in enumerate(given["adamw_betas"]):
        check_number("adam_beta1", beta, flag=f"adamw_betas[{place}]")
    if (given["offload"] == "nvme") != (given["offload_dir"] is not None):
        raise UserError("offload='nvme' and offload_dir belong together; give both or neither")
    plain = {"offload": "none", "momentum_dtype": "fp32", "free_buffers": False, "metrics_interval": 0}
    for name, value in plain.items() if given["cuda_graph"] else ():
        if given[name] != value:
            raise UserError(f"{name}={given[name]!r} is not supported with cuda_graph=True; use {name}={value!r}")
    if given["process_group"] is not None and not given["share_replicated"]:
        raise UserError("process_group is for share_replicated=True; leave it out, or share")
    if given["share_replicated"] and not dist.is_initialized():
        raise UserError("share_replicated needs ranks to share with; call torch.distributed.init_process_group()")


def check_variants(given: Mapping[str, Any]) -> None:
    """Refuse variants of Muon that do not go together, by a UserError; decay of groups is looked at where they are."""
    if given["hyperball"] and given["moment2_method"] is not None:
        raise UserError("hyperball=True is not supported with moment2_method; leave one of the two out")
    if given["hyperball"] and given["cautious_weight_decay"]:
        raise UserError(
            "cautious_weight_decay=True has no effect with hyperball=True, which takes the place of decay; leave one "
            "of the two out"
        )


def check_scheme(given: Mapping[str, Any], scheme: str) -> None:
    """Refuse arguments that the scheme of an exchange passes over, by a UserError."""
    if scheme == OWNER or given["team_size"] == AUTO:
        return
    why = {
        GATHERED: "exchange='allgather' has every rank orthogonalise all matrices",
        SHARED: "share_replicated=True gives every matrix one owner, which broadcasts its update",
        LOCAL: "every rank holds whole matrices, and orthogonalises them",
    }[scheme]
    raise UserError(f"team_size={given['team_size']!r} has no effect here: {why}; leave it out")


def check_loaded(state_dict: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict to load, without what groups of torch.optim.Muon say and here holds for the whole optimizer.

    Raises:
        UserError: they say something else than this Muon, or are of another optimizer.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        if OPTIMIZER in group:
            continue  # as saved here
        if unknown := sorted(group.keys() - {"params", "eps", *KNOWN, *NOTES, *OF_ALL}):
            raise UserError(
                f"the state to load is of another optimizer: its groups have {', '.join(unknown)}, which Muon does not "
                "know, and its momentum means something else; see docs/questions.md"
            )
        for name in [each for each in (*OF_ALL, "eps") if each in group]:
            theirs, ours = _meaning(name, group.pop(name)), _meaning(name, given[name])
            if theirs != ours:
                raise UserError(
                    f"the state to load has {name}={theirs!r}, and this Muon {ours!r}, which holds for the whole "
                    f"optimizer; make it with {name}={theirs!r}"
                )
    return {**state_dict, "param_groups": groups}


def _meaning(name: str, value: Any) -> Any:
    """A setting of `torch.optim.Muon`, alike for values that mean the same."""
    if name == "ns_coefficients":
        return iteration_of(value).coefficient_type
    return (value or "original") if name == "adjust_lr_fn" else value


@contextmanager
def in_arguments() -> Iterator[None]:
    """Around what the command line uses too: its messages speak of flags, which here are arguments."""
    try:
        yield
    except UserError as error:

        def argument(flag: re.Match[str]) -> str:
            name = flag[1].replace("-", "_")
            return _ARGUMENTS.get(name, name.removeprefix("muon_"))

        raise UserError(re.sub(rf"--({_FLAGS})(?![a-z0-9-])", argument, str(error))) from None
