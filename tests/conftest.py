"""The order in which files of tests start."""

from __future__ import annotations

import pytest

FIRST = (
    # wait for clocks, or take a minute each
    *("test_slurm", "test_sweep", "test_train", "test_command_line"),
    *("test_documented_commands", "test_exact_updates", "test_offload"),  # the longest with `-m ''`
    *("test_rehearsal", "test_plan", "test_plan_command"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files come first: what is left for the end keeps both workers busy."""
    items.sort(
        key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST)
    )
