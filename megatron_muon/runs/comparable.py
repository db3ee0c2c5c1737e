"""Whether runs can be compared: by data, batch and model for losses and steps, by machine and load for times.

What cannot be compared is said where the conclusion would stand, see `report.page`.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from megatron_muon.runs.records import Record

_DATA = ("data_path", "train_data_path", "valid_data_path", "data_args_path", "per_split_data_args_path", "mock_data")
MEASURE = (*_DATA, "split", "seq_length")
"""Where these differ, losses differ in what they measure."""

_BATCH = "tokens a step"
_MODEL = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts")
BUDGET = (_BATCH, *_MODEL)
"""Where these differ, steps differ in what they cost."""

_ABSENT = "-"
_NUMBER = re.compile(r"[\d.]+(e[+-]?\d+)?")
_OTHER_LOAD_PART = 0.5
"""Loads that differ by this fraction of the cores make times incomparable."""


def differing(runs: Sequence[Record], keys: Iterable[str]) -> dict[str, list[str]]:
    """Which of the keys are not the same in all runs, and each run's value."""
    values = {key: [_value(run, key) for run in runs] for key in keys}
    return {
        key: each
        for key, each in values.items()
        if len(set(each)) > 1 and (key not in _DATA or len({_resolved(run, key) for run in runs}) > 1)
    }


def load_of(runs: Iterable[Record]) -> list[float]:
    """The machine's load before each run, where run.json has it."""
    loads = (run.run.get("machine", {}).get("load_average_before") for run in runs)
    return [load for load in loads if load is not None]


def other_circumstances(runs: Sequence[Record], others: Sequence[Record]) -> str | None:
    """In words why times of two sides cannot be compared, as far as run.json tells; None where nothing is known."""
    if _places(runs) != _places(others):
        return "they ran on other machines or numbers of processes"
    loads, other_loads = load_of(runs), load_of(others)
    if not loads or not other_loads:
        return None
    mean, other_mean = statistics.fmean(loads), statistics.fmean(other_loads)
    cores = runs[0].run["machine"]["cores"]
    if abs(mean - other_mean) < _OTHER_LOAD_PART * cores:
        return None
    return f"the machine's load before them was {mean:.1f} and {other_mean:.1f} on {cores} cores"


def _value(run: Record, key: str) -> str:
    """A run's setting as text, from Megatron's arguments, which are complete, else from the flags."""
    if key == _BATCH:
        sizes = [_value(run, name) for name in ("global_batch_size", "seq_length")]
        return f"{int(sizes[0]) * int(sizes[1]):,}" if all(size.isdigit() for size in sizes) else _ABSENT
    text = run.args.get(key) or run.settings.get(key) or _ABSENT
    if text in ("None", "False"):  # Megatron writes str(value)
        return _ABSENT
    return " ".join(text.translate(str.maketrans("", "", "[]'\",")).split()) if key in _DATA else text


def _resolved(run: Record, key: str) -> str:
    """A data path from the root: relative ones start from the folder that the run was started in."""
    words = _value(run, key).split(" ")
    folder = run.run.get("directory", "")
    return " ".join(word if _NUMBER.fullmatch(word) else os.path.normpath(PurePath(folder, word)) for word in words)


def _places(runs: Iterable[Record]) -> set[tuple[object, ...]]:
    """Where runs ran: machine, device, processes."""
    facts = ({**run.run.get("machine", {}), **run.run} for run in runs)
    return {tuple(map(fact.get, ("processor", "cores", "device", "nodes", "ranks"))) for fact in facts}
