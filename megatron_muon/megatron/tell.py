"""Reports a training's progress to its launcher; `TOLD` lists the events. Without a launcher nothing is written."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from megatron_muon.megatron import STATUS_FOLDER, TOLD


def tells() -> bool:
    """Whether this rank reports, and a launcher reads it: the last of its machine, as the last of all has the loss."""
    place, size = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    is_last = place.isdigit() and size.isdigit() and int(place) == int(size) - 1
    return is_last and STATUS_FOLDER in os.environ and Path(os.environ[STATUS_FOLDER], TOLD).exists()


def tell(event: str, **facts: Any) -> None:
    """Report an event, on the rank that reports. A file that cannot be written is ignored: the training goes on."""
    if tells():
        with contextlib.suppress(OSError), Path(os.environ[STATUS_FOLDER], TOLD).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")
