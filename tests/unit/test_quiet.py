"""Warnings: this package's are lines that `train` shows, those of libraries are left as they are."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import megatron_muon
from megatron_muon.errors import own_warnings_in_one_line


def test_a_warning_of_this_package_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`train` shows a line that begins with `megatron-muon: warning: `, and no other of a rank's warnings."""
    own, other = str(Path(megatron_muon.__file__).parent / "x.py"), "/elsewhere/y.py"
    with warnings.catch_warnings(record=True) as others, own_warnings_in_one_line():
        warnings.simplefilter("always")
        warnings.warn_explicit("of ours", UserWarning, own, 1)
        warnings.warn_explicit("of others", UserWarning, other, 1)
    assert capsys.readouterr().err == "megatron-muon: warning: of ours\n"
    assert [str(each.message) for each in others] == ["of others"]
