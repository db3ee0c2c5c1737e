"""Adam's count of steps, taken from a checkpoint that keeps it in another form than the run.

torch's AdamW counts for each parameter, in its state; the FusedAdam of Transformer Engine and Apex for each group, in
the group's settings, as an integer or (capturable) a tensor. Without the count Adam's bias correction starts again and
its first updates are too large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_muon.checkpoint import content
from megatron_muon.checkpoint.content import STEP


def carry_over(
    optimizer: dict[str, Any], fresh: set[str], entries: Mapping[str, Any], folder: Path, tell: Callable[[str], None]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Set the counts that a checkpoint keeps in another form, in the run's state dict `optimizer`.

    Parameters that start `fresh` keep theirs; `entries` are the checkpoint's, under the run's names. Returns the part
    of the state dict that is still to be asked for, and the settings not to ask for.
    """
    state, settings = optimizer["state"], optimizer["param_to_group_meta"]
    in_state = [n for n in state if STEP in state[n] and n not in fresh and content.slot(n, STEP) not in entries]
    in_groups = [
        name
        for name, meta in settings.items()
        if STEP in meta
        and not fresh & {name, f"{name}_w"}
        and not _alike(meta[STEP], entries.get(content.setting(name, STEP)))
    ]
    if not in_state and not in_groups:
        return optimizer, ()
    counts = content.step_counts(folder)
    for name in in_state:
        state[name][STEP].fill_(counts[content.whole_name(content.plain(name), counts)])
    groups = {id(settings[name]): settings[name] for name in in_groups}  # whose parameters share one dict
    for group, meta in groups.items():
        found = {counts.get(content.plain(name), 0) for name in in_groups if id(settings[name]) == group}
        count = max(found)
        meta[STEP] = torch.full_like(meta[STEP], count) if isinstance(meta[STEP], torch.Tensor) else count
        if len(found) > 1:
            tell(
                f"Adam counts by group here, the checkpoint has {min(found)} to {count} steps in one; it takes {count}"
            )
    others = {name: {slot: value for slot, value in state[name].items() if slot != STEP} for name in in_state}
    return {**optimizer, "state": {**state, **others}}, (STEP,) if in_groups else ()


def _alike(count: Any, entry: Any) -> bool:
    """Whether a checkpoint holds a group's count as the run does."""
    return entry is not None and isinstance(count, torch.Tensor) == hasattr(entry, "size")
