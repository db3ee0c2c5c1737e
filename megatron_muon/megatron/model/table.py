"""The table that tells which parameters go to Muon and which to the scalar optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_muon.megatron.model.parameters import matrix_shape

_SHOWN = 3
"""Names shown of the weights that are left out for one reason."""


def parameter_table(
    groups: Sequence[Mapping[str, Any]], names: Mapping[torch.Tensor, str], *, full: bool = False
) -> str:
    """A short table: tensors, parameters and share for each optimizer; with `full`, every parameter too.

    Below it stand the 2D weights that Muon does not take, by reason, and of many with one reason the first.

    Counts are whole over data- and tensor-parallel ranks; of experts those of this expert-parallel rank.

    Args:
        groups: parameter groups; a group without `optimizer` belongs to Muon.
        names: the name of each parameter.
        full: list every parameter with its shape.
    """
    by_optimizer: dict[str, list[torch.Tensor]] = {}
    for group in groups:
        by_optimizer.setdefault(group.get("optimizer", "muon"), []).extend(group["params"])
    total = sum(_numel(p) for parameters in by_optimizer.values() for p in parameters)
    lines = [f"{'optimizer':<12}{'tensors':>9}{'parameters':>16}{'share':>9}"]
    for optimizer, parameters in sorted(by_optimizer.items(), key=lambda item: item[0] != "muon"):
        count = sum(_numel(p) for p in parameters)
        lines.append(f"{optimizer:<12}{len(parameters):>9,}{count:>16,}{count / max(total, 1):>9.1%}")
    for why, left_out in _left_out(by_optimizer).items():
        more = f" and {len(left_out) - _SHOWN:,} more" if len(left_out) > _SHOWN else ""
        lines.append(f"not Muon's, {why}: {', '.join(names[p] for p in left_out[:_SHOWN])}{more}")
    if full:
        lines.append("")
        for optimizer, parameters in sorted(by_optimizer.items(), key=lambda item: item[0] != "muon"):
            for p in parameters:
                lines.append(f"{optimizer:<12}{' x '.join(map(str, _shape(p))):>16}  {names[p]}")
    return "\n".join(lines)


def muon_parameters(groups: Sequence[Mapping[str, Any]]) -> int:
    """How many parameters Muon takes, counted as in the table."""
    return sum(_numel(p) for group in groups if "optimizer" not in group for p in group["params"])


def _left_out(by_optimizer: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """The 2D weights of the scalar optimizer, by the reason that `tag_for_muon` left."""
    found: dict[str, list[torch.Tensor]] = {}
    for optimizer, parameters in by_optimizer.items():
        for p in parameters if optimizer != "muon" else ():
            if p.ndim == 2:
                found.setdefault(getattr(p, "why_not_muon", "use_muon=False"), []).append(p)
    return found


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    if parameter.ndim == 2:
        return matrix_shape(parameter)
    return tuple(getattr(parameter, "orig_param", parameter).shape)


def _numel(parameter: torch.Tensor) -> int:
    return int(torch.Size(_shape(parameter)).numel())
