"""`megatron-muon doctor --checkpoint`: complete, written how, by which optimizer, and what is missing in it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_muon.errors import quiet_imports
from megatron_muon.tools.doctor import NOTE, OK, WRONG, Finding

with quiet_imports():
    import megatron.core  # noqa: F401  # tells torch which of its classes a checkpoint may hold

    from megatron_muon.checkpoint import checksums, content, files

_SHOWN = 5
_LAYOUT = {
    "world_size": "ranks",
    "data_parallel_sharding_strategy": "strategy",
    "tensor_model_parallel_size": "TP",
    "expert_model_parallel_size": "EP",
    "num_distributed_optimizer_instances": "instances",
}


def checkpoint(directory: Path) -> Iterator[Finding]:
    """What a checkpoint's files tell; why it cannot be loaded, and which one to take instead."""
    folder = files.find(directory)
    wrong = files.problems(folder)
    sums = None if wrong else checksums.read(folder)
    if sums:
        names = checksums.share(sums, 0, 1)
        wrong = checksums.changed(folder, sums, names, threads=min(8, os.cpu_count() or 1))
    stored: dict[str, Any] = {}
    try:
        entries = {} if wrong else content.read_entries(folder)
        stored = content.read_objects(folder, entries) if entries else {}
    except Exception as error:  # damaged bytes raise whatever they happen to mean
        wrong = [f"{folder}: {error}"]
    if wrong:
        for problem in (*wrong, files.resume_hint(folder.parent, but=files.iteration_of(folder))):
            yield Finding("checkpoint", WRONG, problem)
        return
    yield Finding("checkpoint", OK, f"{folder} is complete, iteration {stored.get('iteration')}")
    args = stored.get("args")
    layout = ", ".join(f"{name} {getattr(args, key)}" for key, name in _LAYOUT.items() if hasattr(args, key))
    yield Finding("written by", OK if layout else NOTE, layout or "unknown: it holds no arguments")
    yield from _state(entries)
    if sums is None:
        yield Finding("beside it", NOTE, checksums.absent(folder))
    for left in files.unfinished(folder.parent):
        yield Finding("beside it", NOTE, f"{left} is a save that did not finish; it may be deleted")


def _state(entries: dict[str, Any]) -> Iterator[Finding]:
    """Which weights there are, with the state of which optimizer."""
    slots = {content.plain(name): held for name, held in content.optimizer_slots(entries).items()}
    weights = {content.plain(name.removeprefix("model.")) for name in content.weight_names(entries)}
    optimizers = Counter(map(content.optimizer_of, slots.values()))
    known = {content.plain(name) for name in content.optimized(entries)}
    lacking = weights - slots.keys()
    missing = {weight for weight in lacking if content.whole_name(weight, known) in known}
    damaged = {name for name, held in slots.items() if content.optimizer_of(held) == "lion" and "adam" in optimizers}
    yield Finding("weights", OK if weights else WRONG, f"{len(weights)} tensors")
    if optimizers:
        counts = ", ".join(f"{name} has {count}" for name, count in sorted(optimizers.items()))
        yield Finding("optimizer state", OK, f"of these, {counts}")
    else:
        yield Finding("optimizer state", NOTE, "none: load it with --no-load-optim")
    if incomplete := missing | damaged:
        remedy = "--muon-allow-missing-state starts it at zero"
        yield Finding("missing state", WRONG, f"{len(incomplete)}: {_some(incomplete)}; {remedy}")
    if (frozen := lacking - missing) and optimizers:
        yield Finding("no state", NOTE, f"{len(frozen)} weights that did not train: {_some(frozen)}")


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
