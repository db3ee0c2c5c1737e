"""Text of others within Markdown: no backtick, line break or tag in a folder's name breaks out of its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megatron_muon.tools.train.wording import printable

FOLDS = OTHER_LOSSES, EVERY_RUN, FOLD_END = (
    "<details><summary>Loss against tokens and seconds</summary>",
    "<details><summary>Every run</summary>",
    "</details>",
)
"""The only HTML of a page."""


def code(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row."""
    text = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def plain(text: str) -> str:
    """Text that is no code: marks of Markdown and HTML are escaped."""
    return re.sub(r"[\\`*\[\]<>&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", printable(text))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table; `numbers` are the columns set to the right."""
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cell.replace('|', r'\|') for cell in cells)} |" for cells in (head, rule, *rows))
