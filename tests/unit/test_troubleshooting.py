"""docs/troubleshooting.md and the sources agree: no message is quoted that does not exist, and none is left out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"
"""Stands for what a message fills in."""

USERS = ("UserError", "SaveError", "OffloadError", "RunFailedError")
"""Errors whose every message is on the page."""


def text_of(node: ast.expr) -> str:
    """A string expression with a NUL for every value."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else VALUE
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return VALUE


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    files = sorted([*ROOT.glob("megatron_muon/**/*.py"), *ROOT.glob("benchmarks/*.py")])
    return tuple((str(file.relative_to(ROOT)), ast.parse(file.read_text("utf-8"))) for file in files)


@cache
def strings() -> tuple[str, ...]:
    """Every string that the sources make, docstrings left out."""
    found = []
    for _, tree in sources():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            text_of(node)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)) and id(node) not in docstrings
        ]
    return tuple({text for text in found if len(text) > 8})


def messages() -> Iterator[tuple[str, str]]:
    """What is said to users: module and text. A message that is little more than values was made elsewhere."""
    for module, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in USERS and node.args:
                text = text_of(node.args[0])
                if len(re.findall(r"\w", text)) >= 10:
                    yield module, text


def quoted() -> list[str]:
    """The messages of the first column, but for those of others."""
    ours = PAGE.read_text("utf-8").split("## Messages of others")[0]
    cells = [line.split(" | ")[0] for line in ours.splitlines() if line.startswith("| `")]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def matches(quote: str, text: str) -> bool:
    """Whether the words of a quote stand in a text in their order, values between them, anything around."""
    at = 0
    for words in filter(None, quote.split("...")):
        at = text.find(words, at)
        if at < 0:
            return False
        at += len(words)
    return True


def test_quoted_messages_exist():
    quotes = quoted()
    assert len(quotes) > 150
    made_up = [quote for quote in quotes if not any(matches(quote, text) for text in strings())]
    assert not made_up, "docs/troubleshooting.md quotes what the package does not say:\n" + "\n".join(made_up)


def test_every_message_is_on_the_page():
    """Family by family: a quote with `...` stands for all messages that it matches."""
    quotes = [quote for quote in quoted() if len(re.findall(r"\w", quote)) >= 8]
    missing = {
        f"{module}: {text.replace(VALUE, '...')}"
        for module, text in messages()
        if not any(matches(quote, text) for quote in quotes)
    }
    assert not missing, "docs/troubleshooting.md does not explain:\n" + "\n".join(sorted(missing))


def test_messages_are_found_at_all():
    """A negative control of the two tests above."""
    texts = [text for _, text in messages()]
    assert len(texts) > 120
    assert any(matches("--save ... needs --save-interval N", text) for text in texts)
    assert not any(matches("--save ... needs --store-interval N", text) for text in strings())
    assert not any(matches("needs --save-interval N ... --save", text) for text in strings())
