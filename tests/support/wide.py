"""Which cases of a test the usual run makes, and which wait for `-m ''`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def wide_but(often: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters of a test, `wide` but for those that are made often; a tuple is
    several of them.
    """
    cases = list(cases)
    assert all(case in cases for case in often), [case for case in often if case not in cases]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in often else pytest.mark.wide,
        )
        for case in cases
    ]
