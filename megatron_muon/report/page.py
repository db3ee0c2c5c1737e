"""The page of a report, in Markdown: the comparison, the pictures, every arm, and what made the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    rates_tried,
    reach,
    shown_arms,
    step_parts,
)
from megatron_muon.report.headline import HOW_STEPS_ARE_COUNTED, at_most, headline
from megatron_muon.report.markdown import code, indented, plain, printable, table
from megatron_muon.runs import run_folder
from megatron_muon.runs.comparable import load_of
from megatron_muon.runs.events import WARMUP_STEPS
from megatron_muon.runs.records import LAST_STEPS, Record
from megatron_muon.sweep.results import JSON, Spread

PAGE = "report.md"

LOSSES = {f"loss-{axis}.png": axis for axis in plots.AXES}
RATES, STEP_TIMES, MEMORY = "final-loss-by-rate.png", "step-time.png", "memory.png"

_SMOOTHED_PART = 50
"""Training losses are averaged over a window of this part of the logged steps."""


def draw(out: Path, arms: Sequence[Arm]) -> list[str]:
    """Draws all pictures that the runs have figures for; their names."""
    shown, compared = shown_arms(arms), [one for one in compare(best_arms(arms)) if not one.differing]
    labels, window = _labels(shown), _window(shown)
    drawn = {
        name: plots.draw_losses(out / name, shown, axis, names=labels, window=window, compared=compared)
        for name, axis in LOSSES.items()
    }
    state, peak = {}, {}
    for arm in shown:
        label = labels[arm.name]
        state[label] = {kind: size / 1e6 for kind, size in arm.runs[0].state_bytes.items()}
        peak[label] = {"peak": arm.peak_bytes / 1e6} if arm.peak_bytes else {}
    drawn[RATES] = not not_comparable(arms) and plots.draw_rates(out / RATES, arms, final=_final_name(arms))
    drawn[STEP_TIMES] = plots.draw_step_times(out / STEP_TIMES, {labels[arm.name]: step_parts(arm) for arm in shown})
    drawn[MEMORY] = plots.draw_memory(out / MEMORY, state, peak)
    return [name for name, is_drawn in drawn.items() if is_drawn]


def page(
    arms: Sequence[Arm], empty: Sequence[Record], pictures: Collection[str], *, places: Sequence[Path], command: str
) -> str:
    """The whole page.

    Args:
        empty: runs without a step.
        pictures: what `draw` returned.
        places: the folders that the user gave.
        command: what the user typed.
    """
    best, shown = best_arms(arms), shown_arms(arms)
    compared = compare(best)
    runs = [run for arm in arms for run in arm.runs]
    optimizers = dict.fromkeys(arm.optimizer for arm in best or arms)
    lines = [f"# {' and '.join(plain(display_name(optimizer)) for optimizer in optimizers)}", ""]
    lines += [f"{len(runs)} runs of {len(arms)} settings, from {', '.join(code(str(place)) for place in places)}.", ""]
    lines += headline(arms, best, compared)
    if len(best) > 1:
        searched = all(len(rates_tried(arms, arm.optimizer)) > 1 for arm in best)
        lines += ["## Side by side" + (", each at its best" if searched else ""), ""]
        lines += [*_side_by_side(best, [one for one in compared if not one.differing]), ""]
        lines += [HOW_STEPS_ARE_COUNTED, ""] if compared else []
    lines += ["## Loss", "", _about_curves(shown), ""]
    for name, axis in LOSSES.items():
        lines += [f"![loss against {plots.AXES[axis][0]}]({name})", ""] if name in pictures else []
    if RATES in pictures:
        lines += ["## Final loss against learning rate", "", _about_rates(arms), ""]
        lines += [f"![final loss against learning rate]({RATES})", ""]
    lines += ["## All settings", "", *_all_arms(arms, best), ""]
    if STEP_TIMES in pictures:
        lines += ["## Time of a step", "", _ABOUT_TIMES, "", f"![parts of a step's time]({STEP_TIMES})", ""]
        lines += [*_times(shown), ""]
    if MEMORY in pictures:
        lines += ["## Memory", "", _about_memory(runs), "", f"![memory]({MEMORY})", ""]
    lines += ["## How it was made", "", *_origin(runs, empty, places, command)]
    return "\n".join(lines).rstrip() + "\n"


def figures(arms: Sequence[Arm]) -> dict[str, Any]:
    """What the page says, as numbers."""
    best = best_arms(arms)
    return {
        "compared_by": _final_name(arms),
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
                "final_loss": _numbers(arm.final),
                "training_loss": _numbers(arm.spread("loss_last")),
                "step_ms": _numbers(arm.spread("step_ms")),
                "train_seconds": _numbers(arm.spread("train_seconds")),
                "state_bytes": arm.runs[0].all_state_bytes,
                "peak_bytes": arm.peak_bytes,
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
                "baseline_steps": one.goal.step,
                "baseline_seconds": one.goal.seconds,
                "differing": {name: list(values) for name, values in one.differing.items()},
                "other_circumstances": one.other_circumstances,
                "baseline_first_there": one.baseline_first,
                "steps": one.reached.steps if one.reached else None,
                "steps_are_a_bound": one.reached.at_first if one.reached else None,
                "seconds": one.reached.seconds if one.reached else None,
                "steps_by_seed": _numbers(one.reached.by_seed) if one.reached else None,
                "steps_ratio": one.steps_ratio,
                "seconds_ratio": one.seconds_ratio,
            }
            for one in compare(best)
        ],
    }


def _numbers(spread: Spread | None) -> dict[str, Any] | None:
    return vars(spread) if spread else None


def _labels(arms: Sequence[Arm]) -> dict[str, str]:
    """What legends call the arms: the optimizer and rate where that tells them apart."""
    short = {arm.name: f"{display_name(arm.optimizer)}, lr {arm.rate:g}" for arm in arms if arm.rate is not None}
    if len(set(short.values())) == len(arms):
        return short
    return {arm.name: printable(arm.name).replace(",", "\n") for arm in arms}


def _window(arms: Sequence[Arm]) -> int:
    """Logged steps that training losses are averaged over."""
    longest = max((len(run.train) for arm in arms for run in arm.runs), default=1)
    return max(1, longest // _SMOOTHED_PART)


def _final_name(arms: Sequence[Arm]) -> str:
    """What points are compared by."""
    return "validation loss" if any(run.validation for arm in arms for run in arm.runs) else "training loss"


def _side_by_side(best: Sequence[Arm], compared: Sequence[Comparison]) -> list[str]:
    validation = [arm.spread("validation_last") for arm in best]
    lowest = [Spread.of(run.validation_best.loss if run.validation_best else None for run in arm.sound) for arm in best]
    loads = [Spread.of(load_of(arm.sound)) for arm in best]
    tokens, state = [arm.sound[0].tokens for arm in best], [arm.runs[0].all_state_bytes for arm in best]
    rows: list[tuple[str, Iterable[str | None]]] = [
        ("settings", (code(arm.name) for arm in best)),
        ("learning rate", (_shown(arm.rate, "g") for arm in best)),
        ("seeds", (str(len(arm.runs)) for arm in best)),
        ("steps", (f"{arm.sound[0].iterations:,}" for arm in best)),
        ("tokens", (_shown(count or None, ",") for count in tokens)),
        ("final validation loss", (_shown(spread, ".4f") for spread in validation)),
        ("least and most of the seeds", (_range(spread, ".4f") for spread in validation)),
        ("best validation loss on the way", (_shown(spread, ".4f") for spread in lowest)),
        (f"training loss, last {LAST_STEPS} logged steps", (_shown(arm.spread("loss_last"), ".4f") for arm in best)),
    ]
    if compared:
        goal = f"{display_name(compared[0].baseline.optimizer)}'s final validation loss"
        found = [next((one for one in compared if one.arm is arm), None) for arm in best]
        rows += [
            (f"steps to {goal}", (_steps(arm, compared[0].target) for arm in best)),
            ("of its steps", (_ratio(one, one.steps_ratio) if one else None for one in found)),
            ("of its time", (_ratio(one, one.seconds_ratio) if one else None for one in found)),
        ]
    rows += [
        ("seconds of training", (_shown(arm.spread("train_seconds"), ",.0f") for arm in best)),
        ("milliseconds of a step", (_shown(arm.spread("step_ms"), ",.1f") for arm in best)),
        ("of these, the optimizer", (_shown(arm.spread("optimizer_ms"), ",.1f") for arm in best)),
        (
            "load of the machine before a run",
            (_range(load, ".1f") or _shown(load and load.low, ".1f") for load in loads),
        ),
        ("tokens per second", (_shown(arm.spread("tokens_per_second"), ",.0f") for arm in best)),
        ("optimizer state, all ranks, bytes", (_shown(size, ",") for size in state)),
        ("peak memory of a rank, MB", (_shown(arm.peak_bytes and arm.peak_bytes / 1e6, ",.0f") for arm in best)),
    ]
    cells = [[label, *(value or "-" for value in values)] for label, values in rows]
    known = [row for row in cells if any(cell != "-" for cell in row[1:])]
    head = ["", *(plain(display_name(arm.optimizer)) for arm in best)]
    lines = table(head, known, numbers=range(1, len(head)))
    return [*lines, "", "Mean ± sample standard deviation of the seeds."]


def _shown(value: Spread | float | None, form: str) -> str | None:
    """A number, or the mean and deviation of one over seeds; None where it is not known."""
    if value is None:
        return None
    return value.shown(form) if isinstance(value, Spread) else f"{value:{form}}"


def _range(spread: Spread | None, form: str) -> str | None:
    return f"{spread.low:{form}} to {spread.high:{form}}" if spread and spread.count > 1 else None


def _steps(arm: Arm, target: float) -> str:
    found = reach(arm, target)
    if found is None:
        return "not reached"
    return f"{'at or before ' if found.at_first else ''}{found.steps:,.0f}"


def _ratio(one: Comparison, ratio: float | None) -> str | None:
    return f"{at_most(one.reached is not None and one.reached.at_first)}{ratio:.3f}" if ratio else None


def _all_arms(arms: Sequence[Arm], best: Sequence[Arm]) -> list[str]:
    rows = []
    for arm in arms:
        unfinished = sum(run.outcome != "finished" and not run.diverged for run in arm.runs)
        remarks = {
            f"diverged: {arm.diverged} of {len(arm.runs)}": arm.diverged,
            f"not finished: {unfinished} of {len(arm.runs)}": unfinished,
            "best": arm in best,
        }
        state = arm.runs[0].all_state_bytes
        cells = [
            f"**{code(arm.name)}**" if arm in best else code(arm.name),
            f"{arm.finished}/{len(arm.runs)}",
            _shown(arm.final, ".4f"),
            _shown(arm.spread("loss_last"), ".4f"),
            _shown(arm.spread("step_ms"), ",.1f"),
            _shown(None if state is None else state / 1e6, ",.2f"),
        ]
        rows.append([*(cell or "-" for cell in cells), ", ".join(words for words, holds in remarks.items() if holds)])
    head = ["settings", "runs", f"final {_final_name(arms)}", "training loss", "ms per step", "state MB", ""]
    return table(head, rows, numbers=range(1, 6))


def _times(arms: Sequence[Arm]) -> list[str]:
    parts, labels = [step_parts(arm) for arm in arms], _labels(arms)
    kinds = dict.fromkeys(kind for part in (max(parts, key=len), *parts) for kind in part)
    head = ["milliseconds", *(plain(labels[arm.name].replace("\n", " ")) for arm in arms)]
    rows = [[kind, *(_shown(part.get(kind), ",.2f") or "-" for part in parts)] for kind in kinds]
    return table(head, rows, numbers=range(1, len(head)))


def _about_curves(shown: Sequence[Arm]) -> str:
    window = _window(shown)
    smoothed = f"Training losses are means of the last {window} logged steps. " if window > 1 else ""
    return (
        f"Lines are means over the seeds, bands reach from the least to the most. {smoothed}The height of the first "
        "twentieth of the run is cut off. Seconds are those in the training loop, with validation and without start-up."
    )


def _about_rates(arms: Sequence[Arm]) -> str:
    return (
        "Mean over the seeds, bars from the least to the most; the line goes through the best setting of each rate. "
        f"The final loss is the last {_final_name(arms)}. For Muon the rate is `--muon-lr` where it is given, else "
        "`--lr`."
    )


_ABOUT_TIMES = (
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
    commands = [run_folder.read_json(place / JSON).get("command") for place in places]
    commands += [run.run.get("command") for run in runs]
    lines = ["Commands:", "", *(indented(text) for text in (*dict.fromkeys(filter(None, commands)), command)), ""]
    origins = [_origin_of(run.run) for run in runs]
    for title in origins[0]:
        counts = Counter(origin[title] or "not recorded" for origin in origins)
        for value, count in counts.items():
            lines.append(f"- {title}: {plain(value)}" + (f" ({count} of {len(runs)} runs)" if len(counts) > 1 else ""))
    lines += [f"- Left out, no step was logged: {code(str(run.folder))}" for run in empty]
    rows = []
    for run in runs:
        torchrun, started = run.run.get("torchrun"), str(run.run.get("started", "-"))
        words = run.outcome + (", diverged" if run.diverged else "")
        rows.append([code(str(run.folder)), plain(words), plain(started), code(torchrun) if torchrun else "-"])
    every = table(["folder", "outcome", "started (UTC)", "torchrun"], rows)
    return [*lines, "", "<details><summary>Every run</summary>", "", *every, "", "</details>"]


def _origin_of(run: Mapping[str, Any]) -> dict[str, str | None]:
    """What a run's run.json says of where it ran."""
    versions = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())
    commit, machine = run.get("commit"), run.get("machine")
    return {
        "Versions": versions,
        "Commit": f"{commit}{', with changes' if run.get('dirty') else ''}" if commit else None,
        "Machine": f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, trained on "
        f"{run.get('device')}"
        if machine
        else None,
        "Processes": f"{run['nodes']} x {run['ranks']}" if run else None,
    }
