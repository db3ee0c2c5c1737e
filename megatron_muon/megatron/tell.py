"""What a training tells whoever has launched it; `TOLD` lists the events. Nothing is written where nobody asked."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from megatron_muon.megatron import STATUS_FOLDER, TOLD


def tells() -> bool:
    """Whether this rank is the one of its machine that tells a launcher: the last, which has the loss as Megatron's."""
    place, size = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return STATUS_FOLDER in os.environ and place.isdigit() and size.isdigit() and int(place) == int(size) - 1


def tell(event: str, **facts: Any) -> None:
    """Tell of an event, on the rank that tells. No launcher can end a training: a file that fails is passed over."""
    if tells():
        with contextlib.suppress(OSError), Path(os.environ[STATUS_FOLDER], TOLD).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")
