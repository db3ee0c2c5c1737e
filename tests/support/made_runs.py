"""Run folders as a training leaves them: events by the real SummaryWriter, and facts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

SEQ_LENGTH, BATCH = 64, 8
STEP_S = 0.1
FACTS = {
    "muon_parameters": 1000,
    "state_bytes": {"momentum fp32": 5_000_000, "all else": 1_500_000},
}
PEAK = 90.5 * 2**20


def falling(fast: float) -> Callable[[float], float]:
    """A loss that falls from 6 towards 2."""
    return lambda step: 2.0 + 4.0 * math.exp(-fast * step)


def make_run(
    folder: Path,
    loss: Callable[[float], float],
    *,
    optimizer: str = "muon",
    lr: str = "0.01",
    seed: int = 1,
    steps: int = 40,
    every: int = 10,
    args: Mapping[str, str] | None = None,
    validation: bool = True,
    skipped: int = 0,
) -> Path:
    """Writes a run of `steps` steps, validated every few; `args` are further ones of Megatron's."""
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(parents=True)
    given = {"optimizer": optimizer, "lr": lr, "seed": seed, "train_iters": steps}
    of_megatron = {"seq_length": SEQ_LENGTH, "global_batch_size": BATCH, **given, **(args or {})}
    began = 1000.0
    with SummaryWriter(log_dir=str(folder / "tensorboard")) as writer:
        for name, value in of_megatron.items():
            writer.add_text(name, str(value), global_step=0, walltime=began)
        for step in range(1, steps + 1):
            now = began + step * STEP_S
            losses = {"lm loss": loss(step)}
            if step % every == 0 and validation:
                losses["lm loss validation"] = loss(step) + 0.1
            scalars = {
                **losses,
                "batch-size": BATCH,
                "iteration-time": STEP_S,
                "optimizer-time": 0.04,
                "tokens-per-second": BATCH * SEQ_LENGTH / STEP_S,
                "optimizer-share": 0.4,
                "mem-max-allocated-bytes": PEAK,
            }
            if step == skipped:
                scalars["skipped-iterations"] = 1
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step, walltime=now)
            for tag, value in losses.items():
                writer.add_scalar(f"{tag} vs samples", value, step * BATCH, walltime=now)
        if validation:  # the test set, under the same tag
            writer.add_scalar("lm loss validation", 9.0, steps, walltime=now)
            writer.add_scalar("lm loss validation vs samples", 9.0, steps * BATCH, walltime=now)
    (folder / "tensorboard" / "facts.json").write_text(json.dumps(FACTS))
    return folder
