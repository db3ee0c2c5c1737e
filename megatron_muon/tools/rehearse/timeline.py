"""A played step as a picture: a trace for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.tools.rehearse.playback import Played

SHOWN = 64
"""Most ranks of a picture: those whose steps end last."""


def write_timeline(path: Path, played: dict[int, Played]) -> None:
    """Write the timeline of the ranks that end last; a UserError where the file cannot be written."""
    latest = sorted(played, key=lambda rank: (-played[rank].end_s, rank))[:SHOWN]
    events = [event for rank in sorted(latest) for event in _events(rank, played[rank])]
    try:
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), "utf-8")
    except OSError as error:
        raise UserError(f"--timeline: cannot write {str(path)!r}: {error.strerror}") from None


def _events(rank: int, played: Played) -> Iterator[dict[str, Any]]:
    """In the trace event format: microseconds; a process is a rank, a thread one of its streams."""
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    for stream in sorted({span.stream for span in played.spans}):
        name = f"collectives of group {stream - 1}" if stream else "products"
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": stream, "args": {"name": name}}
    for span in played.spans:
        yield {
            "name": span.name,
            "cat": "collective" if span.stream else "products",
            "ph": "X",
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "pid": rank,
            "tid": span.stream,
            "args": {"starts after": span.note} if span.note else {},
        }
