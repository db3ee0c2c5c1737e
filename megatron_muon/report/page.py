"""The page of a report, in Markdown: the comparison, the pictures, every arm, and what made the figures."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.report import plots
from megatron_muon.report.arms import (
    Arm,
    Comparison,
    best_arms,
    compare,
    display_name,
    not_comparable,
    reach,
    shown_arms,
    step_parts,
)
from megatron_muon.report.headline import HOW_STEPS_ARE_COUNTED, at_most, heading, headline
from megatron_muon.report.markdown import code, indented, plain, printable, row
from megatron_muon.runs import run_folder
from megatron_muon.runs.comparable import load_of
from megatron_muon.runs.events import WARMUP_STEPS
from megatron_muon.runs.records import LAST_STEPS, Record
from megatron_muon.sweep.results import JSON, Spread

PAGE = "report.md"

_SMOOTHED_PART = 50
"""Training losses are averaged over a window of this part of the logged steps."""


@dataclass(frozen=True)
class Pictures:
    """File names of the pictures that were drawn, in the page's order, with what they show."""

    losses: tuple[tuple[str, str], ...]
    rates: str | None
    step_times: str | None
    memory: str | None


def draw(out: Path, arms: Sequence[Arm]) -> Pictures:
    """Draws all pictures that the runs have figures for."""
    shown, compared = shown_arms(arms), [one for one in compare(best_arms(arms)) if not one.differing]
    labels = names_of(shown)
    window = window_of(shown)
    losses = [
        (f"loss-{axis}.png", f"loss against {plots.AXES[axis][0]}")
        for axis in plots.AXES
        if plots.draw_losses(out / f"loss-{axis}.png", shown, axis, names=labels, window=window, compared=compared)
    ]
    names = [labels[arm.name] for arm in shown]
    rates, times, memory = "final-loss-by-rate.png", "step-time.png", "memory.png"
    has_rates = not not_comparable(arms) and plots.draw_rates(out / rates, arms, final=final_name(arms))
    has_times = plots.draw_step_times(out / times, names, [step_parts(arm) for arm in shown])
    has_memory = plots.draw_memory(
        out / memory,
        names,
        [{kind: size / 1e6 for kind, size in arm.runs[0].state_bytes.items()} for arm in shown],
        [max((run.peak_bytes or 0) for run in arm.runs) / 1e6 for arm in shown],
    )
    return Pictures(
        tuple(losses), rates if has_rates else None, times if has_times else None, memory if has_memory else None
    )


def page(
    arms: Sequence[Arm], empty: Sequence[Record], pictures: Pictures, *, places: Sequence[Path], command: str
) -> str:
    """The whole page.

    Args:
        arms: all of them.
        empty: runs without a step.
        pictures: what `draw` returned.
        places: the folders that the user gave.
        command: what the user typed.
    """
    best, shown = best_arms(arms), shown_arms(arms)
    compared = compare(best)
    runs = [run for arm in arms for run in arm.runs]
    lines = [f"# {' and '.join(plain(display_name(optimizer)) for optimizer in _optimizers(best or arms))}", ""]
    lines += [f"{len(runs)} runs of {len(arms)} settings, from {', '.join(code(str(place)) for place in places)}.", ""]
    lines += headline(arms, best, compared)
    if len(best) > 1:
        lines += [heading(arms, best), "", *_side_by_side(best, compared), ""]
        lines += [HOW_STEPS_ARE_COUNTED, ""] if compared else []
    lines += ["## Loss", "", _about_curves(shown), ""]
    for file, words in pictures.losses:
        lines += [f"![{words}]({file})", ""]
    if pictures.rates:
        lines += ["## Final loss against learning rate", "", _about_rates(arms), ""]
        lines += [f"![final loss against learning rate]({pictures.rates})", ""]
    lines += ["## All settings", "", *_all_arms(arms, best), ""]
    if pictures.step_times:
        lines += ["## Time of a step", "", _about_times(), "", f"![parts of a step's time]({pictures.step_times})", ""]
        lines += [*_times(shown), ""]
    if pictures.memory:
        lines += ["## Memory", "", _about_memory(runs), "", f"![memory]({pictures.memory})", ""]
    lines += ["## How it was made", "", *_origin(runs, empty, places, command)]
    return "\n".join(lines).rstrip() + "\n"


def figures(arms: Sequence[Arm]) -> dict[str, Any]:
    """What the page says, as numbers."""
    best = best_arms(arms)

    def spread(value: Spread | None) -> dict[str, Any] | None:
        return vars(value) if value else None

    return {
        "compared_by": final_name(arms),
        "not_comparable": not_comparable(arms),
        "settings": [
            {
                "name": arm.name,
                "optimizer": arm.optimizer,
                "learning_rate": arm.rate,
                "seeds": len(arm.runs),
                "finished": arm.finished,
                "diverged": arm.diverged,
                "best": arm in best,
                "final_loss": spread(arm.final),
                "training_loss": spread(Spread.of(run.loss_last for run in arm.sound)),
                "step_ms": spread(Spread.of(run.step_ms for run in arm.sound)),
                "train_seconds": spread(Spread.of(run.train_seconds for run in arm.sound)),
                "state_bytes": arm.runs[0].all_state_bytes,
                "peak_bytes": max((run.peak_bytes or 0 for run in arm.runs), default=0) or None,
                "step_parts_ms": step_parts(arm),
                "folders": [str(run.folder) for run in arm.runs],
            }
            for arm in arms
        ],
        "comparisons": [
            {
                "optimizer": one.arm.optimizer,
                "baseline": one.baseline.optimizer,
                "target": one.target,
                "baseline_steps": one.baseline_steps,
                "baseline_seconds": one.baseline_seconds,
                "differing": {name: list(values) for name, values in one.differing.items()},
                "other_circumstances": one.other_circumstances,
                "baseline_first_there": one.baseline_first,
                "steps": one.reached.steps if one.reached else None,
                "steps_are_a_bound": one.reached.at_first if one.reached else None,
                "seconds": one.reached.seconds if one.reached else None,
                "steps_by_seed": spread(one.reached.by_seed) if one.reached else None,
                "steps_ratio": one.steps_ratio,
                "seconds_ratio": one.seconds_ratio,
            }
            for one in compare(best)
        ],
    }


def names_of(arms: Sequence[Arm]) -> dict[str, str]:
    """What legends call the arms: the optimizer and rate where that tells them apart."""
    short = {arm.name: f"{display_name(arm.optimizer)}, lr {arm.rate:g}" for arm in arms if arm.rate is not None}
    if len(set(short.values())) == len(arms):
        return short
    return {arm.name: printable(arm.name).replace(",", "\n") for arm in arms}


def window_of(arms: Sequence[Arm]) -> int:
    """Logged steps that training losses are averaged over."""
    longest = max((len(run.train) for arm in arms for run in arm.runs), default=1)
    return max(1, longest // _SMOOTHED_PART)


def final_name(arms: Sequence[Arm]) -> str:
    """What points are compared by."""
    return "validation loss" if any(run.validation for arm in arms for run in arm.runs) else "training loss"


def _side_by_side(best: Sequence[Arm], compared: Sequence[Comparison]) -> list[str]:
    fair = [one for one in compared if not one.differing]
    by_arm = {one.arm.name: one for one in fair}
    rows: list[tuple[str, list[str]]] = []

    def add(label: str, values: Iterable[str | None]) -> None:
        cells = [value or "-" for value in values]
        if any(cell != "-" for cell in cells):
            rows.append((label, cells))

    def shown(form: str, spreads: Iterable[Spread | None]) -> list[str | None]:
        return [spread.shown(form) if spread else None for spread in spreads]

    def of(arm: Arm, name: str) -> Spread | None:
        return Spread.of(getattr(run, name) for run in arm.sound)

    validation = [of(arm, "validation_last") for arm in best]
    add("settings", (code(arm.name) for arm in best))
    add("learning rate", (f"{arm.rate:g}" if arm.rate is not None else None for arm in best))
    add("seeds", (str(len(arm.runs)) for arm in best))
    add("steps", (f"{arm.sound[0].iterations:,}" for arm in best))
    add("tokens", (f"{arm.sound[0].tokens:,}" if arm.sound[0].tokens else None for arm in best))
    add("final validation loss", shown(".4f", validation))
    add("least and most of the seeds", (_range(spread) for spread in validation))
    add("best validation loss on the way", shown(".4f", (_best(arm) for arm in best)))
    add(f"training loss, last {LAST_STEPS} logged steps", shown(".4f", (of(arm, "loss_last") for arm in best)))
    if fair:
        base = display_name(fair[0].baseline.optimizer)
        found = [by_arm.get(arm.name) for arm in best]
        add(f"steps to {base}'s final validation loss", (_steps(arm, fair[0].target) for arm in best))
        add("of its steps", (_ratio(one, one.steps_ratio) if one else None for one in found))
        add("of its time", (_ratio(one, one.seconds_ratio) if one else None for one in found))
    add("seconds of training", shown(",.0f", (of(arm, "train_seconds") for arm in best)))
    add("milliseconds of a step", shown(",.1f", (of(arm, "step_ms") for arm in best)))
    add("of these, the optimizer", shown(",.1f", (of(arm, "optimizer_ms") for arm in best)))
    add("load of the machine before a run", (_loads(arm) for arm in best))
    add("tokens per second", shown(",.0f", (of(arm, "tokens_per_second") for arm in best)))
    add("optimizer state, all ranks, bytes", (_bytes(arm.runs[0].all_state_bytes) for arm in best))
    add("peak memory of a rank, MB", (_megabytes(arm) for arm in best))
    head = ["", *(plain(display_name(arm.optimizer)) for arm in best)]
    table = [row(head), row(["---", *("---:" for _ in best)]), *(row([label, *cells]) for label, cells in rows)]
    return [*table, "", "Mean ± sample standard deviation of the seeds."]


def _range(spread: Spread | None) -> str | None:
    return f"{spread.low:.4f} to {spread.high:.4f}" if spread and spread.count > 1 else None


def _best(arm: Arm) -> Spread | None:
    return Spread.of(run.validation_best.loss if run.validation_best else None for run in arm.sound)


def _steps(arm: Arm, target: float) -> str:
    found = reach(arm, target)
    if found is None:
        return "not reached"
    return f"{'at or before ' if found.at_first else ''}{found.steps:,.0f}"


def _ratio(one: Comparison, ratio: float | None) -> str | None:
    return f"{at_most(one.reached is not None and one.reached.at_first)}{ratio:.3f}" if ratio else None


def _loads(arm: Arm) -> str | None:
    spread = Spread.of(load_of(arm.sound))
    return None if spread is None else f"{spread.low:.1f}" + (f" to {spread.high:.1f}" if spread.count > 1 else "")


def _all_arms(arms: Sequence[Arm], best: Sequence[Arm]) -> list[str]:
    head = ["settings", "runs", f"final {final_name(arms)}", "training loss", "ms per step", "state MB", ""]
    lines = [row(head), row(["---", "---:", "---:", "---:", "---:", "---:", "---"])]
    for arm in arms:
        remarks = [f"diverged: {arm.diverged} of {len(arm.runs)}"] if arm.diverged else []
        unfinished = sum(run.outcome != "finished" and not run.diverged for run in arm.runs)
        remarks += [f"not finished: {unfinished} of {len(arm.runs)}"] if unfinished else []
        remarks += ["best"] if arm in best else []
        state = arm.runs[0].all_state_bytes
        train, step = (Spread.of(getattr(run, name) for run in arm.sound) for name in ("loss_last", "step_ms"))
        name = f"**{code(arm.name)}**" if arm in best else code(arm.name)
        cells = [name, f"{arm.finished}/{len(arm.runs)}", arm.final.shown() if arm.final else "-"]
        cells += [train.shown() if train else "-", step.shown(",.1f") if step else "-"]
        cells += [f"{state / 1e6:,.2f}" if state is not None else "-", ", ".join(remarks)]
        lines.append(row(cells))
    return lines


def _times(arms: Sequence[Arm]) -> list[str]:
    parts = [step_parts(arm) for arm in arms]
    kinds = list(dict.fromkeys(kind for part in (max(parts, key=len), *parts) for kind in part))
    names = names_of(arms)
    lines = [row(["milliseconds", *(plain(names[arm.name].replace("\n", " ")) for arm in arms)])]
    lines.append(row(["---", *("---:" for _ in arms)]))
    return lines + [row([kind, *(f"{part[kind]:,.2f}" if kind in part else "-" for part in parts)]) for kind in kinds]


def _about_curves(shown: Sequence[Arm]) -> str:
    window = window_of(shown)
    smoothed = f"Training losses are means of the last {window} logged steps. " if window > 1 else ""
    return (
        f"Lines are means over the seeds, bands reach from the least to the most. {smoothed}The height of the first "
        "twentieth of the run is cut off. Seconds are those in the training loop, with validation and without start-up."
    )


def _about_rates(arms: Sequence[Arm]) -> str:
    return (
        "Mean over the seeds, bars from the least to the most; the line goes through the best setting of each rate. "
        f"The final loss is the last {final_name(arms)}. For Muon the rate is `--muon-lr` where it is given, else "
        "`--lr`."
    )


def _about_times() -> str:
    return (
        f"Medians after the first {WARMUP_STEPS} steps, means over the seeds. Muon's phases are measured in every K-th "
        "step of `--muon-metrics-interval K`. The optimizer's time needs `--timing-log-level 1 "
        "--log-timers-to-tensorboard`; what is not a phase of Muon, AdamW's whole step too, is the rest of it."
    )


def _about_memory(runs: Sequence[Record]) -> str:
    words = "Optimizer state of all ranks, on device, host and disk together."
    if any(run.run.get("device") == "cpu" for run in runs):
        words += " Peak memory on a CPU is a process's resident set, Python and libraries included."
    return words


def _origin(runs: Sequence[Record], empty: Sequence[Record], places: Sequence[Path], command: str) -> list[str]:
    """Commands, versions, commits, machines."""
    commands = dict.fromkeys(text for run in runs if (text := run.run.get("command")))
    sweeps = (run_folder.read_json(place / JSON).get("command") for place in places)
    commands = {**dict.fromkeys(text for text in sweeps if text), **commands}
    lines = ["Commands:", "", *(indented(text) for text in (*commands, command)), ""]
    for title, values in (
        ("Versions", [_joined(run.run.get("versions")) for run in runs]),
        ("Commit", [_commit(run.run) for run in runs]),
        ("Machine", [_machine(run.run) for run in runs]),
        ("Processes", [f"{run.run['nodes']} x {run.run['ranks']}" if run.run else None for run in runs]),
    ):
        counts: dict[str, int] = {}
        for value in values:
            counts[value or "not recorded"] = counts.get(value or "not recorded", 0) + 1
        for value, count in counts.items():
            lines.append(f"- {title}: {plain(value)}" + (f" ({count} of {len(runs)} runs)" if len(counts) > 1 else ""))
    lines += [f"- Left out, no step was logged: {code(str(run.folder))}" for run in empty]
    lines += ["", "<details><summary>Every run</summary>", "", row(["folder", "outcome", "started (UTC)", "torchrun"])]
    lines.append(row(["---"] * 4))
    for run in runs:
        words = run.outcome + (", diverged" if run.diverged else "")
        torchrun = run.run.get("torchrun")
        cells = [code(str(run.folder)), plain(words), plain(str(run.run.get("started", "-")))]
        cells.append(code(torchrun) if torchrun else "-")
        lines.append(row(cells))
    return [*lines, "", "</details>"]


def _optimizers(arms: Sequence[Arm]) -> list[str]:
    return list(dict.fromkeys(arm.optimizer for arm in arms))


def _joined(versions: Mapping[str, str] | None) -> str | None:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) if versions else None


def _commit(run: Mapping[str, Any]) -> str | None:
    return f"{run['commit']}{', with changes' if run.get('dirty') else ''}" if run.get("commit") else None


def _machine(run: Mapping[str, Any]) -> str | None:
    machine = run.get("machine")
    if not machine:
        return None
    return f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, trained on {run.get('device')}"


def _bytes(size: int | None) -> str | None:
    return f"{size:,}" if size is not None else None


def _megabytes(arm: Arm) -> str | None:
    most = max((run.peak_bytes or 0 for run in arm.runs), default=0)
    return f"{most / 1e6:,.0f}" if most else None


def shown_command(argv: Sequence[str]) -> str:
    """The command line as it was typed."""
    return shlex.join(("megatron-muon", *argv))
