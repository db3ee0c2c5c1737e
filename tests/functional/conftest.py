"""The pool of worker processes that the multi-rank tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import cli, warm
from tests.support.killable import Killable
from tests.support.pool import Pool


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start importing at once, for all processes of this session."""
    if not session.config.option.collectonly:
        warm.PROCESS.start(shared=True)


def pytest_sessionfinish() -> None:
    """End what the tests' command lines have left running."""
    warm.PROCESS.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Runs a function on real gloo ranks: `ranks(world_size, function, **kwargs)`, see `Pool`."""
    pool = Pool()
    yield pool
    pool.kill()


def _again(*ways: str) -> Any:
    """A fixture that runs a test once more in each of the ways, `wide`: a method of `Pool`."""

    @pytest.fixture(
        params=[
            "gloo",
            *(
                pytest.param(
                    way,
                    marks=pytest.mark.wide,
                )
                for way in ways
            ),
        ],
    )
    def way_of(request: pytest.FixtureRequest, ranks: Pool) -> Iterator[str]:
        with (
            contextlib.nullcontext() if request.param == "gloo" else getattr(ranks, request.param)()
        ):
            yield request.param

    return way_of


delayed_too = _again("delayed")
two_memories_too = _again("two_memories")
every_way = _again("delayed", "two_memories")


@pytest.fixture(scope="session")
def process_that_forks() -> Iterator[Killable]:
    """Starts the runs of `killable`."""
    process = Killable()
    yield process
    process.close()


@pytest.fixture
def killable(process_that_forks: Killable) -> Iterator[Killable]:
    """Runs that may be killed; none outlives the test."""
    yield process_that_forks
    process_that_forks.kill()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags to train on a tiny corpus."""
    return cli.make_corpus(tmp_path_factory.mktemp("corpus"))
