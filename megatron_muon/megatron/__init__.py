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
its exit `status` (torchrun's own is 1 for any failure), `error`, one line or null, its `time`, and
the `trace` of an unexpected error. For a rank ended by a signal its parent writes the file."""

OWNS_PLACES = "MEGATRON_MUON_OWNS_PLACES"
"""Environment variable: the launcher has checked that the ranks may write to --save and
--tensorboard-dir."""

LOSS = "lm loss"
"""The training loss, as the model names it and Megatron logs it."""

FACTS = "facts.json"
"""A training's facts for tools, in --tensorboard-dir: `machine`, `versions`, `commit` and `dirty`
as in run.json; `parameters` of a model-parallel rank; with Muon `muon_parameters`,
`scalar_parameters`, `plan`, its digest, `plans`, figures by kind of group, and `state_bytes` of all
ranks, by kind; `diverged_at`, the iteration that Megatron ended for a non-finite number."""

TOLD = "told.jsonl"
"""A training's events for its launcher: JSON lines in `STATUS_FOLDER`, in a file that the launcher
creates if it reads them, written by the last rank of each machine. Each has an `event` and its
facts, null or absent if unknown:

- stage: `stage`, null during steps; `FIRST_STEP` when everything is built and data is ready;
- step: once a log interval, and after a start's first step: `step` of `steps`, `loss`, the mean of
  the interval, `grad_norm`, `lr`, `muon_lr`, `skipped` steps, `tokens_per_s`, `mfu`,
  `optimizer_share`, `peak_bytes` of a rank and `seconds_left`;
- diverged: `step`, at which Megatron ends the run for a non-finite number;
- validation: `step`, `loss`, and its name in `what`, as "validation loss";
- saved: `step`, `folder`, `seconds`; with --async-save files are still being written."""

FIRST_STEP = "taking the first step"


def tells() -> bool:
    """True if a launcher reads this rank's events: the machine's last, as the last has the loss."""
    rank = os.environ.get("LOCAL_RANK", "")
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_last = rank.isdigit() and size.isdigit() and int(rank) == int(size) - 1
    folder = os.environ.get(STATUS_FOLDER)
    return is_last and folder is not None and Path(folder, TOLD).exists()


def tell(event: str, **facts: Any) -> None:
    """Report an event, on the rank that reports; a file that cannot be written is ignored."""
    if not tells():
        return
    path = Path(os.environ[STATUS_FOLDER], TOLD)
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, **facts}) + "\n")
