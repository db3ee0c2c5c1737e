"""`train --profile`: the flags that it stands for, and where the traces lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_muon.checkpoint import files
from megatron_muon.megatron.flags.monitoring import TRACES, profile_flags
from megatron_muon.runs.run_folder import RUN, RunFolder, traces_of

if TYPE_CHECKING:
    from megatron_muon.runs.resolve import Request
    from megatron_muon.runs.train import Experiment

STEPS = (10, 13)
"""Recorded where nobody says which, counted from where a run starts: what happens once is over by then."""


def flags(request: Request, folder: RunFolder, ranks: int) -> list[str]:
    """Megatron's flags for what is asked for; on several machines the ranks of one of them are recorded."""
    if not request.profile:
        return []
    steps = request.profile
    if not isinstance(steps, tuple):
        saved = files.latest(folder.checkpoints) if request.resume and folder.checkpoints is not None else None
        done = saved if isinstance(saved, int) else 0
        steps = STEPS[0] + done, STEPS[1] + done
    several = request.nodes.count > 1
    return profile_flags(steps) + (["--profile-ranks", *map(str, range(ranks))] if several else [])


def note(experiment: Experiment) -> str:
    """Where the traces that a run has written lie and how to open one; empty where none was asked for."""
    folder = experiment.folder
    started = (folder.root / RUN).stat().st_mtime
    written = [file for file in traces_of(folder) if file.stat().st_mtime >= started]
    if written:
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        where = f"{written[0]}{more}"
        return f"trace: {where}; open it at https://ui.perfetto.dev (docs/monitoring.md says what to look for)"
    if experiment.request.profile:
        return f"no trace in {folder.tensorboard.parent / TRACES}: the run ended before the steps to record"
    return ""
