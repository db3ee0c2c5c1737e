"""scripts/versions.py: the table that it keeps, and what it takes from the lock."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """The script, with a page of its own."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / "scripts/versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{module.HEADER}\nMore.\n")
    monkeypatch.setattr(module, "PAGE", page)
    return module


def found(torch: str, python: str, *failed: str, passed: int = 1200) -> dict:
    tests = {"passed": passed, "failed": list(failed), "skipped": 0, "seconds": 1}
    return {"torch": torch, "python": python, "commit": "0123456789", "unit": tests, "functional": tests}


def test_a_row_takes_the_place_of_that_of_the_same_pair_and_rows_are_in_order(versions):
    for of in (found("2.15.0", "3.12.1"), found("2.9.1", "3.13.0"), found("2.9.0", "3.12.1", "a::b")):
        versions.write(of)
    versions.write(found("2.9.0+cu130", "3.12.8", passed=3))
    lines = versions.PAGE.read_text().splitlines()
    assert lines[4:] == [
        "| 2.9.0+cu130 | 3.12.8 | 3 passed | 3 passed | 0123456789 |",
        "| 2.9.1 | 3.13.0 | 1,200 passed | 1,200 passed | 0123456789 |",
        "| 2.15.0 | 3.12.1 | 1,200 passed | 1,200 passed | 0123456789 |",
        "",
        "More.",
    ]


def test_a_failed_test_is_named_and_the_page_has_the_table(versions):
    versions.write(found("2.15.0", "3.12.1", "tests.unit.test_x::test_y"))
    assert "1,200 passed, 1 failed (`tests.unit.test_x::test_y`)" in versions.PAGE.read_text()
    assert versions.HEADER in (ROOT / "docs/questions.md").read_text("utf-8")
    assert all((ROOT / name).is_file() for name in versions.FUNCTIONAL)


def test_what_a_release_of_torch_chooses_is_not_taken_from_the_lock(versions):
    lines = (ROOT / "requirements/lock.txt").read_text("utf-8").splitlines()
    left_out = {line.partition("==")[0] for line in lines if versions.OF_TORCH.match(line)}
    assert {"torch", "triton", "setuptools"} < left_out
    assert all(re.match("torch|triton|setuptools|nvidia-|cuda-", name) for name in left_out)
