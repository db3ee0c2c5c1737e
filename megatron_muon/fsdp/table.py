"""The table of an optimizer's parameters: which optimizer takes what, why, and how it is read."""

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


FROZEN = "frozen"
"""In the table, in the place of an optimizer."""


class Row(NamedTuple):
    """A parameter, the optimizer that takes it, and a note on it."""

    optimizer: str
    name: str
    shape: Sequence[int]
    note: str = ""


def table(rows: Iterable[Row], *, frozen: int = 0, full: bool = False) -> str:
    """Tensors, elements and share of each optimizer; below, each kind of parameter, or with `full` each parameter.

    Parameters of one kind differ in the numbers of their layers alone, and share a line.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    kinds: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.optimizer != FROZEN:  # counted by `frozen`
            sizes[row.optimizer].append(math.prod(row.shape))
        shape = " x ".join(map(str, row.shape)) or "scalar"
        kind = row.name if full else _NUMBER_OF_LAYER.sub("*", row.name)
        kinds[row.optimizer, shape, kind, row.note].append(row.name)
    total = max(sum(map(sum, sizes.values())), 1)
    lines = [f"{'optimizer':<12}{'tensors':>9}{'parameters':>16}{'share':>9}"]
    for optimizer, counts in sizes.items():
        lines.append(
            f"{optimizer:<12}{len(counts):>9,}{sum(counts):>16,}{sum(counts) / total:>9.1%}"
        )
    if frozen:
        lines.append(f"{FROZEN:<12}{frozen:>9,}")
    lines.append("")
    for (optimizer, shape, kind, note), names in kinds.items():
        shown = names[0] if len(names) == 1 else kind
        lines.append(
            f"{optimizer:<12}{len(names):>9,}{shape:>16}  {shown}{f' ({note})' if note else ''}"
        )
    return "\n".join(lines)


def blocks(split: RowSplit) -> str:
    """The rows of each block, as a note; of several alike in a row, how many there are. Empty for one block."""
    runs = [
        (split.groups * part, len(list(alike))) for part, alike in itertools.groupby(split.parts)
    ]
    shown = ", ".join(f"{count} x {rows:,}" if count > 1 else f"{rows:,}" for rows, count in runs)
    if len(split.parts) == 1:
        return ""
    order = ", interleaved" if split.groups > 1 else ""
    return f"blocks of {shown} rows{order}"
