"""The flags that `train --profile` stands for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_muon.checkpoint import files
from megatron_muon.megatron.places import RunFolder
from megatron_muon.tools.train.node import names_own_step

if TYPE_CHECKING:
    from megatron_muon.tools.train.resolve import Request

STEPS = (10, 13)
"""Recorded by default, counted from where the run starts; one-time work is done by then."""


def flags(
    request: Request, folder: RunFolder, ranks: int, given: Mapping[str, str], typed: Collection[str]
) -> list[str]:
    """Megatron's flags for `--profile`; on several machines, only the first one's ranks are recorded.

    Args:
        given: all flags and their values.
        typed: those of the command line.
    """
    if not request.profile:
        return []
    steps = request.profile
    if not isinstance(steps, tuple):
        done = _done(request, folder, given, typed)
        steps = STEPS[0] + done, STEPS[1] + done
    start, end = map(str, steps)
    asked = ["--profile", "--use-pytorch-profiler", "--profile-step-start", start, "--profile-step-end", end]
    return asked + (["--profile-ranks", *map(str, range(ranks))] if request.nodes.count > 1 else [])


def _done(request: Request, folder: RunFolder, given: Mapping[str, str], typed: Collection[str]) -> int:
    """The iteration that a run goes on from, as its flags say."""
    own = folder.checkpoint if request.resume else None
    if own is None and ("--finetune" in given or not given.get("--load")):
        return 0
    asked = given.get("--ckpt-step") if own is None or names_own_step(typed) else None
    found = str(asked or files.latest(own.parent if own else Path(given["--load"])))
    return int(found) if found.isdecimal() else 0
