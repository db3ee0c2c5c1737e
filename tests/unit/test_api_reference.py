"""docs/api.md is what scripts/make_api_reference.py makes of the docstrings, and nothing public is left out."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "make_api_reference.py"


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture(scope="module")
def made(script) -> str:
    return script.page()


def test_the_page_is_what_the_script_makes(made):
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert page == made, "docs/api.md is not current; type: python scripts/make_api_reference.py"


def test_check_ends_with_1_where_the_page_is_another(tmp_path):
    copy = tmp_path / "scripts" / SCRIPT.name
    for folder in ("scripts", "docs"):
        (tmp_path / folder).mkdir()
    copy.write_bytes(SCRIPT.read_bytes())
    (tmp_path / "megatron_muon").symlink_to(ROOT / "megatron_muon")
    page = tmp_path / "docs" / "api.md"

    def check() -> int:
        return subprocess.run([sys.executable, copy, "--check"], capture_output=True, check=False).returncode

    assert subprocess.run([sys.executable, copy], check=True).returncode == 0
    assert check() == 0
    page.write_text(page.read_text("utf-8").replace("learning rate", "learning fate", 1), "utf-8")
    assert check() == 1


def test_every_public_name_is_there(script, made):
    """A class, function or method without an underscore has an entry of its own."""
    headings = {line.lstrip("# ") for line in made.splitlines() if line.startswith("##")}
    missing = []
    for file in script._files():
        for node in ast.parse(file.read_text("utf-8")).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            missing += [node.name] if node.name not in headings else []
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name[0] != "_"]
                names = [f"{node.name}.{one.name}" for one in methods if ast.get_docstring(one)]
                missing += [name for name in names if name not in headings]
    assert missing == []
    assert len(headings) > 100


def test_contents_point_at_headings(script, made):
    anchors = {script._anchor(line.lstrip("# ")) for line in made.splitlines() if line.startswith("## ")}
    contents = [line.split("](#")[1].split(")")[0] for line in made.splitlines() if "](#" in line]
    assert set(contents) == anchors
    assert len(contents) > 20


@pytest.mark.parametrize(
    ("docstring", "lines"),
    [
        (
            "Args:\n    x: rows\n        `(m, n)`.\n    y: more.",
            ["*Parameters*", "", "- `x`: rows", "  `(m, n)`.", "- `y`: more."],
        ),
        ("Raises:\n    ValueError: no.\n\nMore.", ["*Raises*", "", "- `ValueError`: no.", "", "More."]),
        ("a < b, `a < b`, 2 * 3", [r"a \< b, `a < b`, 2 \* 3"]),
    ],
)
def test_docstrings_become_markdown(script, docstring, lines):
    assert script._prose(docstring) == lines
