"""The table that tells which parameters go to Muon and which to the scalar optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_muon.mcore.parameters import matrix_shape


def parameter_table(
    groups: Sequence[Mapping[str, Any]], names: Mapping[torch.Tensor, str], *, full: bool = False
) -> str:
    """A short table: tensors, parameters and share for each optimizer; with `full`, every parameter too.

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
    if full:
        lines.append("")
        for optimizer, parameters in sorted(by_optimizer.items(), key=lambda item: item[0] != "muon"):
            for p in parameters:
                lines.append(f"{optimizer:<12}{' x '.join(map(str, _shape(p))):>16}  {names[p]}")
    return "\n".join(lines)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    if parameter.ndim == 2:
        return matrix_shape(parameter)
    return tuple(getattr(parameter, "orig_param", parameter).shape)


def _numel(parameter: torch.Tensor) -> int:
    return int(torch.Size(_shape(parameter)).numel())
