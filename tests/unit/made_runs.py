"""Folders of runs as a training leaves them: events by the real SummaryWriter, log, config and summary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

SEQ_LENGTH, BATCH = 64, 8
STEP_S = 0.1
FACTS = {"muon_parameters": 1000, "state_bytes": {"momentum fp32": 5_000_000, "all else": 1_500_000}}
PEAK = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 70.0 | max allocated: 90.5 | reserved: 1.0\n"


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
    outcome: str = "finished",
    flags: Mapping[str, str] | None = None,
    args: Mapping[str, str] | None = None,
    run: Mapping[str, object] | None = None,
    load: float | None = None,
    validation: bool = True,
    summary: bool = True,
) -> Path:
    """Write a run of `steps` steps with a validation after every few; `args` are Megatron's, `run` adds to run.json."""
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(parents=True)
    of_megatron = {"seq_length": SEQ_LENGTH, "optimizer": optimizer, "lr": lr, "seed": seed, "train_iters": steps}
    of_megatron |= {"global_batch_size": BATCH, **(args or {})}
    began = 1000.0
    with SummaryWriter(log_dir=str(folder / "tensorboard")) as writer:
        for name, value in of_megatron.items():
            writer.add_text(name, str(value), global_step=0, walltime=began)
        for step in range(1, steps + 1):
            now = began + step * STEP_S
            writer.add_scalar("lm loss", loss(step), step, walltime=now)
            writer.add_scalar("lm loss vs samples", loss(step), step * BATCH, walltime=now)
            writer.add_scalar("batch-size", BATCH, step, walltime=now)
            writer.add_scalar("iteration-time", STEP_S, step, walltime=now)
            writer.add_scalar("optimizer-time", 0.04, step, walltime=now)
            if step % every == 0 and optimizer == "muon":
                for phase, value in (("momentum", 1.0), ("gather", 4.0), ("newton_schulz", 20.0), ("scatter", 3.0)):
                    writer.add_scalar(f"muon/{phase}_ms", value, step, walltime=now)
                writer.add_scalar("muon/apply_ms", 2.0, step, walltime=now)
            if validation and step % every == 0:
                writer.add_scalar("lm loss validation", loss(step) + 0.1, step, walltime=now)
                writer.add_scalar("lm loss validation vs samples", loss(step) + 0.1, step * BATCH, walltime=now)
        if validation:  # the test set, under the same tag
            writer.add_scalar("lm loss validation", 9.0, steps, walltime=now)
    (folder / "train.log").write_text(PEAK)
    (folder / "tensorboard" / "facts.json").write_text(json.dumps(FACTS))
    given = {"--optimizer": optimizer, "--lr": lr, "--seed": str(seed), "--train-iters": str(steps), **(flags or {})}
    lines = [f"  {name}: {value}" for name, value in given.items()]
    (folder / "config.yaml").write_text("\n".join(["MODEL_ARGS:", *lines, ""]))
    if summary:
        last = loss(steps)
        diverged = not math.isfinite(last)
        found = {"outcome": outcome, "status": 0, "diverged": diverged, "seconds": 9.5, "iterations": steps}
        (folder / "summary.json").write_text(json.dumps(found))
        machine = {"processor": "P", "cores": 2, "system": "Linux x86_64", "load_average_before": load}
        record: dict[str, object] = {
            "command": "megatron-muon sweep ...",
            "machine": machine,
            "versions": {"python": "3.12.1"},
        }
        record |= {"commit": "abc", "dirty": False, "nodes": 1, "ranks": 2, "torchrun": "torchrun x", "device": "cpu"}
        record |= run or {}
        (folder / "run.json").write_text(json.dumps(record))
    return folder
