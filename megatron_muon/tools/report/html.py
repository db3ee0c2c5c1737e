"""The report's Markdown as one HTML file that needs nothing else: pictures inside, no script, nothing from the network.

The Markdown page is the only description of a report: this page says the same. HTML within it is shown as text, but for
the fold around the table of runs.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, MutableMapping, Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from megatron_muon.tools.report.markdown import FOLD, FOLD_END

_STYLE = """
:root { color-scheme: light dark; --text: #1c2128; --faint: #57606a; --ground: #fff; --raised: #f3f5f8; --line: #d5dae1;
  --accent: #1f4e99; }
@media (prefers-color-scheme: dark) { :root { --text: #dfe4ea; --faint: #9aa4b0; --ground: #14181d; --raised: #1e242b;
  --line: #39424d; --accent: #8ab4f8; } .picture img { filter: invert(0.92) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 70rem; background: var(--ground); color: var(--text);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0.5rem 0 1rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 0.75rem; padding-top: 0.5rem; border-top: 1px solid var(--line); }
p, ul { max-width: 48rem; } p:has(.picture) { max-width: none; }
a { color: var(--accent); }
nav { color: var(--faint); } nav a { white-space: nowrap; text-decoration: none; }
nav a:hover { text-decoration: underline; }
code, pre { font: 0.875em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { background: var(--raised); padding: 0.1em 0.3em; border-radius: 4px; } code span { white-space: pre; }
strong code { font-weight: bold; }
pre { background: var(--raised); padding: 0.75rem 1rem; border-radius: 6px; white-space: pre-wrap; }
pre code { background: none; padding: 0; font-size: 1em; }
.line { display: inline-block; padding-left: 2ch; text-indent: -2ch; } code .line { white-space: pre-wrap; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.35rem 0.75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--raised); vertical-align: bottom; }
td[style*=right] { white-space: nowrap; }
td code { display: inline-block; max-width: 24rem; white-space: normal; overflow-wrap: anywhere; }
tbody tr:hover { background: var(--raised); }
.picture { display: block; overflow-x: auto; }
.picture img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
@media (max-width: 45rem) { td code { max-width: 16rem; } td:not([style]):not(:empty) { min-width: 8rem; } }
summary { cursor: pointer; color: var(--accent); }
@media print { :root { --text: #000; --faint: #444; --ground: #fff; --raised: #f3f5f8; --line: #bbb; --accent: #000; }
  body { padding: 0; max-width: none; font-size: 10pt; } table { font-size: 8pt; } nav { display: none; }
  h2, tr, .picture { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; }
  td[style*=right] { white-space: normal; } .picture img { filter: none; min-width: 0 !important; }
  details::details-content { content-visibility: visible; display: block; } }
"""
"""Dark pages turn pictures round in brightness, not in hue."""

_LEAST_SCALE = 0.48
"""Smallest scale of a picture at which its text can be read; narrower pages scroll it."""

_UNBROKEN = 32
"""Letters of code that stay in one line of the narrowest pages."""

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="megatron-muon report">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<nav aria-label="Contents">{contents}</nav>
<main>
{body}</main>
</body>
</html>
"""


def html_page(markdown: str, pictures: Mapping[str, bytes]) -> str:
    """The page of a report; `pictures` are PNG files by the name that the Markdown has for them."""
    parser = MarkdownIt("commonmark").enable("table")
    rules = {"image": _image, "code_inline": _code, "code_block": _lines, "html_block": _fold, "html_inline": _fold}
    for name, rule in rules.items():
        parser.add_render_rule(name, rule)
    parser.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    environment = {"pictures": pictures}
    tokens = parser.parse(markdown, environment)
    title = ""
    contents: list[str] = []
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            words = tokens[at + 1].children or []
            if token.tag == "h1":
                title = "".join(word.content for word in words)
            else:
                token.attrSet("id", name := f"section-{len(contents) + 1}")
                shown = parser.renderer.render(words, parser.options, environment)
                contents.append(f'<a href="#{name}">{shown}</a>')
    body = parser.renderer.render(tokens, parser.options, environment)
    return _PAGE.format(title=escape(title), style=_STYLE, contents=" · ".join(contents), body=body)


def _image(self: RendererHTML, tokens: Sequence[Token], at: int, _: Any, environment: MutableMapping[str, Any]) -> str:
    """One of the report's pictures as an image; any other as its alternative text."""
    words, name = escape(tokens[at].content), str(tokens[at].attrGet("src"))
    if (picture := environment["pictures"].get(name)) is None:
        return words
    width, height = (int.from_bytes(picture[place : place + 4]) for place in (16, 20))  # of a PNG file
    size = f'width="{width}" height="{height}" style="min-width: {width * _LEAST_SCALE:.0f}px"'
    data = base64.b64encode(picture).decode("ascii")
    return f'<span class="picture"><img alt="{words}" {size} src="data:image/png;base64,{data}"></span>'


def _code(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """Code within a line."""
    return f"<code>{_breakable(tokens[at].content)}</code>"


def _lines(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """A block of code, such as commands: long lines wrap with an indent."""
    lines = (f'<span class="line">{_breakable(line)}</span>' for line in tokens[at].content.splitlines())
    return f"<pre><code>{'\n'.join(lines)}</code></pre>\n"


def _breakable(code: str) -> str:
    """Code whose lines break after a blank, a comma or a slash, and anywhere within what is very long."""
    parts = re.findall(r"[^ ,/]*[ ,/]?", code)
    return "<wbr>".join(
        f"<span>{escape(part)}</span>" if 0 < len(part) <= _UNBROKEN else escape(part) for part in parts
    )


def _fold(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """HTML within Markdown: the report's own fold as it is, anything else as text."""
    found = tokens[at].content
    return found if found.strip() in (FOLD, FOLD_END) else escape(found)
