"""The table of parameters: the optimizer that takes each, why, and how it is read."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_muon.core.layout import RowSplit
from megatron_muon.matrices.roles import CONVOLUTION, EMBEDDING, OUTPUT, may_be_wide_stack

_NUMBER_OF_LAYER = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.weight)\d+$")
"""The number of a layer, or of an expert, in a parameter's name."""


_HEADER = "optimizer     tensors      parameters    share"
_TOTALS = "{:<12}{:>9,}{:>16,}{:>9.1%}"
_KIND = "{:<12}{:>9,}{:>16}  {}"

CHOSEN = "exclude"
"""A reason that the user gave, like `IN_GROUP`, and those of Megatron's scripts and flags."""

IN_GROUP = "its group says so"

_INTENDED = (CHOSEN, IN_GROUP, CONVOLUTION, "use_muon=False", "--muon-exclude")
"""Reasons that leave no doubt."""

_LEAST_SHARE = 0.5


class Row(NamedTuple):
    """A parameter, the optimizer that takes it, and a note on it."""

    optimizer: str
    name: str
    shape: tuple[int, ...]
    note: str = ""


def table(
    rows: Sequence[Row],
    *,
    frozen: int = 0,
    full: bool = False,
) -> str:
    """Tensors, elements and share of each optimizer, then each kind of parameter.

    Parameters of one kind differ only in the numbers of their layers, and share a line; with `full`
    each parameter has one.
    """
    tensors = Counter(row.optimizer for row in rows)
    elements = elements_of(rows)
    kinds: dict[Row, list[str]] = defaultdict(list)
    for row in rows:
        name = row.name if full else _NUMBER_OF_LAYER.sub("*", row.name)
        kinds[row._replace(name=name)].append(row.name)
    lines = [_HEADER]
    for optimizer, count in elements.items():
        lines.append(
            _TOTALS.format(optimizer, tensors[optimizer], count, count / elements.total()),
        )
    if frozen:
        lines.append(f"frozen      {frozen:>9,}")
    lines.append("")
    for row, names in kinds.items():
        shape = " x ".join(map(str, row.shape)) or "scalar"
        name = names[0] if len(names) == 1 else row.name
        note = f" ({row.note})" if row.note else ""
        lines.append(_KIND.format(row.optimizer, len(names), shape, name + note))
    return "\n".join(lines)


def totals(rows: Sequence[Row]) -> str:
    """The number of elements that each optimizer takes, in one line."""
    return ", ".join(f"{count:,} to {name}" for name, count in elements_of(rows).items())


def doubt(rows: Sequence[Row], label: str) -> str:
    """A warning if `label` takes under half of the elements that could be matrices, else empty.

    Not counted: vectors, convolutions, parameters that the user left out, and embeddings and
    output layers, unless they are inside numbered layers.
    """
    counted = [row for row in rows if row.optimizer == label or _may_be_matrix(row)]
    elements = elements_of(counted)
    total = elements.total()
    if elements[label] >= _LEAST_SHARE * total:
        return ""
    others = [row for row in counted if row.optimizer != label]
    largest = max(others, key=lambda row: math.prod(row.shape))
    return (
        f"{label} takes {elements[label] / total:.1%} of {total:,} parameters in weights shaped"
        f" like matrices; the largest that it leaves is {largest.name} ({_reason(largest)})"
    )


def _may_be_matrix(row: Row) -> bool:
    """True for a row of another optimizer that `doubt` counts."""
    reason = _reason(row)
    is_inside = any(part.isdigit() for part in row.name.split(".")[:-2])
    if reason in (EMBEDDING, OUTPUT):
        return is_inside
    if reason in _INTENDED or len(row.shape) < 2:
        return False
    return len(row.shape) == 2 or may_be_wide_stack(row.name, row.shape)


def _reason(row: Row) -> str:
    """The reason why a parameter is not a matrix, as its note begins."""
    return row.note.partition(";")[0] or f"{len(row.shape)}D"


def elements_of(rows: Iterable[Row]) -> Counter[str]:
    """The number of elements that each optimizer takes."""
    elements = Counter[str]()
    for row in rows:
        elements[row.optimizer] += math.prod(row.shape)
    return elements


def blocks(split: RowSplit | None) -> str:
    """The rows of each block, as a note; empty for one block. Equal blocks in a row are counted."""
    if split is None or len(split.parts) == 1:
        return ""
    shown = []
    for part, equal in itertools.groupby(split.parts):
        count = len(list(equal))
        shown.append(
            f"{count} x {split.groups * part:,}".removeprefix("1 x "),
        )
    order = ", interleaved" if split.groups > 1 else ""
    return f"blocks of {', '.join(shown)} rows{order}"
