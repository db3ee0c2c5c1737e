"""The report's Markdown as one HTML file with its pictures inside: no script, nothing from the network."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from html import escape

from markdown_it import MarkdownIt

from megatron_muon.tools.report.markdown import FOLDS

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --raised: #8881; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 70rem; font: 1rem/1.55 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; padding-top: 0.5rem; border-top: 1px solid var(--line); }
p, ul { max-width: 48rem; } p:has(img) { max-width: none; }
code, pre { font: 0.875em/1.5 ui-monospace, Menlo, Consolas, monospace; background: var(--raised); }
pre { padding: 0.75rem 1rem; white-space: pre-wrap; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.35rem 0.75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td { overflow-wrap: normal; font-variant-numeric: tabular-nums; } td[style*=right] { white-space: nowrap; }
td code { display: inline-block; max-width: 24rem; overflow-wrap: anywhere; }
th { background: var(--raised); vertical-align: bottom; }
img { max-width: 100%; height: auto; background: #fff; }
summary { cursor: pointer; }
@media print { nav { display: none; } h2, tr, img { break-inside: avoid; }
  details::details-content { content-visibility: visible; display: block; } }
"""

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
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
    """The page of a report; `pictures` are PNG files by the name that the Markdown has for them.

    HTML within the Markdown is shown as text, except for its folds. Quotes in text are escaped: only an image's `src="`
    can be one.
    """
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    for fold in FOLDS:
        body = body.replace(f"<p>{escape(fold)}</p>", fold)
    for name, picture in pictures.items():
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{base64.b64encode(picture).decode("ascii")}"')
    body = re.sub(r'<img src="(?!data:)[^"]*" alt="([^"]*)"[^>]*>', r"\1", body)
    titles = re.findall(r"<h2>(.*?)</h2>", body)
    for number, title in enumerate(titles, start=1):
        body = body.replace(f"<h2>{title}</h2>", f'<h2 id="section-{number}">{title}</h2>', 1)
    contents = " · ".join(f'<a href="#section-{number}">{title}</a>' for number, title in enumerate(titles, start=1))
    heading = re.search(r"<h1>(.*?)</h1>", body)
    title = re.sub(r"<[^>]*>", "", heading[1]) if heading else "report"
    return _PAGE.format(title=title, style=_STYLE, contents=contents, body=body)
