"""The table of parameters: the optimizer that takes each, why, and how it is read."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_muon.core.layout import RowSplit

_NUMBER_OF_LAYER = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.weight)\d+$")
"""The number of a layer, or of an expert, in a parameter's name."""


_HEADER = "optimizer     tensors      parameters    share"
_TOTALS = "{:<12}{:>9,}{:>16,}{:>9.1%}"
_KIND = "{:<12}{:>9,}{:>16}  {}"


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
