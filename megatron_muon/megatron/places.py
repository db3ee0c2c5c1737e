"""Places of a run's files, and the check that no run is overwritten. Plain files, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError
from megatron_muon.megatron import LOSS

CONFIG, RUN, LOG, SUMMARY = "config.yaml", "run.json", "train.log", "summary.json"
TENSORBOARD, CHECKPOINTS = "tensorboard", "checkpoints"
SAVE, LOAD, EVENTS = "--save", "--load", "--tensorboard-dir"
EVENT_FILES = "events.out.tfevents.*"


def refuse_taken(save: str | None, tensorboard: str | None, *, remedy: str) -> None:
    """Raises a UserError if a run has saved a checkpoint, or logged a step, in these folders.

    A start that took no step logs its arguments alone, and may be repeated.
    """
    taken = None
    if save is not None and folders.latest(Path(save)) is not None:
        taken = save
    elif tensorboard is not None:
        tag = LOSS.encode()
        if any(tag in file.read_bytes() for file in Path(tensorboard).glob(EVENT_FILES)):
            taken = tensorboard
    if taken is not None:
        raise UserError(f"{taken} holds a run; {remedy}, or delete it: rm -r {taken}")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file of a run; empty if it is missing or incomplete."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError):
        return {}
