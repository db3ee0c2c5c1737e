"""The lock on a folder of checkpoints: one training at a time saves there.

The training's first rank holds it, so runs that torchrun alone has started are kept apart too, and ranks that outlive
whoever launched them keep their folder.
"""

from __future__ import annotations

from pathlib import Path

from megatron_muon.locks import Lock

SECONDS_FOR_A_DEAD_MACHINE = 120.0
"""A file server may take so long to give up the locks of a machine that is dead, whose run SLURM starts elsewhere."""


def lock_of(save_dir: Path) -> Lock:
    """The lock of a --save directory."""
    return Lock(
        save_dir / ".training.lock", f"a training saves its checkpoints to {save_dir}", "give another --save DIR"
    )
