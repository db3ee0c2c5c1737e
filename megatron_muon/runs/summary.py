"""`megatron-muon summary RUN_DIR`: one readable page about a run.

Figures come from what Megatron's training loop wrote to TensorBoard. Where it wrote none (a timer that was
not asked for, no validation) the summary says so instead of guessing.
"""

import argparse
import dataclasses
import itertools
import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.runs.events import LOSS_TAG, WARMUP_STEPS, Point, RunEvents, after_warmup, read_events, validations
from megatron_muon.runs.run_folder import (
    CHECKPOINTS,
    CONFIG,
    RUN,
    SUMMARY,
    TENSORBOARD,
    RunFolder,
    moved,
    read_json,
)

LAST_STEPS = 10
"""The final loss is the mean of this many logged steps."""

ONLY_SET = "validation"
"""The name of a run's validation set where it has one; several have names of their own."""

QUICKSTART_DATA = "data/stdlib"
"""The data of configs/quickstart.yaml."""

EXAMPLES = """\
examples:
  megatron-muon summary runs/quickstart
  megatron-muon summary runs/quickstart --json figures.json
"""


@dataclass(frozen=True)
class RunSummary:
    """The figures of a run. None stands for what the log does not hold.

    Attributes:
        iterations: Last logged iteration.
        loss_first: Loss of the first logged iteration.
        loss_last: Mean loss of the last `LAST_STEPS` logged iterations, or of all where there are fewer.
        losses_averaged: Of how many that is the mean.
        rose: Whether the loss ended above where it began, see `has_risen`.
        diverged_at: First iteration whose loss is not a finite number.
        validation_loss: By name of the validation set (`ONLY_SET` when there is one), at `validation_iteration`. The
            log does not tell the test set from the validation set; the validation set is evaluated first.
        tokens_per_second: Median after the warm-up, all ranks together.
        step_seconds: Median time of an iteration after the warm-up.
        optimizer_share: Median share of an iteration that the optimizer's step took, 0 to 1.
        train_seconds: Wall time of the training loop, validation included.
    """

    run_dir: str
    optimizer: str | None
    world_size: int | None
    iterations: int
    loss_first: float
    loss_last: float
    losses_averaged: int
    rose: bool
    diverged_at: int | None
    validation_loss: dict[str, float]
    validation_iteration: int | None
    tokens_per_second: float | None
    step_seconds: float | None
    optimizer_share: float | None
    train_seconds: float
    tensorboard_dir: str
    checkpoint: str | None
    next_commands: tuple[tuple[str, str], ...]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon summary`."""
    parser.description = "Sum up a run: loss, validation loss, speed, and where its log and checkpoint lie."
    parser.epilog = EXAMPLES
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="holds tensorboard/ and checkpoints/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Prints the summary, and writes it as JSON where asked."""
    summary = summarize(args.run_dir)
    if args.json is not None:
        try:
            args.json.write_text(to_json(summary), "utf-8")
        except OSError as error:
            raise UserError(f"cannot write {str(args.json)!r}: {error.strerror}") from None
    show(summary)
    return 0


def summarize(run_dir: Path, *, tensorboard_dir: Path | None = None, events: RunEvents | None = None) -> RunSummary:
    """Collects the figures of a run.

    Args:
        run_dir: Holds `tensorboard/`, and `checkpoints/` if the run saved any.
        tensorboard_dir: The events; those that run.json names, or `run_dir/tensorboard`, by default.
        events: What was read from there already.

    Raises:
        UserError: The directory or its log is missing, or the log holds no loss.
    """
    if not run_dir.is_dir():
        raise UserError(f"no run at {str(run_dir)!r}; give the directory that holds tensorboard/ and checkpoints/")
    recorded = read_json(run_dir / RUN)
    at_start = (recorded.get("tensorboard_dir"), recorded.get("checkpoint_dir"))
    places = [Path(moved(path, recorded, run_dir)) if path else None for path in at_start]
    tensorboard_dir = tensorboard_dir or places[0] or run_dir / TENSORBOARD
    events = events or read_events(tensorboard_dir)
    losses = events.points(LOSS_TAG)
    if not losses:
        raise UserError(
            f"the log in {str(tensorboard_dir)!r} holds no {LOSS_TAG!r}; the run ended before its first step"
        )
    values = [point.value for point in losses]
    validation, validation_iteration = _validation(events)
    seconds = _step_seconds(events)
    step_seconds = statistics.median(seconds.values()) if seconds else None
    latest = RunFolder(run_dir, tensorboard_dir, places[1] or run_dir / CHECKPOINTS).checkpoint
    return RunSummary(
        run_dir=str(run_dir),
        optimizer=events.args.get("optimizer"),
        world_size=_integer(events.args.get("world_size")),
        iterations=losses[-1].step,
        loss_first=values[0],
        loss_last=statistics.fmean(values[-LAST_STEPS:]),
        losses_averaged=len(values[-LAST_STEPS:]),
        rose=has_risen(values),
        diverged_at=next((point.step for point in losses if not math.isfinite(point.value)), None),
        validation_loss=validation,
        validation_iteration=validation_iteration,
        tokens_per_second=_tokens_per_second(events, seconds),
        step_seconds=step_seconds,
        optimizer_share=_optimizer_share(events, seconds),
        train_seconds=events.train_seconds,
        tensorboard_dir=str(tensorboard_dir),
        checkpoint=str(latest) if latest else None,
        next_commands=_next_commands(run_dir, tensorboard_dir, events.args),
    )


def has_risen(losses: Sequence[float]) -> bool:
    """Whether losses, in their order, ended above where they began by more than noise.

    The mean of the last `LAST_STEPS` must be above the first by two of their standard deviations. In a run too short
    for that, where the first ones are among the last or learning rates still warm up, it must be twice the first.
    """
    late = losses[-LAST_STEPS:]
    if not losses or not all(map(math.isfinite, late)):
        return False
    mean = statistics.fmean(late)
    if len(losses) < 2 * LAST_STEPS:
        return mean > 2 * losses[0]
    return mean > losses[0] + 2 * statistics.stdev(late)


def validation_label(name: str) -> str:
    """What the loss of a validation set is called."""
    return "validation loss" if name in (ONLY_SET, "") else f"validation loss {name}"


def strict(value: Any) -> Any:
    """`value` with null for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return value


def to_json(summary: RunSummary) -> str:
    """Returns the figures as strict JSON: a loss that is not a number becomes null."""
    figures = {key: strict(value) for key, value in dataclasses.asdict(summary).items()}
    return json.dumps(figures, indent=2, allow_nan=False) + "\n"


def show(summary: RunSummary) -> None:
    """Prints the summary; commands are never wrapped, so that they can be copied."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows(summary):
        table.add_row(label, Text(value))
    console.print(Text(f"Run {summary.run_dir}", style="bold"), soft_wrap=True)
    console.print(table)
    console.print()
    console.print(Text("What to try next", style="bold"))
    for purpose, command in summary.next_commands:
        console.print(Text(f"  {purpose}"))
        console.print(Text(f"    {command}", style="cyan"), soft_wrap=True)


def rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Returns the summary's lines as (label, value)."""
    loss = f"{summary.loss_first:.3f} -> {summary.loss_last:.3f} in {summary.iterations:,} iterations"
    lines = [("loss", f"{loss} (mean of the last {summary.losses_averaged})")]
    if summary.diverged_at is not None:
        when = f"from iteration {summary.diverged_at:,} on"
        lines.append(("warning", f"diverged: the loss is not a number {when}; lower the learning rate"))
    elif summary.rose:
        lines.append(("warning", "the loss rose; lower the learning rate"))
    for name, value in summary.validation_loss.items():
        lines.append((validation_label(name), f"{value:.3f} at iteration {summary.validation_iteration:,}"))
    if not summary.validation_loss:
        lines.append(("validation loss", "none; --eval-iters and --eval-interval turn it on"))
    if summary.tokens_per_second is not None and summary.step_seconds is not None:
        lines.append(
            (
                "speed",
                f"{summary.tokens_per_second:,.0f} tokens/s, {summary.step_seconds * 1e3:,.0f} ms per step"
                + (", slow first steps included" if summary.iterations <= WARMUP_STEPS else ""),
            )
        )
    else:
        lines.append(("speed", "not in the log"))
    if summary.optimizer_share is not None:
        lines.append(("optimizer", f"{summary.optimizer_share:.0%} of the step"))
    else:
        flags = "--timing-log-level 1 --no-barrier-with-level-1-timing --log-timers-to-tensorboard"
        lines.append(("optimizer", f"not timed; {flags} turn it on"))
    lines.append(("training took", _duration(summary.train_seconds)))
    lines.append(("TensorBoard log", summary.tensorboard_dir))
    lines.append(("checkpoint", summary.checkpoint or "none saved"))
    return lines


def _validation(events: RunEvents) -> tuple[dict[str, float], int | None]:
    """Returns the last validation loss by name of the set, and its iteration."""
    found = validations(events)
    results = {name or ONLY_SET: points[-1].value for name, points in found.items()}
    return results, next((points[-1].step for points in reversed(found.values())), None)


def _step_seconds(events: RunEvents) -> dict[int, float]:
    """Returns seconds per iteration by logged iteration, after the warm-up where there are any.

    Without Megatron's own figure, the times at which losses were written serve.
    """
    points = events.points("iteration-time") or [
        Point(after.step, (after.wall_time - before.wall_time) / (after.step - before.step), after.wall_time)
        for before, after in itertools.pairwise(events.points(LOSS_TAG))
        if after.step > before.step
    ]
    return _by_step(after_warmup(points))


def _tokens_per_second(events: RunEvents, step_seconds: dict[int, float]) -> float | None:
    """Returns the median of batch size * sequence length / step time."""
    seq_length = _integer(events.args.get("seq_length"))
    batch_sizes = _by_step(events.points("batch-size"))
    rates = [
        batch_sizes[step] * seq_length / seconds
        for step, seconds in step_seconds.items()
        if seq_length is not None and step in batch_sizes and seconds > 0
    ]
    return statistics.median(rates) if rates else None


def _optimizer_share(events: RunEvents, step_seconds: dict[int, float]) -> float | None:
    optimizer = _by_step(events.points("optimizer-time"))
    shares = [optimizer[step] / seconds for step, seconds in step_seconds.items() if step in optimizer and seconds > 0]
    if not shares and optimizer and step_seconds:  # logged at other steps: a run shorter than its log interval
        return statistics.median(optimizer.values()) / statistics.median(step_seconds.values())
    return statistics.median(shares) if shares else None


def _by_step(points: Sequence[Point]) -> dict[int, float]:
    return {point.step: point.value for point in points}


def _next_commands(run_dir: Path, tensorboard_dir: Path, args: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns (purpose, command) for what to try next, each as it can be typed for this run."""
    commands = [("look at the curves", ["tensorboard", "--logdir", str(tensorboard_dir)])]
    if read_json(run_dir / SUMMARY).get("go_on"):
        commands.append(("go on", ["megatron-muon", "train", "--resume", "--out", str(run_dir)]))
    if (run_dir / CONFIG).is_file():  # what torchrun alone has started does not tell its flags
        other = "muon" if args.get("optimizer") == "adam" else "adam"
        there = run_dir.with_name(f"{run_dir.name}-{other}")
        if (there / RUN).exists():
            report = ["megatron-muon", "report", str(run_dir), str(there), "--out", f"{run_dir}-report"]
            commands.append((f"compare with {other.capitalize()}", report))
        elif (again := _with_optimizer(run_dir, other)) is not None:
            purpose = f"the same with {other.capitalize()}; a learning rate of its own is --set lr=RATE"
            commands.append((purpose, [*again, "--out", str(there)]))
    if QUICKSTART_DATA in args.get("data_path", ""):
        own = ["megatron-muon", "data", "prepare", "--input", "PATH", "--output", "data/mine"]
        commands.append(("your own text, for --data-path data/mine", own))
    return tuple((purpose, shlex.join(command)) for purpose, command in commands)


def _with_optimizer(run_dir: Path, optimizer: str) -> list[str] | None:
    """Returns the command that trains a run's settings with another optimizer; None where it had several machines."""
    from megatron_muon.megatron.flags.config_file import load_config

    run = read_json(run_dir / RUN)
    if run.get("nodes", 1) > 1:
        return None
    flags = dict(load_config(run_dir / CONFIG).flags)
    sets = [f"optimizer={optimizer}"]
    if optimizer == "muon" and "--use-megatron-fsdp" not in flags:
        sets.append("use_megatron_fsdp=true")
    if optimizer != "muon":  # flags that Muon alone heeds are refused
        sets += [f"{flag[2:]}=null" for flag in flags if flag.startswith(("--muon-", "--adaptive-muon-"))]
    command = ["megatron-muon", "train", "--config", str(run_dir / CONFIG), "--nproc", str(run.get("ranks", 1))]
    return [*command, *(token for setting in sets for token in ("--set", setting))]


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
