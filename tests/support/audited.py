"""Every step is audited, and a fault is an error.

Each task appends its numbers of audits to the file that `AUDIT_COUNTS` names, if any.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_muon.fsdp.audit import Audit

COUNTS: Counter[str] = Counter()
"""Audits of this process, by the first words of what they found."""


@contextlib.contextmanager
def audited() -> Iterator[None]:
    """Audit each step of the optimizers that are made meanwhile."""
    made = Audit.__init__
    end = Audit.end

    def every_step(self: Any, part: Any, held: Any, interval: int, *others: Any) -> None:
        made(self, part, held, 1, *others)

    def without_faults(self: Any) -> None:
        end(self)
        if self.line:
            COUNTS[self.line.partition("): ")[2].partition(" (")[0]] += 1
        assert not self.faults, self.line

    with (
        mock.patch.object(Audit, "__init__", every_step),
        mock.patch.object(Audit, "end", without_faults),
    ):
        yield
    if file := os.environ.get("AUDIT_COUNTS"):
        with Path(file).open("a", encoding="utf-8") as counts:
            counts.write(json.dumps(COUNTS) + "\n")
