"""What can be said of a checkpoint without training: complete, written how, by which optimizer, what is missing."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.checkpoint import checksums, content, files
from megatron_muon.errors import UserError

_LAYOUT = {
    "world_size": "ranks",
    "data_parallel_sharding_strategy": "strategy",
    "tensor_model_parallel_size": "TP",
    "expert_model_parallel_size": "EP",
    "num_distributed_optimizer_instances": "instances",
}


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint, from its files.

    Attributes:
        folder: the checkpoint's own folder.
        problems: why it cannot be loaded; the fields below are empty then.
        notes: what is no fault and worth a look.
        iteration: the iteration after which it was written.
        layout: the parallel layout that wrote it, by name.
        parameters: number of weights.
        optimizers: number of parameters with the state of each optimizer.
        missing: parameters that an optimizer had and that have no state, or not all of it.
        without_state: weights that no optimizer had: frozen ones, or all of them with --no-save-optim.
    """

    folder: Path
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    iteration: int | None = None
    layout: dict[str, Any] | None = None
    parameters: int = 0
    optimizers: dict[str, int] | None = None
    missing: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()


def find(directory: Path) -> Path:
    """The folder of the checkpoint that `directory` is, or that its tracker, or that of a run's folder, names."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give a run's --save directory, or one of its iter_ folders")
    if (directory / ".metadata").exists() or files.iteration_of(directory) is not None:
        return directory
    named = files.latest(directory)
    if named is None and (directory / "checkpoints").is_dir():  # a run's folder
        return find(directory / "checkpoints")
    if named is None:
        raise UserError(f"{directory} has no {files.TRACKER}; {files.resume_hint(directory)}")
    return files.iteration_folder(directory, named)


def report(folder: Path) -> CheckpointReport:
    """Look at one checkpoint."""
    iteration = files.iteration_of(folder)
    problems = files.problems(folder)
    sums = None if problems else checksums.read(folder)
    if sums:
        names = checksums.share(sums, 0, 1)
        problems = checksums.changed(folder, sums, names, threads=min(8, os.cpu_count() or 1))
    if problems:
        return CheckpointReport(folder, (*problems, files.resume_hint(folder.parent, but=iteration)))
    notes = [f"{left} is a save that did not finish; it may be deleted" for left in files.unfinished(folder.parent)]
    if sums is None:
        notes.insert(0, checksums.absent(folder))
    entries = content.read_entries(folder)
    try:
        stored = content.read_objects(folder, entries)
    except Exception as error:  # damaged bytes raise whatever they happen to mean
        return CheckpointReport(folder, (f"{folder}: {error}", files.resume_hint(folder.parent, but=iteration)))
    args = stored.get("args")
    slots = {content.plain(name): held for name, held in content.optimizer_slots(entries).items()}
    weights = {content.plain(name.removeprefix("model.")) for name in content.weight_names(entries)}
    optimizers = Counter(map(content.optimizer_of, slots.values()))
    known = {content.plain(name) for name in content.optimized(entries)}
    lacking = {weight for weight in weights if weight not in slots}
    missing = {weight for weight in lacking if content.whole_name(weight, known) in known}
    missing |= {name for name, held in slots.items() if content.optimizer_of(held) == "lion" and "adam" in optimizers}
    return CheckpointReport(
        folder,
        problems=(),
        notes=tuple(notes),
        iteration=stored.get("iteration"),
        layout={name: getattr(args, key) for key, name in _LAYOUT.items() if hasattr(args, key)},
        parameters=len(weights),
        optimizers=optimizers,
        missing=tuple(sorted(missing)),
        without_state=tuple(sorted(lacking - missing)),
    )
