"""The table of parameters: the optimizer that takes each, why, and how it is read."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_muon.core.layout import RowSplit

_NUMBER_OF_LAYER = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.weight)\d+$")
"""The number of a layer, or of an expert, in a parameter's name."""


class Row(NamedTuple):
    """A parameter, the optimizer that takes it, and a note on it."""

    optimizer: str
    name: str
    shape: Sequence[int]
    note: str = ""


def table(rows: Iterable[Row], *, frozen: int = 0, full: bool = False) -> str:
    """Tensors, elements and share of each optimizer, then each kind of parameter.

    Parameters of one kind differ only in the numbers of their layers, and share a line; with `full`
    each parameter has one.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    kinds: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        sizes[row.optimizer].append(math.prod(row.shape))
        shape = " x ".join(map(str, row.shape)) or "scalar"
        kind = row.name if full else _NUMBER_OF_LAYER.sub("*", row.name)
        kinds[row.optimizer, shape, kind, row.note].append(row.name)
    total = sum(sum(counts) for counts in sizes.values())
    lines = [_line("optimizer", "tensors") + _sizes("parameters", "share")]
    for optimizer, counts in sizes.items():
        share = sum(counts) / max(total, 1)
        start = _line(optimizer, f"{len(counts):,}")
        lines.append(start + _sizes(f"{sum(counts):,}", f"{share:.1%}"))
    if frozen:
        lines.append(_line("frozen", f"{frozen:,}"))
    lines.append("")
    for (optimizer, shape, kind, note), names in kinds.items():
        shown = names[0] if len(names) == 1 else kind
        if note:
            shown += f" ({note})"
        start = _line(optimizer, f"{len(names):,}")
        lines.append(f"{start}{shape:>16}  {shown}")
    return "\n".join(lines)


def _line(optimizer: str, tensors: str) -> str:
    return f"{optimizer:<12}{tensors:>9}"


def _sizes(parameters: str, share: str) -> str:
    return f"{parameters:>16}{share:>9}"


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
