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
from megatron_muon.tools.train.records import LAST_STEPS, ONLY_SET, Record, read_record
from megatron_muon.tools.train.run_folder import CONFIG, RUN
from megatron_muon.tools.train.wording import command_lines, duration

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
    show(record)
    return 0


def figures(record: Record) -> dict[str, Any]:
    """The figures of a run that has logged a step. None stands for what the log does not hold; see `Record`."""
    names = ("iterations", "loss_last", "rose", "diverged_at", "tokens_per_second", "optimizer_share", "train_seconds")
    return {
        "run_dir": str(record.folder),
        "optimizer": record.args.get("optimizer"),
        "world_size": record.whole_number("world_size"),
        **{name: getattr(record, name) for name in names},
        "loss_first": record.losses[0],
        "losses_averaged": len(record.losses[-LAST_STEPS:]),
        "validation_loss": record.validation_by_set,
        "validation_iteration": record.validation[-1].step if record.validation else None,
        "step_seconds": record.step_ms / 1e3 if record.step_ms is not None else None,
        "tensorboard_dir": str(record.places.tensorboard),
        "checkpoint": str(record.places.checkpoint) if record.places.checkpoint else None,
        "next_commands": next_commands(record),
    }


def validation_label(name: str) -> str:
    """What the loss of a validation set is called."""
    return "validation loss" if name == ONLY_SET else f"validation loss {name}"


def show(record: Record) -> None:
    """Prints the summary; commands can be copied, however wide the terminal is."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(highlight=False)
    columns = Column(style="bold", no_wrap=True), Column(overflow="fold")
    table = Table(*columns, box=None, show_header=False, padding=(0, 2, 0, 0))
    for label, value in rows(record):
        table.add_row(label, Text(value))
    console.print(Text(f"Run {record.folder}", style="bold"), soft_wrap=True)
    console.print(table)
    console.print(Text("\nWhat to try next", style="bold"))
    commands = next_commands(record)
    if shutil.which("megatron-muon") is None and sys.prefix != sys.base_prefix:  # called by its path
        activate = Path(sys.prefix, "bin", "activate")
        here = activate.relative_to(Path.cwd()) if activate.is_relative_to(Path.cwd()) else activate
        commands = (("first, in this shell", shlex.join(["source", str(here)])), *commands)
    for purpose, command in commands:
        console.print(Text(f"  {purpose}"))
        for line in command_lines(command, indent=4):
            console.print(Text(line, style="cyan"), soft_wrap=True)


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
        lines.append(("validation loss", f"none; {_why_no_validation(record)}"))
    speed, early = "not in the log", ", slow first steps included" if record.iterations <= WARMUP_STEPS else ""
    if record.tokens_per_second is not None and record.step_ms is not None:
        speed = f"{record.tokens_per_second:,.0f} tokens/s, {record.step_ms:,.0f} ms per step{early}"
    lines.append(("speed", f"{speed}; training took {duration(record.train_seconds)}"))
    flags = "--timing-log-level 1 --no-barrier-with-level-1-timing --log-timers-to-tensorboard"
    share = record.optimizer_share
    lines.append(
        ("optimizer", f"not timed; {flags} turn it on" if share is None else f"{share:.0%} of the step{early}")
    )
    lines.append(("checkpoint", str(record.places.checkpoint or "none saved")))
    return lines


def _why_no_validation(record: Record) -> str:
    evaluates, every = (record.whole_number(name) or 0 for name in ("eval_iters", "eval_interval"))
    if evaluates and record.iterations < every:
        return f"the run ended at iteration {record.iterations:,}, before the first at {every:,}"
    return "--eval-iters and --eval-interval turn it on"


def next_commands(record: Record) -> tuple[tuple[str, str], ...]:
    """(purpose, command) of what to try next, each as it can be typed for this run."""
    folder = record.folder
    commands = [("look at the curves", ["tensorboard", "--logdir", str(record.places.tensorboard)])]
    if record.summary.get("go_on"):
        commands.append(("go on", ["megatron-muon", "train", "--resume", "--out", str(folder)]))
    if (folder / CONFIG).is_file():  # what torchrun alone has started does not tell its flags
        other = "muon" if record.optimizer == "adam" else "adam"
        there = folder.with_name(f"{folder.name}-{other}")
        if (there / RUN).exists():
            report = ["megatron-muon", "report", str(folder), str(there), "--out", f"{folder}-report"]
            commands.append((f"compare with {other.capitalize()}", report))
        elif record.run.get("nodes", 1) == 1:
            purpose = f"the same with {other.capitalize()}; a learning rate of its own is --set lr=RATE"
            commands.append((purpose, [*_with_optimizer(record, other), "--out", str(there)]))
    if str(QUICKSTART_DATA) in record.args.get("data_path", ""):
        own = ["megatron-muon", "data", "prepare", "--input", "PATH", "--output", "data/mine"]
        commands.append(("your own text, for --data-path data/mine", own))
    return tuple((purpose, shlex.join(command)) for purpose, command in commands)


def _with_optimizer(record: Record, optimizer: str) -> list[str]:
    """The command that trains a run's settings with another optimizer."""
    from megatron_muon.megatron.flags.config_file import load_config

    config = record.folder / CONFIG
    flags = dict(load_config(config).flags)
    sets = [f"optimizer={optimizer}"]
    if optimizer == "muon" and "--use-megatron-fsdp" not in flags:
        sets.append("use_megatron_fsdp=true")
    if optimizer != "muon":  # flags that Muon alone heeds are refused
        sets += [f"{flag[2:]}=null" for flag in flags if flag.startswith(("--muon-", "--adaptive-muon-"))]
    command = ["megatron-muon", "train", "--config", str(config), "--nproc", str(record.run.get("ranks", 1))]
    return [*command, *(token for setting in sets for token in ("--set", setting))]
