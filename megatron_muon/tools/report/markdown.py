"""The report's Markdown, and one HTML file of it with its pictures inside: no script, nothing from the network.

Text of others is escaped: no backtick, line break or tag in a folder's name breaks out of its place.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_muon.tools.screen import printable

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>megatron-muon report</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; padding: 1.5rem 1rem; max-width: 70rem; font: 1rem/1.5 sans-serif; overflow-wrap: anywhere; }}
code, pre {{ font: 0.875em/1.5 monospace; white-space: pre-wrap; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: 0.9rem; }}
th, td {{ padding: 0.35rem 0.75rem; border-bottom: 1px solid #8886; text-align: left; vertical-align: top; }}
td {{ overflow-wrap: normal; }}
td code {{ display: inline-block; max-width: 24rem; overflow-wrap: anywhere; }}
img {{ max-width: 100%; background: #fff; }}
</style>
</head>
<body>
{body}</body>
</html>
"""


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


def html_page(markdown: str, pictures: Mapping[str, bytes]) -> str:
    """The page of a report; `pictures` are PNG files by the name that the Markdown has for them.

    HTML within the Markdown is shown as text. Quotes in text are escaped: only an image's `src="` can be one.
    """
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    for name, picture in pictures.items():
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{base64.b64encode(picture).decode("ascii")}"')
    return _PAGE.format(body=body)
