"""`megatron-muon summary`: the results of a run on one page; what the training did not write is reported as missing."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_muon.shipped import QUICKSTART_DATA
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.train.events import WARMUP_STEPS
from megatron_muon.tools.train.records import LAST_STEPS, Record, read_record, validation_label
from megatron_muon.tools.train.run_folder import CONFIG
from megatron_muon.tools.train.wording import duration

EXAMPLES = """\
examples:
  megatron-muon summary runs/quickstart
  megatron-muon summary runs/quickstart --json figures.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon summary`."""
    parser.description = "Sum up a run: loss, validation loss, speed, and where its log and checkpoint lie."
    parser.epilog = EXAMPLES
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="holds tensorboard/ and checkpoints/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Prints the summary, and writes it as JSON where asked."""
    record = read_record(args.run_dir, needs_steps=True)
    write_json(args.json, figures(record))
    print(f"Run {record.folder}")
    for label, value in rows(record):
        print(f"{label:<17}{value}")
    print("\nWhat to try next")
    if shutil.which("megatron-muon") is None and sys.prefix != sys.base_prefix:  # it was called by its path
        print(f"  first, in this shell\n    source {shlex.quote(str(Path(sys.prefix, 'bin', 'activate')))}")
    for purpose, command in next_commands(record):
        print(f"  {purpose}\n    {command}")
    return 0


def figures(record: Record) -> dict[str, Any]:
    """The figures of a run that has logged a step: those of summary.json that come from its log, and what it was."""
    return {
        "run_dir": str(record.folder),
        "optimizer": record.args.get("optimizer"),
        "world_size": record.whole_number("world_size"),
        "tensorboard_dir": str(record.places.tensorboard),
        "rose": record.rose,
        **record.figures,
    }


def rows(record: Record) -> list[tuple[str, str]]:
    """The summary's lines as (label, value)."""
    loss = f"{record.losses[0]:.3f} -> {record.loss_last:.3f} in {record.iterations:,} iterations"
    lines = [("loss", f"{loss} (mean of the last {min(len(record.losses), LAST_STEPS)})")]
    if record.diverged_at is not None:
        when = f"from iteration {record.diverged_at:,} on"
        lines.append(("warning", f"diverged: the loss is not a number {when}; lower the learning rate"))
    elif record.rose:
        lines.append(("warning", "the loss rose; lower the learning rate"))
    for name, value in record.validation_by_set.items():
        lines.append((validation_label(name), f"{value:.3f} at iteration {record.validation[-1].step:,}"))
    if not record.validation:
        lines.append(("validation loss", "none; --eval-iters and --eval-interval say how often"))
    speed, early = "not in the log", ", slow first steps included" if record.iterations <= WARMUP_STEPS else ""
    if record.tokens_per_second is not None and record.step_ms is not None:
        speed = f"{record.tokens_per_second:,.0f} tokens/s, {record.step_ms:,.0f} ms per step{early}"
    share = "not timed; --timing-log-level 1 --no-barrier-with-level-1-timing --log-timers-to-tensorboard turn it on"
    if record.optimizer_share is not None:
        share = f"{record.optimizer_share:.0%} of the step{early}"
    return [
        *lines,
        ("speed", f"{speed}; training took {duration(record.train_seconds)}"),
        ("optimizer", share),
        ("checkpoint", str(record.places.checkpoint or "none saved")),
    ]


def next_commands(record: Record) -> list[tuple[str, str]]:
    """(purpose, command) of what to try next, each as it can be typed for this run."""
    commands = [("look at the curves", ["tensorboard", "--logdir", str(record.places.tensorboard)])]
    train = ["megatron-muon", "train"]
    if record.summary.get("go_on"):
        commands.append(("go on", [*train, "--resume", "--out", str(record.folder)]))
    config = record.folder / CONFIG
    if config.is_file() and record.run.get("nodes", 1) == 1:  # what torchrun alone has started does not tell its flags
        other = "muon" if record.optimizer == "adam" else "adam"
        sets = [f"optimizer={other}", *(["use_megatron_fsdp=true"] if other == "muon" else [])]
        if other == "adam":  # which refuses flags of Muon
            sets += [f"{name}=null" for name in record.settings if name.startswith(("muon_", "adaptive_muon_"))]
        given = ["--config", str(config), "--nproc", str(record.run.get("ranks", 1))]
        out = ["--out", str(record.folder.with_name(f"{record.folder.name}-{other}"))]
        purpose = f"the same with {other.capitalize()}; a learning rate of its own is --set lr=RATE"
        commands.append((purpose, [*train, *given, *(token for each in sets for token in ("--set", each)), *out]))
    if str(QUICKSTART_DATA) in record.args.get("data_path", ""):
        own = ["megatron-muon", "data", "prepare", "--input", "PATH", "--output", "data/mine"]
        commands.append(("your own text, for --data-path data/mine", own))
    return [(purpose, shlex.join(command)) for purpose, command in commands]
