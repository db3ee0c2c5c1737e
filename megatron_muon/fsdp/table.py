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


_TOTALS = "{:<12}{:>9}{:>16}{:>9}"
_KIND = "{:<12}{:>9}{:>16}  {}"


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
    sizes: dict[str, list[int]] = defaultdict(list)
    kinds: dict[Row, list[str]] = defaultdict(list)
    for row in rows:
        sizes[row.optimizer].append(math.prod(row.shape))
        name = row.name if full else _NUMBER_OF_LAYER.sub("*", row.name)
        kind = row._replace(name=name)
        kinds[kind].append(row.name)
    total = sum(map(sum, sizes.values()))
    lines = [_TOTALS.format("optimizer", "tensors", "parameters", "share")]
    for optimizer, counts in sizes.items():
        elements = sum(counts)
        share = elements / total
        count = f"{len(counts):,}"
        lines.append(_TOTALS.format(optimizer, count, f"{elements:,}", f"{share:.1%}"))
    if frozen:
        lines.append(_TOTALS.format("frozen", f"{frozen:,}", "", ""))
    lines.append("")
    for row, names in kinds.items():
        count = f"{len(names):,}"
        shape = " x ".join(map(str, row.shape)) or "scalar"
        shown = names[0] if len(names) == 1 else row.name
        note = f" ({row.note})" if row.note else ""
        lines.append(_KIND.format(row.optimizer, count, shape, shown + note))
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
