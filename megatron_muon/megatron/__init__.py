"""Muon in Megatron: flags, patches, the model, checkpoints, and the optimizer chain that the training loop drives.

Names that whoever starts trainings shares with them stand here, and how ranks report to it.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

STATUS_FOLDER = "MEGATRON_MUON_STATUS_FOLDER"
"""Environment variable: where each rank leaves N.json as it ends, N being its number on this machine: its exit `status`
(torchrun's own is 1 for any failure), `error`, a line that says why, or null, the `time` of that, and the traceback of
what nobody expected (`trace`). For a rank that a signal ended, its parent writes `error` and `time`."""

OWNS_PLACES = "MEGATRON_MUON_OWNS_PLACES"
"""Environment variable: whoever starts the ranks has seen to it that they may write to their --save and
--tensorboard-dir."""

LOSS = "lm loss"
"""The training loss, as the model names it and Megatron logs it."""

FACTS = "facts.json"
"""What a training knows of itself, for tools, in --tensorboard-dir: `machine`, `versions`, `commit` and `dirty` as in
run.json; `parameters` of the model on a model-parallel rank; of a Muon `muon_parameters`, `scalar_parameters`, `plan`,
its digest, `plans`, the figures of each kind of group, and `state_bytes` of all ranks, by kind; `diverged_at`, the
iteration at which Megatron ended the run for a number that is not finite."""

TOLD = "told.jsonl"
"""What a training tells its launcher as it happens: JSON lines in `STATUS_FOLDER`, in a file that the launcher makes if
it reads them, written by the last rank of each machine. Each has an `event` and facts of it, null or absent where they
are not known:

- stage: `stage`, what the ranks do now, null for steps; `FIRST_STEP` when all is built and the data is there;
- step: once a log interval, and after a start's first step: `step` of `steps`, `loss`, the mean of the interval,
  `grad_norm`, `lr`, `muon_lr`, `skipped` steps, `tokens_per_s`, `mfu`, `optimizer_share`, `peak_bytes` of a rank and
  `seconds_left`;
- diverged: `step`, at which Megatron ends the run for a number that is not finite;
- validation: `step`, `loss`, and `what` it is of, as "validation loss";
- saved: `step`, `folder`, `seconds`; with --async-save files are still being written."""

FIRST_STEP = "taking the first step"


def tells() -> bool:
    """Whether this rank reports, and a launcher reads it: the last of its machine, as the last of all has the loss."""
    place, size = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    is_last = place.isdigit() and size.isdigit() and int(place) == int(size) - 1
    return (
        is_last and STATUS_FOLDER in os.environ and Path(os.environ[STATUS_FOLDER], TOLD).exists()
    )


def tell(event: str, **facts: Any) -> None:
    """Report an event, on the rank that reports. A file that cannot be written is ignored: the training goes on."""
    if tells():
        with (
            contextlib.suppress(OSError),
            Path(os.environ[STATUS_FOLDER], TOLD).open("a", encoding="utf-8") as file,
        ):
            file.write(json.dumps({"event": event, **facts}) + "\n")
