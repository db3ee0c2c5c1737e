"""report.html: the Markdown page in one file that needs nothing else, with text of others as text; read by a parser."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_muon import cli
from megatron_muon.tools.report.arms import find_runs, read_arms
from megatron_muon.tools.report.markdown import html_page
from megatron_muon.tools.report.page import Report
from tests.support.made_runs import falling, make_run

TAGS = {
    *{"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "strong", "code"},
    *{"pre", "ul", "li", "img", "table", "thead", "tbody", "tr", "th", "td"},
}
"""All that a page is made of; a browser fetches none of them but a picture, and runs none."""


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, and all text but the style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data if self.tags and self.tags[-1][0] != "style" else ""

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all tags of a name."""
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    make_run(root / "runs" / "adam", falling(0.05), optimizer="adam", lr="1e-3")
    make_run(root / "runs" / "muon", falling(0.1), lr="4e-3")
    assert cli.main(["report", str(root / "runs"), "--out", str(root / "out")]) == 0
    return root / "out"


def test_one_file_holds_the_whole_report(report: Path) -> None:
    """Its pictures are those beside the Markdown, to the byte, and it refers to nothing outside itself."""
    html = (report / "report.html").read_text("utf-8")
    page = Page(html)
    beside = {path.read_bytes() for path in report.glob("*.png")}
    inside = [str(image["src"]).removeprefix("data:image/png;base64,") for image in page.all("img")]
    assert {base64.b64decode(data, validate=True) for data in inside} == beside
    assert len(inside) == len(beside) == 2
    assert all(image["alt"] for image in page.all("img"))
    assert {tag for tag, _ in page.tags} <= TAGS
    assert not any("href" in attributes for _, attributes in page.tags)
    assert "url(" not in html
    assert "@import" not in html
    assert len(html) < 3e6


NAMES = (
    *("<script>alert(1)</script>", "a`b", "``", "<img src=x onerror=alert(1)>", '"><b>', "'onload='x", "&lt;b&gt;"),
    *("a|b", "[a](javascript:alert(1))", "![x](http:/a/b.png)", "# a", "</code></title><p>", "{title}", "*a*", "_a"),
    *("two\n\n# lines", "é\u202e\x07"),
)


@pytest.mark.parametrize("name", NAMES)
def test_names_show_as_text(tmp_path: Path, name: str) -> None:
    """Of a run's folder, a setting, a command, a commit and an optimizer."""
    run = {"commit": name, "command": f"train {name}", "torchrun": name}
    make_run(tmp_path / name / "a", falling(0.05), run=run)
    make_run(tmp_path / name / "b", falling(0.1), run=run, args={"optimizer": name, "train_iters": name})
    for folder, value in (("a", "x"), ("b", name)):
        (tmp_path / name / folder / "config.yaml").write_text(json.dumps({"MODEL_ARGS": {"--data-path": value}}))
    made = Report(*read_arms(find_runs([tmp_path / name])))
    page = Page(html_page(made.page(()), {}))
    assert {tag for tag, _ in page.tags} <= TAGS
    assert not any(attribute.startswith("on") for _, attributes in page.tags for attribute in attributes)
    assert not page.all("img")
    assert (len(page.all("h1")), len(page.all("h2"))) == (1, 3)
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)
    typed = f"train {shown}".partition("\\n")[0]  # a command keeps its lines
    for of_what in (f"/{shown}", f"data_path={shown}", typed, f"commit {shown}", f"{shown} and Muon"):
        assert of_what in page.text, of_what


def test_html_in_the_markdown_is_text() -> None:
    """The control of the test above: the parser sees a tag that the page has, and the one that it has not as text."""
    page = Page(html_page("**a**\n\n<b>bold</b>\n\n<script>\nx\n</script>", {}))
    assert len(page.all("strong")) == 1
    assert not {"b", "script"} & {tag for tag, _ in page.tags}
    assert "<b>bold</b>" in page.text
    assert "<script>\nx\n</script>" in page.text
