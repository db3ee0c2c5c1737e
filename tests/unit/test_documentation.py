"""README.md and docs/: links lead somewhere, every flag named exists, and each of ours is
explained.
"""

from __future__ import annotations

import argparse
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import step, train
from megatron_muon import cli
from megatron_muon.megatron.flags.command_line import build_parser
from megatron_muon.tools.parser import CommandParser
from tests.support.documented import PROGRAM, ROOT, blocks, pages

PAGES = [ROOT / page for page in pages()]
OTHERS = {
    "--write",  # python -m benchmarks.upstream
    "--muon-use-syrk",  # megatron-core 0.20
    "--megatron-fsdp-version",
    # torchrun
    *("--nproc-per-node", "--standalone", "--shutdown-timeout", "--nnodes", "--node-rank"),
    *("--rdzv-backend", "--rdzv-endpoint"),
    *("--exclusive", "--export", "--wrap", "--signal", "--no-requeue"),  # SLURM
    *("--account", "--array", "--gpus-per-node", "--nodes", "--partition", "--time"),
    *("--cpu-bind", "--cpus-per-task", "--qos"),
    *("--pid", "--repeats", "--at-once"),  # py-spy, a test by hand
    *("--dion", "--only", "--experts"),  # benchmarks.any_model
    *("--trl", "--compile"),  # examples/trainers
    *("--model", "--model_args", "--include_path", "--tasks"),  # lm-evaluation-harness
}


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(
        r"^```.*?^```$",
        "",
        page.read_text("utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(r"`[^`\n]*`", "code", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {
        re.sub(
            r"[^\w -]",
            "",
            heading.lower(),
        ).replace(" ", "-")
        for heading in headings
    }


def links(page: Path) -> Iterator[str]:
    yield from re.findall(r"\]\(([^)\s]+)\)", prose(page))


def broken(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    found = []
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "page.md").write_text(
        "# A heading\n[a](#a-heading) [b](#another) [c](gone.md) [d](page.md#a-heading)\n"
    )
    assert broken(tmp_path / "page.md") == ["#another", "gone.md"]


def test_the_readme_links_every_page():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page not in linked] == []


def test_the_tables_of_flags_are_those_of_the_parser():
    page = runpy.run_path(str(ROOT / "docs/flags.py"))["page"]
    text = (ROOT / "docs/flags.md").read_text("utf-8")
    assert text.count("| `--") > 20
    assert page(text) == text, "type: python docs/flags.py"


def known_flags() -> set[str]:
    """Flags of pretrain_gpt.py and of every subcommand of ours."""
    known = set(build_parser()._option_string_actions) | {"--unset", "--help", "--version"}
    measuring = [CommandParser(), CommandParser()]
    for module, parser in zip((step, train), measuring, strict=True):
        module.configure(parser)
    for parser in (
        *measuring,
        *(cli._build_parser([name])[0] for name in cli.COMMANDS),
    ):
        waiting = [parser]
        while waiting:
            for action in waiting.pop()._actions:
                known |= set(action.option_strings)
                waiting += (
                    list(action.choices.values())
                    if isinstance(action, argparse._SubParsersAction)
                    else []
                )
    return known


def test_flags_in_the_pages_exist():
    """No page names a flag that Megatron, this package or a known program does not have."""
    known = known_flags() | OTHERS
    for page in PAGES:
        mentioned = set(
            re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9](?![\w*-])", page.read_text("utf-8"))
        )
        assert mentioned - known == set(), page.name


def test_the_code_of_the_section_on_trainers_is_that_of_its_examples():
    """Which tests run; they may break lines elsewhere."""

    def squeezed(text: str) -> str:
        return "".join(text.split()).replace(",)", ")")

    files = (ROOT / "examples/trainers").glob("*.py")
    examples = [squeezed(file.read_text("utf-8")) for file in files]
    page = (ROOT / "docs/any-model.md").read_text("utf-8")
    section = page.partition("\n## Trainers\n")[2].partition("\n## ")[0]
    code = ["\n".join(line for _, line in block) for block in blocks(section)]
    snippets = [squeezed(block) for block in code if not PROGRAM.match(block)]
    assert len(snippets) == 2
    for snippet in snippets:
        assert any(snippet in example for example in examples), snippet
