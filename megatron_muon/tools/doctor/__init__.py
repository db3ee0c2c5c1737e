"""`megatron-muon doctor`: checks of an environment, and a checkpoint, as findings."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, WRONG = "ok", "note", "wrong"


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it is, and the details or the remedy."""

    about: str
    state: str
    text: str
