"""The order in which files of tests start."""

from __future__ import annotations

import pytest

FIRST = (
    # wait for clocks, start cold, or take a minute each with `-m ''`
    *("test_slurm", "test_own_megatron", "test_doctor_gpu", "test_train", "test_command_line"),
    *("test_sweep", "test_examples", "test_documented_commands", "test_exact_updates"),
    *("test_offload", "test_every_matrix", "test_checkpoint_layouts"),
    *("test_rehearsal", "test_gpu_checks", "test_plan", "test_plan_command"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files come first: what is left for the end keeps both workers busy."""
    items.sort(
        key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST)
    )
