"""Where the files of a run go, and whether a run lies there already. Plain files, no torch.

A start that does not continue a run never writes into a folder that holds one. Where an experiment
file names the folder, it takes the next free one beside it; a folder that was typed is refused.
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

PLACES = ("--tensorboard-dir", "--save", "--load")
"""Flags that say where things lie, not what is trained."""

EVENT_FILES = "events.out.tfevents.*"
"""The files of a TensorBoard folder."""

TRACES, TRACE = "torch_profile", "rank-*.json.gz"
"""Where Megatron writes the traces of --use-pytorch-profiler: a folder beside --tensorboard-dir, a file for a rank."""


@dataclass(frozen=True)
class RunFolder:
    """Where the files of a run lie; `checkpoints` is None where it saves nothing."""

    root: Path
    tensorboard: Path
    checkpoints: Path | None

    @property
    def checkpoint(self) -> Path | None:
        """The latest checkpoint that Megatron's tracker file names."""
        if self.checkpoints is None:
            return None
        with contextlib.suppress(UserError):  # a run tells so when it loads
            if (latest := folders.latest(self.checkpoints)) is not None:
                return folders.iteration_folder(self.checkpoints, latest)
        return None

    @property
    def has_steps(self) -> bool:
        """Whether a training has logged a step in the TensorBoard folder: its events begin with the arguments alone."""
        tag = LOSS.encode()
        return any(tag in file.read_bytes() for file in self.tensorboard.glob(EVENT_FILES))

    def numbered(self, number: int) -> RunFolder:
        """The same places in a folder beside this one: runs/a-2 for runs/a."""

        def moved(path: Path) -> Path:
            beside = self.root.with_name(f"{self.root.name}-{number}")
            if path.is_relative_to(self.root):
                return beside / path.relative_to(self.root)
            return path.with_name(f"{path.name}-{number}")

        checkpoints = self.checkpoints and moved(self.checkpoints)
        return RunFolder(moved(self.root), moved(self.tensorboard), checkpoints)


def locate(
    values: Mapping[str, str], chosen: Mapping[str, str], *, out: str | None, default: str
) -> tuple[RunFolder, dict[str, str]]:
    """Where a run's files go.

    With `out` everything goes there that the command line (`chosen`) does not place. Without, the
    flags decide: the folder is the parent of a --tensorboard-dir named tensorboard, or of a --save
    named checkpoints, or else `default`. Events and records follow a --save that was typed, not a
    --tensorboard-dir of the experiment file (`values`).

    Returns:
        The folder, and the flags that have to be added.
    """
    flags = {}
    tensorboard, save = ({**values, **chosen}.get(flag) for flag in ("--tensorboard-dir", "--save"))
    if (out is not None or "--save" in chosen) and "--tensorboard-dir" not in chosen:
        tensorboard = None
    if out is not None:
        root = Path(out)
        if "--save" in values and "--save" not in chosen:
            save = flags["--save"] = str(root / CHECKPOINTS)
            if values.get("--load") == values["--save"] and "--load" not in chosen:
                flags["--load"] = save
    elif tensorboard and Path(tensorboard).name == TENSORBOARD:
        root = Path(tensorboard).parent
    elif save and Path(save).name == CHECKPOINTS:
        root = Path(save).parent
    else:
        root = Path(chosen.get("--save", default))
    if not tensorboard:
        tensorboard = flags["--tensorboard-dir"] = str(root / TENSORBOARD)
    return RunFolder(root, Path(tensorboard), Path(save) if save else None), flags


def beside(folder: RunFolder, given: Mapping[str, str]) -> tuple[RunFolder, dict[str, str], str]:
    """A folder that holds no run: the one that an experiment file names, or the next free one beside it.

    A run that loads what it saves, by its `given` flags, starts from nothing there; --finetune
    takes the weights of the run that lies here. Every rank finds the same, as none writes before
    all of them have met.

    Returns:
        The folder, the flags that name its places, and a note; both empty for the folder itself.
    """
    if not (what := held_by(folder)) or not folder.root.name:
        return folder, {}, ""
    free = next(
        each for number in itertools.count(2) if not held_by(each := folder.numbered(number))
    )
    flags = {"--tensorboard-dir": str(free.tensorboard)}
    if free.checkpoints is not None:
        flags["--save"] = str(free.checkpoints)
        if given.get("--load") == given.get("--save") and "--finetune" not in given:
            flags["--load"] = flags["--save"]
    return free, flags, f"{what}; this one goes to {free.root}"


def settle_places(
    values: Mapping[str, str], chosen: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """For ranks that nobody gave a folder: flags that keep their start off another run, and a note.

    `values` are flags of the experiment file, `chosen` those that were typed. A UserError where a
    place that was typed holds a run that the start does not continue.
    """
    given = {**values, **chosen}
    folder, flags = locate(values, chosen, out=None, default="")
    # nobody asked for events otherwise
    flags = {flag: path for flag, path in flags.items() if flag in values}
    load, save = given.get("--load"), given.get("--save")
    continues = load is not None and "--finetune" not in given
    is_own = load is not None and (save is None or Path(save).resolve() == Path(load).resolve())
    if (is_own and continues) or not (save or "--tensorboard-dir" in given):
        return flags, ""
    if not {"--save", "--tensorboard-dir"} & chosen.keys() and folder.root.name:
        _, moves, note = beside(folder, given)
        return {flag: path for flag, path in moves.items() if flag in given}, note
    # A run that goes on from another's checkpoint may log where that one did; what it saves has a
    # folder of its own.
    if (folder.checkpoint or not continues) and (what := held_by(folder)):
        add = f"; to go on with it, add --load {save}" if save and folder.checkpoint else ""
        raise UserError(f"{what}; give another --save DIR and --tensorboard-dir DIR{add}")
    return flags, ""


def held_by(folder: RunFolder) -> str:
    """Which run with a step or a checkpoint lies in a folder, as part of a sentence; empty where there is none."""
    summary = read_json(folder.root / SUMMARY)
    if not (summary.get("iterations") or folder.checkpoint or folder.has_steps):
        return ""
    if summary:
        done, asked = summary.get("iterations") or 0, summary.get("train_iters")
        return (
            f"{folder.root} holds a run that {summary.get('outcome', 'ended')} after {done} of"
            f" {asked} iterations"
        )
    cut_off = " that was cut off" if (folder.root / RUN).exists() else ""
    return f"{folder.tensorboard if folder.has_steps else folder.checkpoints} holds a run{cut_off}"


def foreign_file(root: Path) -> Path | None:
    """A file under one of the names that `megatron-muon train` writes, and that it has not written."""
    if "config_hash" in read_json(root / RUN):
        return None
    return next(
        (file for name in (CONFIG, RUN, LOG, SUMMARY) if (file := root / name).exists()), None
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file of a run; empty where it is not there or not whole."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError):
        return {}
