"""The page of a report, in Markdown: the comparison, the pictures, every arm, and what made the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_muon.tools.report import plots
from megatron_muon.tools.report.arms import Arm, Spread, display_name
from megatron_muon.tools.report.comparison import (
    HOW_STEPS_ARE_COUNTED,
    at_most,
    best_arms,
    compare,
    headline,
    load_of,
    not_comparable,
    rates_tried,
    reach,
    shown_arms,
)
from megatron_muon.tools.report.markdown import EVERY_RUN, FOLD_END, OTHER_LOSSES, code, plain, table
from megatron_muon.tools.train.events import WARMUP_STEPS
from megatron_muon.tools.train.records import LAST_STEPS, Record
from megatron_muon.tools.train.wording import printable

PAGE, HTML, FIGURES = "report.md", "report.html", "report.json"

LOSSES = {f"loss-{axis}.png": axis for axis in plots.AXES}
RATES = "final-loss-by-rate.png"

MAX_VALUE_LENGTH = 32
"""Longest value of a setting in a picture; of a longer one the end is shown, which tells paths apart."""

_SMOOTHED_PART = 50
"""Training losses are averaged over a window of this part of the logged steps."""

_ABOUT_CURVES = (
    "Lines are means over the seeds, bands span the lowest to the highest. {smoothed}Higher losses of the first "
    "twentieth of the run are cut off. Seconds are those in the training loop, with validation and without start-up."
)
_ABOUT_RATES = (
    "Mean over the seeds, bars from the lowest to the highest; the line goes through the best setting of each rate. "
    "The final loss is the last {final}. For Muon the rate is `--muon-lr` where it is given, else `--lr`."
)
_ABOUT_TIMES = (
    f"Medians of the steps after the first {WARMUP_STEPS} (of all in a shorter run), averaged over the seeds. Muon's "
    "phases are measured in every K-th step of `--muon-metrics-interval K`. The optimizer's time needs "
    "`--timing-log-level 1 --log-timers-to-tensorboard`; all that is not a phase of Muon, including "
    "AdamW's whole step, is the rest."
)
_Cell = Callable[[Arm], str | None]


class Report:
    """What a report says of arms; `empty` are runs without a step."""

    def __init__(self, arms: Sequence[Arm], empty: Sequence[Record]) -> None:
        self.arms, self.empty = arms, empty
        self.runs = [run for arm in arms for run in arm.runs]
        self.best, self.shown = best_arms(arms), shown_arms(arms)
        self.compared = compare(self.best)
        self.concluded = [one for one in self.compared if not one.differing]
        self.final = "validation loss" if any(run.validation for run in self.runs) else "training loss"
        logged = max((len(run.train) for arm in self.shown for run in arm.runs), default=1)
        self.window = max(1, logged // _SMOOTHED_PART)  # logged steps that training losses are averaged over
        self.labels = _labels(self.shown)

    def draw(self, out: Path) -> list[str]:
        """Draws all pictures that the runs have figures for; their names."""
        named = dict(zip(self.labels, self.shown, strict=True))
        curves = [
            plots.Curves(name, arm.train(self.window), arm.validation(), bool(arm.sound)) for name, arm in named.items()
        ]
        drawn = {name: plots.draw_losses(out / name, curves, axis, self.concluded) for name, axis in LOSSES.items()}
        drawn[RATES] = not not_comparable(self.arms) and plots.draw_rates(out / RATES, self.arms, final=self.final)
        return [name for name, is_drawn in drawn.items() if is_drawn]

    def page(self, pictures: Collection[str], *, places: Sequence[Path], command: str) -> str:
        """The whole page; `pictures` are what `draw` returned, `places` and `command` what the user typed."""
        folders = ", ".join(code(str(place)) for place in places)
        runs = count(len(self.runs), "run")
        parts = [f"# {' and '.join(dict.fromkeys(_name(arm) for arm in self.shown))}"]
        parts += [f"{runs} of {count(len(self.arms), 'setting')}, from {folders}."]
        if unfinished := sum(map(_unfinished, self.arms)):
            parts += [f"**Not finished: {unfinished} of {runs}.** Nothing is concluded from unfinished runs."]
        parts += headline(self.arms, self.best, self.compared)
        if len(self.best) > 1:
            searched = all(len(rates_tried(self.arms, arm.optimizer)) > 1 for arm in self.best)
            parts += ["## Side by side" + (", each at its best" if searched else ""), self._side_by_side()]
            parts += ["Mean ± sample standard deviation of the seeds."]
            parts += [HOW_STEPS_ARE_COUNTED] if self.compared else []
        smoothed = f"Training losses are means of the last {self.window} logged steps. " if self.window > 1 else ""
        first, *others = [
            f"![loss against {plots.AXES[LOSSES[name]][0]}]({name})" for name in LOSSES if name in pictures
        ] or [""]
        about = _ABOUT_CURVES.format(smoothed=smoothed) if first else "No logged loss is a finite number."
        parts += ["## Loss", about, first, *([OTHER_LOSSES, *others, FOLD_END] if others else [])]
        if RATES in pictures:
            parts += ["## Final loss against learning rate", _ABOUT_RATES.format(final=self.final)]
            parts += [f"![final loss against learning rate]({RATES})"]
        parts += ["## All settings", self._all_arms()]
        if times := self._times():
            parts += ["## Time of a step", _ABOUT_TIMES, times]
        return "\n\n".join(filter(None, [*parts, "## How it was made", *self._origin(command)])) + "\n"

    def figures(self) -> Any:
        """What the page says, as numbers for JSON."""
        settings = [
            {
                "name": arm.name,
                "optimizer": arm.optimizer,
                "learning_rate": arm.rate,
                "seeds": len(arm.runs),
                "finished": arm.finished,
                "diverged": arm.diverged,
                "best": arm in self.best,
                "final_loss": arm.final,
                "training_loss": arm.spread("loss_last"),
                "step_ms": arm.spread("step_ms"),
                "train_seconds": arm.spread("train_seconds"),
                "state_bytes": arm.runs[0].all_state_bytes,
                "peak_bytes": arm.peak_bytes,
                "step_parts_ms": arm.step_parts(),
                "folders": [str(run.folder) for run in arm.runs],
            }
            for arm in self.arms
        ]
        comparisons = [
            vars(one) | {"optimizer": one.arm.optimizer, "baseline": one.baseline.optimizer} for one in self.compared
        ]
        for one in comparisons:
            del one["arm"]
        found = {"compared_by": self.final, "not_comparable": not_comparable(self.arms)}
        return msgspec.to_builtins({**found, "settings": settings, "comparisons": comparisons}, str_keys=True)

    def _side_by_side(self) -> str:
        def lowest(arm: Arm) -> Spread | None:
            return Spread.of(run.validation_best.loss if run.validation_best else None for run in arm.sound)

        rows: dict[str, _Cell] = {
            "settings": lambda arm: code(arm.name),
            "learning rate": lambda arm: _shown(arm.rate, "g"),
            "seeds": lambda arm: str(len(arm.runs)),
            "steps": lambda arm: f"{arm.sound[0].iterations:,}",
            "tokens": lambda arm: _shown(arm.sound[0].tokens or None, ","),
            "final validation loss": _mean("validation_last", ".4f"),
            "lowest and highest of the seeds": lambda arm: _range(arm.spread("validation_last"), ".4f"),
            "best validation loss on the way": lambda arm: _shown(lowest(arm), ".4f"),
            f"training loss, last {LAST_STEPS} logged steps": _mean("loss_last", ".4f"),
            **self._rows_of_comparison(),
            "seconds of training": _mean("train_seconds", ",.0f"),
            "milliseconds of a step": _mean("step_ms", ",.1f"),
            "of these, the optimizer": _mean("optimizer_ms", ",.1f"),
            "load of the machine before a run": lambda arm: _range(Spread.of(load_of(arm.sound)), ".1f", one=True),
            "tokens per second": _mean("tokens_per_second", ",.0f"),
            "optimizer state of all ranks, wherever it lies, bytes": lambda arm: _shown(
                arm.runs[0].all_state_bytes, ","
            ),
            "peak memory of a rank (on a CPU the process's resident set), MB": lambda arm: _shown(
                arm.peak_bytes and arm.peak_bytes / 1e6, ",.0f"
            ),
        }
        cells = [[label, *(cell(arm) or "-" for arm in self.best)] for label, cell in rows.items()]
        head = ["", *map(_name, self.best)]
        return table(head, [row for row in cells if set(row[1:]) != {"-"}], numbers=range(1, len(head)))

    def _rows_of_comparison(self) -> dict[str, _Cell]:
        """Steps to the baseline's final loss, and the ratios of those that reach it."""
        if not self.concluded:
            return {}
        target, baseline = self.concluded[0].target, self.concluded[0].baseline
        found = {one.arm: one for one in self.concluded}

        def steps(arm: Arm) -> str | None:
            if arm not in (baseline, *found):
                return None
            there = reach(arm.validation(), target)
            return f"{'at or before ' if there.at_first else ''}{there.steps:,.0f}" if there else "not reached"

        def ratio(name: str) -> _Cell:
            def cell(arm: Arm) -> str | None:
                value = getattr(found.get(arm), name, None)
                return f"{at_most(found[arm].steps_are_a_bound)}{value:.3f}" if value else None

            return cell

        return {
            f"steps to {_name(baseline)}'s final validation loss": steps,
            "of its steps": ratio("steps_ratio"),
            "of its time": ratio("seconds_ratio"),
        }

    def _all_arms(self) -> str:
        def remark(arm: Arm) -> str:
            counts = {"diverged": arm.diverged, "not finished": _unfinished(arm)}
            words = [f"{name}: {some} of {len(arm.runs)}" for name, some in counts.items() if some]
            if _unfinished(arm) and not arm.sound:
                words.append(f"step {max(run.iterations for run in arm.runs):,}")
            return ", ".join([*words, *(["best"] if arm in self.best else [])])

        columns: dict[str, _Cell] = {
            "settings": lambda arm: f"**{code(arm.name)}**" if arm in self.best else code(arm.name),
            "runs": lambda arm: f"{arm.finished}/{len(arm.runs)}",
            f"final {self.final}": lambda arm: _shown(arm.final, ".4f"),
            "training loss": lambda arm: _shown(Spread.of(run.loss_last for run in arm.drawn), ".4f"),
            "ms per step": lambda arm: _shown(Spread.of(run.step_ms for run in arm.drawn), ",.1f"),
            "state MB": lambda arm: _shown(arm.runs[0].all_state_bytes and arm.runs[0].all_state_bytes / 1e6, ",.2f"),
            "": remark,
        }
        rows = [[cell(arm) or ("-" if name else "") for name, cell in columns.items()] for arm in self.arms]
        return table(list(columns), rows, numbers=range(1, 6))

    def _times(self) -> str:
        parts = [arm.step_parts() for arm in self.shown]
        kinds = dict.fromkeys(kind for part in (max(parts, key=len), *parts) for kind in part)
        if not kinds:
            return ""
        head = ["milliseconds", *map(plain, self.labels)]
        rows = [[kind, *(_shown(part.get(kind), ",.2f") or "-" for part in parts)] for kind in kinds]
        return table(head, rows, numbers=range(1, len(head)))

    def _origin(self, command: str) -> list[str]:
        """Commands, versions, commits, machines."""
        commands = dict.fromkeys([*filter(None, (run.run.get("command") for run in self.runs)), command])
        origins = [_origin_of(run.run) for run in self.runs]
        lines = []
        for title in origins[0]:
            counts = Counter(origin[title] or "not recorded" for origin in origins)
            for value, runs in counts.items():
                some = f" ({runs} of {len(self.runs)} runs)" if len(counts) > 1 else ""
                lines.append(f"- {title}: {plain(value)}{some}")
        lines += [f"- Left out (no step logged): {code(str(run.folder))}" for run in self.empty]
        rows = []
        for run in self.runs:
            torchrun, started = run.run.get("torchrun"), str(run.run.get("started", "-"))
            words = run.outcome + (", diverged" if run.diverged else "")
            rows.append([code(str(run.folder)), plain(words), plain(started), code(torchrun) if torchrun else "-"])
        every = table(["folder", "outcome", "started (UTC)", "torchrun"], rows)
        typed = "\n".join(f"    {printable(line)}" for each in commands for line in each.splitlines())
        return ["Commands:", typed, "\n".join(lines), EVERY_RUN, every, FOLD_END]


def count(number: int, noun: str) -> str:
    """A number and its noun, such as `3 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _name(arm: Arm) -> str:
    return plain(display_name(arm.optimizer))


def _unfinished(arm: Arm) -> int:
    """How many of its runs did not finish, those that diverged aside."""
    return sum(run.outcome != "finished" and not run.diverged for run in arm.runs)


def _labels(arms: Sequence[Arm]) -> list[str]:
    """Names of arms in pictures: optimizer and rate where these tell them apart, else settings, else a number too."""
    names = [f"{display_name(arm.optimizer)}, lr {arm.rate:g}" if arm.rate is not None else arm.name for arm in arms]
    if len(set(names)) < len(arms):
        names = [", ".join(f"{key}={_end(value)}" for key, value in arm.settings) or arm.name for arm in arms]
    if len(set(names)) < len(arms):
        names = [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    states = ["" if arm.sound else " (diverged)" if arm.diverged else " (not finished)" for arm in arms]
    return [printable(name + state) for name, state in zip(names, states, strict=True)]


def _end(text: str) -> str:
    return text if len(text) <= MAX_VALUE_LENGTH else f"…{text[1 - MAX_VALUE_LENGTH :]}"


def _shown(value: Spread | float | None, form: str) -> str | None:
    """A number, or the mean and deviation of one over seeds; None where it is not known."""
    return None if value is None else f"{value:{form}}"


def _mean(figure: str, form: str) -> _Cell:
    return lambda arm: _shown(arm.spread(figure), form)


def _range(spread: Spread | None, form: str, *, one: bool = False) -> str | None:
    """Lowest to highest; with `one` also of a single seed."""
    if spread is None or (spread.count == 1 and not one):
        return None
    return f"{spread.low:{form}} to {spread.high:{form}}" if spread.count > 1 else f"{spread.low:{form}}"


def _origin_of(run: Mapping[str, Any]) -> dict[str, str | None]:
    """Where a run ran, from its run.json."""
    versions = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())
    machine = "{processor}, {cores} cores, {system}, trained on "
    return {
        "Versions": versions,
        "Commit": f"{run['commit']}{', with changes' if run.get('dirty') else ''}" if run.get("commit") else None,
        "Machine": f"{machine.format_map(run['machine'])}{run.get('device')}" if run.get("machine") else None,
        "Machines x processes": f"{run['nodes']} x {run['ranks']}" if run else None,
    }
