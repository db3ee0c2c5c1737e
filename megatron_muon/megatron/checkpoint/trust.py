"""What a run takes on trust from a checkpoint: no code, and no file that changed after it was written.

Patches of torch and megatron-core for any run that loads a checkpoint, whatever its format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_muon.checkpoint import files
from megatron_muon.checkpoint.unpickling import Planner, Reader
from megatron_muon.errors import UserError, reason_of
from megatron_muon.patching import Patches


def run_no_pickles(patches: Patches) -> None:
    """Read a checkpoint's index and its entries without running what their pickles name.

    torch's reader and planner, up to 2.13 at least, call `pickle.load` and `torch.load(weights_only=False)`. So whoever
    can write to a checkpoint can run any command where it is loaded.
    """
    patches.replace(FileSystemReader, "read_metadata", Reader.read_metadata, takes=["kwargs"])
    patches.replace(DefaultLoadPlanner, "load_bytes", Planner.load_bytes, takes=["read_item", "value"])


def explain_unreadable(patches: Patches) -> None:
    """Turn what torch raises for a checkpoint that cannot be read into a line, which names the rank and the reason."""

    @patches.around(checkpointing, "_load_base_checkpoint", takes=["load_dir", "args"])
    def load_base_checkpoint(load: Callable[..., Any], load_dir: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        try:
            return load(load_dir, args, *rest, **kwargs)
        except CheckpointException as failure:
            named = args.ckpt_step or files.latest(Path(load_dir))
            raise UserError(
                f"the checkpoint {named} in {load_dir} cannot be loaded ({reason_of(failure)}); "
                f"{files.resume_hint(Path(load_dir), but=named)}"
            ) from failure
