"""The table of parameters: the optimizer that takes each, why, and how it is read."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from megatron_muon.core.layout import RowSplit

_NUMBER_OF_LAYER = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.weight)\d+$")
"""The number of a layer, or of an expert, in a parameter's name."""


class Row(NamedTuple):
    """A parameter, the optimizer that takes it, and a note on it."""

    optimizer: str
    name: str
    shape: tuple[int, ...]
    note: str = ""


def table(rows: Sequence[Row], *, frozen: int = 0, full: bool = False) -> str:
    """Tensors, elements and share of each optimizer, then each kind of parameter.

    Parameters of one kind differ only in the numbers of their layers, and share a line; with `full`
    each parameter has one.
    """
    total = sum(math.prod(row.shape) for row in rows)
    lines = [f"{'optimizer':<12}{'tensors':>9}{'parameters':>16}{'share':>9}"]
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        sizes = [math.prod(row.shape) for row in rows if row.optimizer == optimizer]
        elements = sum(sizes)
        lines.append(f"{optimizer:<12}{len(sizes):>9,}{elements:>16,}{elements / total:>9.1%}")
    if frozen:
        lines.append(f"{'frozen':<12}{frozen:>9,}")
    lines.append("")
    kinds: dict[Row, list[str]] = defaultdict(list)
    for row in rows:
        kind = row.name if full else _NUMBER_OF_LAYER.sub("*", row.name)
        kinds[row._replace(name=kind)].append(row.name)
    for row, names in kinds.items():
        shape = " x ".join(map(str, row.shape)) or "scalar"
        shown = names[0] if len(names) == 1 else row.name
        if row.note:
            shown += f" ({row.note})"
        lines.append(f"{row.optimizer:<12}{len(names):>9,}{shape:>16}  {shown}")
    return "\n".join(lines)


def blocks(split: RowSplit) -> str:
    """The rows of each block, as a note; empty for one block. Equal blocks in a row are counted."""
    if len(split.parts) == 1:
        return ""
    shown = []
    for part, equal in itertools.groupby(split.parts):
        rows = f"{split.groups * part:,}"
        count = len(list(equal))
        shown.append(f"{count} x {rows}" if count > 1 else rows)
    order = ", interleaved" if split.groups > 1 else ""
    return f"blocks of {', '.join(shown)} rows{order}"
