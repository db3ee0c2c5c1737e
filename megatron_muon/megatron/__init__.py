"""Muon in Megatron: flags, patches, the model, checkpoints, and the optimizer that the loop drives.

This module has the names that launchers and ranks share, and how ranks report to a launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

STATUS_FOLDER = "MEGATRON_MUON_STATUS_FOLDER"
"""Environment variable: folder where each rank writes N.json as it ends, N being its local rank:
its exit `status`, `error`, one line or null, and its `time`. The launcher that sets it has checked
that the ranks overwrite no other run."""

REPORTS = "MEGATRON_MUON_REPORTS"
"""Environment variable: file for a training's events, JSON lines, written by the last rank of each
machine. Each has an `event` and its facts, null or absent if unknown:

- stage: `stage`; `FIRST_STEP` when everything is built and data is ready;
- step: once a log interval, and after a start's first step: `step` of `steps`, `loss`, the mean of
  the interval, `grad_norm`, `lr`, `muon_lr`, `tokens_per_s`, `optimizer_share` and `seconds_left`;
- audit: `step` and `fault`, the line of an audit that found one;
- diverged: `step`, at which Megatron ends the run for a non-finite number;
- validation: `step`, `loss`, and `at`, as "iteration 6 on test set";
- saved: `step` and `folder`; with --async-save files are still being written."""

LOSS = "lm loss"
"""The training loss, as the model names it and Megatron logs it."""

FACTS = "facts.json"
"""A training's facts for tools, in --tensorboard-dir: `machine`, `versions`, `commit` and `dirty`;
`state_bytes` of all ranks, by kind; with Muon `muon_parameters`, `scalar_parameters`, `plan`, its
digest, and `plans`, figures by kind of group."""

FIRST_STEP = "taking the first step"


def tells() -> bool:
    """True if a launcher reads this rank's events: the machine's last, as the last has the loss."""
    rank = os.environ.get("LOCAL_RANK", "")
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_last = rank.isdigit() and size.isdigit() and int(rank) == int(size) - 1
    return is_last and REPORTS in os.environ


def tell(event: str, **facts: Any) -> None:
    """Report an event, on the rank that reports; a file that cannot be written is ignored."""
    if not tells():
        return
    with (
        contextlib.suppress(OSError),
        Path(os.environ[REPORTS]).open("a", encoding="utf-8") as file,
    ):
        file.write(json.dumps({"event": event, **facts}) + "\n")
