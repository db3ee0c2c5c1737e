"""The pool of worker processes that the multi-rank tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.functional import cli  # noqa: E402
from tests.functional.pool import Pool  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def commands() -> Iterator[None]:
    """Ends what the tests' command lines have left running."""
    yield
    cli.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Runs a function on real gloo ranks: `ranks(world_size, function, **kwargs)`, see `Pool`."""
    pool = Pool()
    yield pool
    pool.close()
