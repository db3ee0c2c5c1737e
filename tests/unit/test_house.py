"""Who may import whom: the packages are floors of a house, and imports go down only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_muon"
FLOORS = (
    {"core"},
    {"checkpoint", "cpu", "matrices", "offload"},
    {"fsdp"},
    {"megatron"},
    {"tools"},
)
"""From the ground up. Packages on one floor do not know each other."""

TOOLS = {"__init__", "cli", "pretrain_gpt"}
"""Modules beside the packages that import from them; all others are free of them."""

BELOW = {"errors", "ranks", "shards"}
"""Modules that core/ imports; these import each other alone."""

LOOSE = TOOLS | {
    "errors",
    "metrics",
    "patching",
    "patterns",
    "proven",
    "qk_clip",
    "ranges",
    "ranks",
    "settings",
    "shards",
    "shipped",
    "version",
}
"""All modules beside the packages."""

GROUND = {"core", *BELOW}
"""All that core/ imports of this package."""

HEAVY = {"torch", "numpy", "emerging_optimizers", "triton"}
"""All that core/ imports beside the standard library."""


def imported(file: Path) -> Iterator[str]:
    """Modules that a file imports, those within functions too."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def own(name: str) -> str | None:
    """The package or module of ours that an import names: the part after `megatron_muon`."""
    parts = name.split(".")
    return parts[1] if parts[0] == "megatron_muon" and len(parts) > 1 else None


ALL = set().union(*FLOORS)


def test_every_package_has_a_floor_and_nothing_else_lies_loose() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == ALL
    assert {file.stem for file in PACKAGE.glob("*.py")} == LOOSE


def test_imports_go_down_only() -> None:
    """Loose modules know the core alone, and the core those `BELOW` it: it can be read and used
    without Megatron.
    """
    above = ALL.copy()
    for floor in FLOORS:
        above -= floor
        for package in floor:
            forbidden = above | floor - {package}
            for file in (PACKAGE / package).rglob("*.py"):
                wrong = {name for name in imported(file) if own(name) in forbidden}
                assert not wrong, f"{file.relative_to(PACKAGE)} imports {', '.join(sorted(wrong))}"
    for file in PACKAGE.glob("*.py"):
        if file.stem not in TOOLS:
            assert not {name for name in imported(file) if own(name) in ALL - {"core"}}, file.name
    for name in BELOW:
        used = map(own, imported(PACKAGE / f"{name}.py"))
        assert {module for module in used if module} <= BELOW, name
    for file in (PACKAGE / "core").rglob("*.py"):
        for name in imported(file):
            first = name.split(".")[0]
            assert own(name) in GROUND or first in HEAVY | sys.stdlib_module_names, (
                f"{file.name} imports {name}"
            )
