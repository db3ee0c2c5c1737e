"""Where the files of a run go, and whether a folder already holds a run. Plain files, no torch.

A start that does not continue a run never writes into a folder that holds one. If the experiment
file names the folder, the run takes the next free one (runs/a-2); a folder that was typed is
refused.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError
from megatron_muon.megatron import LOSS

CONFIG, RUN, LOG, SUMMARY = "config.yaml", "run.json", "train.log", "summary.json"
TENSORBOARD, CHECKPOINTS = "tensorboard", "checkpoints"
SAVE, LOAD, EVENTS = "--save", "--load", "--tensorboard-dir"

PLACES = (EVENTS, SAVE, LOAD)
"""Flags that name places, not what is trained."""

EVENT_FILES = "events.out.tfevents.*"
"""The files of a TensorBoard folder."""


@dataclass(frozen=True)
class RunFolder:
    """Where the files of a run go; `checkpoints` is None for a run that saves nothing."""

    root: Path
    tensorboard: Path
    checkpoints: Path | None

    @property
    def checkpoint(self) -> Path | None:
        """The latest checkpoint that Megatron's tracker file names."""
        if self.checkpoints is None:
            return None
        with contextlib.suppress(UserError):  # reported when the run loads it
            latest = folders.latest(self.checkpoints)
            if latest is not None:
                return folders.iteration_folder(self.checkpoints, latest)
        return None

    @property
    def has_steps(self) -> bool:
        """Whether a step was logged; a start that took none logs its arguments alone."""
        tag = LOSS.encode()
        return any(tag in file.read_bytes() for file in self.tensorboard.glob(EVENT_FILES))

    def numbered(self, number: int) -> RunFolder:
        """The same places in a sibling folder: runs/a-2 for runs/a."""
        root = _numbered(self.root, number)

        def renamed(path: Path) -> Path:
            if path.is_relative_to(self.root):
                return root / path.relative_to(self.root)
            return _numbered(path, number)

        checkpoints = renamed(self.checkpoints) if self.checkpoints else None
        return RunFolder(root, renamed(self.tensorboard), checkpoints)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}-{number}")


def locate(
    values: Mapping[str, str], chosen: Mapping[str, str], *, out: str | None, default: str
) -> tuple[RunFolder, dict[str, str]]:
    """Finds the places of a run.

    With `out` everything goes there that the command line (`chosen`) does not place. Otherwise the
    folder is the parent of a --tensorboard-dir named tensorboard, or of a --save named checkpoints,
    or `default`. Events follow a --save that was typed, not a --tensorboard-dir of the experiment
    file (`values`).

    Returns:
        The folder, and the flags that have to be added.
    """
    given = {**values, **chosen}
    flags = {}
    save = given.get(SAVE)
    tensorboard = given.get(EVENTS)
    if (out is not None or SAVE in chosen) and EVENTS not in chosen:
        tensorboard = None
    if out is not None:
        root = Path(out)
        if SAVE in values and SAVE not in chosen:
            save = flags[SAVE] = str(root / CHECKPOINTS)
            if values.get(LOAD) == values[SAVE] and LOAD not in chosen:
                flags[LOAD] = save
    elif tensorboard and Path(tensorboard).name == TENSORBOARD:
        root = Path(tensorboard).parent
    elif save and Path(save).name == CHECKPOINTS:
        root = Path(save).parent
    else:
        root = Path(chosen.get(SAVE, default))
    if not tensorboard:
        tensorboard = flags[EVENTS] = str(root / TENSORBOARD)
    return RunFolder(root, Path(tensorboard), Path(save) if save else None), flags


def beside(
    folder: RunFolder,
    given: Mapping[str, str],
) -> tuple[RunFolder, dict[str, str], str]:
    """A folder that holds no run: `folder`, or else the next free one (runs/a-2).

    A run that loads what it saves, by its `given` flags, starts from nothing there; --finetune
    takes the weights of the run in `folder`. All ranks find the same, as none writes before all
    have met.

    Returns:
        The folder, the flags that name its places, and a note; both empty for `folder` itself.
    """
    run = held_by(folder)
    if not run or not folder.root.name:
        return folder, {}, ""
    free = folder.numbered(2)
    for number in itertools.count(3):
        if not held_by(free):
            break
        free = folder.numbered(number)
    flags = {EVENTS: str(free.tensorboard)}
    if free.checkpoints is not None:
        flags[SAVE] = str(free.checkpoints)
        if given.get(LOAD) == given.get(SAVE) and "--finetune" not in given:
            flags[LOAD] = flags[SAVE]
    return free, flags, f"{run}; writing to {free.root} instead"


def settle_places(
    values: Mapping[str, str], chosen: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Flags that keep ranks started without `train` off another run, and a note.

    `values` are flags of the experiment file, `chosen` those that were typed.

    Raises:
        UserError: a place that was typed holds a run that this start does not continue.
    """
    given = {**values, **chosen}
    folder, added = locate(values, chosen, out=None, default="")
    # --tensorboard-dir is only moved, as nobody asked for events otherwise
    flags = {flag: path for flag, path in added.items() if flag in values}
    load = given.get(LOAD)
    save = given.get(SAVE)
    if not save and EVENTS not in given:
        return flags, ""
    continues = load is not None and "--finetune" not in given
    loads_own = load is not None and (not save or Path(save).resolve() == Path(load).resolve())
    if continues and loads_own:
        return flags, ""
    if SAVE not in chosen and EVENTS not in chosen and folder.root.name:
        _, moved, note = beside(folder, given)
        return {flag: path for flag, path in moved.items() if flag in given}, note
    # A run that continues another's checkpoint may log to the same place, but saves elsewhere.
    run = held_by(folder)
    if run and (folder.checkpoint or not continues):
        error = f"{run}; give another --save DIR and --tensorboard-dir DIR"
        if save and folder.checkpoint:
            error += f"; to go on with it, add --load {save}"
        raise UserError(error)
    return flags, ""


def held_by(folder: RunFolder) -> str:
    """The run with a step or a checkpoint that a folder holds, as half a sentence, or nothing."""
    summary = read_json(folder.root / SUMMARY)
    done = summary.get("iterations") or 0
    if not (done or folder.checkpoint or folder.has_steps):
        return ""
    if summary:
        outcome = summary.get("outcome", "ended")
        steps = f"{done} of {summary.get('train_iters')} iterations"
        return f"{folder.root} holds a run that {outcome} after {steps}"
    place = folder.tensorboard if folder.has_steps else folder.checkpoints
    cut_off = " that was cut off" if (folder.root / RUN).exists() else ""
    return f"{place} holds a run{cut_off}"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file of a run; empty if it is missing or incomplete."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError):
        return {}
