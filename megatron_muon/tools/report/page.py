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
    Comparison,
    best_arms,
    compare,
    load_of,
    not_comparable,
    rates_tried,
    reach,
    shown_arms,
)
from megatron_muon.tools.report.headline import HOW_STEPS_ARE_COUNTED, at_most, headline
from megatron_muon.tools.report.markdown import FOLD, FOLD_END, code, indented, plain, table
from megatron_muon.tools.train.events import WARMUP_STEPS
from megatron_muon.tools.train.records import LAST_STEPS, Record
from megatron_muon.tools.train.wording import printable

PAGE, HTML, FIGURES = "report.md", "report.html", "report.json"

LOSSES = {f"loss-{axis}.png": axis for axis in plots.AXES}
RATES, STEP_TIMES, MEMORY = "final-loss-by-rate.png", "step-time.png", "memory.png"

_MOST_LETTERS = 32
"""Of a setting's value in a picture."""

_SMOOTHED_PART = 50
"""Training losses are averaged over a window of this part of the logged steps."""

_ABOUT_CURVES = (
    "Lines are means over the seeds, bands span the lowest to the highest. {smoothed}Higher losses of the first "
    "twentieth of the run are cut off. Seconds are those in the training loop, with validation and without start-up."
)
_NO_CURVES = "No logged loss is a finite number."
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
_ABOUT_MEMORY = "Optimizer state of all ranks, on device, host and disk together."
_ABOUT_MEMORY_OF_CPUS = " Peak memory on a CPU is a process's resident set, Python and libraries included."

_Cell = Callable[[Arm], str | None]


class Report:
    """What is said of arms; `empty` are runs without a step."""

    def __init__(self, arms: Sequence[Arm], empty: Sequence[Record]) -> None:
        self.arms, self.empty = arms, empty
        self.runs = [run for arm in arms for run in arm.runs]
        self.best, self.shown = best_arms(arms), shown_arms(arms)
        self.compared = compare(self.best)
        self.concluded = [one for one in self.compared if not one.differing]
        self.final = "validation loss" if arms[0].compared_by == "validation_last" else "training loss"
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
        times = {"milliseconds of a training step (median)": {name: arm.step_parts() for name, arm in named.items()}}
        drawn[STEP_TIMES] = plots.draw_bars(out / STEP_TIMES, times, width=10.0)
        states = {name: arm.runs[0].state_bytes for name, arm in named.items()}
        peaks = {name: {"peak": arm.peak_bytes} if arm.peak_bytes else {} for name, arm in named.items()}
        memory = {"optimizer state, all ranks (MB)": states, "peak memory of the fullest rank (MB)": peaks}
        drawn[MEMORY] = plots.draw_bars(out / MEMORY, memory, width=6.0, unit=1e6)
        return [name for name, is_drawn in drawn.items() if is_drawn]

    def page(self, pictures: Collection[str], *, places: Sequence[Path], command: str) -> str:
        """The whole page; `pictures` are what `draw` returned, the others what was typed."""
        optimizers = dict.fromkeys(arm.optimizer for arm in self.shown)
        folders = ", ".join(code(str(place)) for place in places)
        parts = [f"# {' and '.join(plain(display_name(optimizer)) for optimizer in optimizers)}"]
        parts += [f"{count(len(self.runs), 'run')} of {count(len(self.arms), 'setting')}, from {folders}."]
        if unfinished := sum(map(_unfinished, self.arms)):
            runs = count(len(self.runs), "run")
            parts += [f"**Not finished: {unfinished} of {runs}.** Nothing is concluded from unfinished runs."]
        parts += headline(self.arms, self.best, self.compared)
        if len(self.best) > 1:
            searched = all(len(rates_tried(self.arms, arm.optimizer)) > 1 for arm in self.best)
            parts += ["## Side by side" + (", each at its best" if searched else ""), self._side_by_side()]
            parts += ["Mean ± sample standard deviation of the seeds."]
            parts += [HOW_STEPS_ARE_COUNTED] if self.compared else []
        smoothed = f"Training losses are means of the last {self.window} logged steps. " if self.window > 1 else ""
        losses = {name: axis for name, axis in LOSSES.items() if name in pictures}
        parts += ["## Loss", _ABOUT_CURVES.format(smoothed=smoothed) if losses else _NO_CURVES]
        parts += [f"![loss against {plots.AXES[axis][0]}]({name})" for name, axis in losses.items()]
        if RATES in pictures:
            parts += ["## Final loss against learning rate", _ABOUT_RATES.format(final=self.final)]
            parts += [f"![final loss against learning rate]({RATES})"]
        parts += ["## All settings", self._all_arms()]
        if STEP_TIMES in pictures:
            parts += ["## Time of a step", _ABOUT_TIMES, f"![parts of a step's time]({STEP_TIMES})", self._times()]
        if MEMORY in pictures:
            on_cpu = any(run.run.get("device") == "cpu" for run in self.runs)
            parts += ["## Memory", _ABOUT_MEMORY + (_ABOUT_MEMORY_OF_CPUS if on_cpu else ""), f"![memory]({MEMORY})"]
        return "\n\n".join([*parts, "## How it was made", *self._origin(command)]) + "\n"

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
        comparisons = []
        for one in self.compared:
            figures = {name: figure for name, figure in vars(one).items() if name not in ("arm", "baseline")}
            optimizers = {"optimizer": one.arm.optimizer, "baseline": one.baseline.optimizer}
            comparisons.append(optimizers | figures)
        found = {"compared_by": self.final, "not_comparable": not_comparable(self.arms)}
        return msgspec.to_builtins({**found, "settings": settings, "comparisons": comparisons}, str_keys=True)

    def _side_by_side(self) -> str:
        def lowest(arm: Arm) -> Spread | None:
            return Spread.of(run.validation_best.loss if run.validation_best else None for run in arm.sound)

        def load(arm: Arm) -> str | None:
            found = Spread.of(load_of(arm.sound))
            return _range(found, ".1f") or _shown(found and found.low, ".1f")

        rows: list[tuple[str, _Cell]] = [
            ("settings", lambda arm: code(arm.name)),
            ("learning rate", lambda arm: _shown(arm.rate, "g")),
            ("seeds", lambda arm: str(len(arm.runs))),
            ("steps", lambda arm: f"{arm.sound[0].iterations:,}"),
            ("tokens", lambda arm: _shown(arm.sound[0].tokens or None, ",")),
            ("final validation loss", _mean("validation_last", ".4f")),
            ("least and most of the seeds", lambda arm: _range(arm.spread("validation_last"), ".4f")),
            ("best validation loss on the way", lambda arm: _shown(lowest(arm), ".4f")),
            (f"training loss, last {LAST_STEPS} logged steps", _mean("loss_last", ".4f")),
        ]
        if self.concluded:
            target, baseline_arm = self.concluded[0].target, self.concluded[0].baseline
            baseline = plain(display_name(baseline_arm.optimizer))
            found = {one.arm: one for one in self.concluded}
            rows += [
                (
                    f"steps to {baseline}'s final validation loss",
                    lambda arm: _steps(arm, target) if arm in (baseline_arm, *found) else None,
                ),
                ("of its steps", lambda arm: _ratio(found.get(arm), "steps_ratio")),
                ("of its time", lambda arm: _ratio(found.get(arm), "seconds_ratio")),
            ]
        rows += [
            ("seconds of training", _mean("train_seconds", ",.0f")),
            ("milliseconds of a step", _mean("step_ms", ",.1f")),
            ("of these, the optimizer", _mean("optimizer_ms", ",.1f")),
            ("load of the machine before a run", load),
            ("tokens per second", _mean("tokens_per_second", ",.0f")),
            ("optimizer state, all ranks, bytes", lambda arm: _shown(arm.runs[0].all_state_bytes, ",")),
            ("peak memory of a rank, MB", lambda arm: _shown(arm.peak_bytes and arm.peak_bytes / 1e6, ",.0f")),
        ]
        cells = [[label, *(cell(arm) or "-" for arm in self.best)] for label, cell in rows]
        known = [row for row in cells if any(cell != "-" for cell in row[1:])]
        head = ["", *(plain(display_name(arm.optimizer)) for arm in self.best)]
        return table(head, known, numbers=range(1, len(head)))

    def _all_arms(self) -> str:
        def remark(arm: Arm) -> str:
            counts = {"diverged": arm.diverged, "not finished": _unfinished(arm)}
            words = [f"{name}: {some} of {len(arm.runs)}" for name, some in counts.items() if some]
            if _unfinished(arm) and not arm.sound:
                words.append(f"step {max(run.iterations for run in arm.runs):,}")
            return ", ".join([*words, *(["best"] if arm in self.best else [])])

        columns: list[tuple[str, _Cell]] = [
            ("settings", lambda arm: f"**{code(arm.name)}**" if arm in self.best else code(arm.name)),
            ("runs", lambda arm: f"{arm.finished}/{len(arm.runs)}"),
            (f"final {self.final}", lambda arm: _shown(arm.final, ".4f")),
            ("training loss", lambda arm: _shown(Spread.of(run.loss_last for run in arm.drawn), ".4f")),
            ("ms per step", lambda arm: _shown(Spread.of(run.step_ms for run in arm.drawn), ",.1f")),
            ("state MB", lambda arm: _shown(arm.runs[0].all_state_bytes and arm.runs[0].all_state_bytes / 1e6, ",.2f")),
        ]
        rows = [[*(cell(arm) or "-" for _, cell in columns), remark(arm)] for arm in self.arms]
        return table([*(head for head, _ in columns), ""], rows, numbers=range(1, 6))

    def _times(self) -> str:
        parts = [arm.step_parts() for arm in self.shown]
        kinds = dict.fromkeys(kind for part in (max(parts, key=len), *parts) for kind in part)
        head = ["milliseconds", *(map(plain, self.labels))]
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
        parts = ["Commands:", "\n".join(map(indented, commands)), "\n".join(lines)]
        return [*parts, FOLD, every, FOLD_END]


def count(number: int, noun: str) -> str:
    """Things and how many there are."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _unfinished(arm: Arm) -> int:
    """How many of its runs did not finish, those that diverged aside."""
    return sum(run.outcome != "finished" and not run.diverged for run in arm.runs)


def _labels(arms: Sequence[Arm]) -> list[str]:
    """What pictures call arms: optimizer and rate where these tell them apart, else settings that do."""
    names = [f"{display_name(arm.optimizer)}, lr {arm.rate:g}" if arm.rate is not None else arm.name for arm in arms]
    if len(set(names)) < len(arms):
        settings = [dict(arm.settings) for arm in arms]
        telling: list[str] = []

        def groups(keys: Sequence[str]) -> int:
            return len({tuple(map(each.get, keys)) for each in settings})

        for key in dict.fromkeys(key for each in settings for key in each):
            if groups([*telling, key]) > groups(telling):
                telling.append(key)
        names = [", ".join(f"{key}={_end(each[key])}" for key in telling if key in each) for each in settings]
    if len(set(names)) < len(arms):
        names = [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    states = ["" if arm.sound else " (diverged)" if arm.diverged else " (not finished)" for arm in arms]
    return [printable(name + state) for name, state in zip(names, states, strict=True)]


def _end(text: str) -> str:
    """A setting's value for pictures: of a long one the end, which tells paths apart."""
    return text if len(text) <= _MOST_LETTERS else f"…{text[1 - _MOST_LETTERS :]}"


def _shown(value: Spread | float | None, form: str) -> str | None:
    """A number, or the mean and deviation of one over seeds; None where it is not known."""
    return None if value is None else f"{value:{form}}"


def _mean(figure: str, form: str) -> _Cell:
    return lambda arm: _shown(arm.spread(figure), form)


def _range(spread: Spread | None, form: str) -> str | None:
    return f"{spread.low:{form}} to {spread.high:{form}}" if spread and spread.count > 1 else None


def _steps(arm: Arm, target: float) -> str:
    found = reach(arm.validation(), target)
    return f"{'at or before ' if found.at_first else ''}{found.steps:,.0f}" if found else "not reached"


def _ratio(one: Comparison | None, name: str) -> str | None:
    ratio = getattr(one, name, None)
    return f"{at_most(one.steps_are_a_bound)}{ratio:.3f}" if one and ratio else None


def _origin_of(run: Mapping[str, Any]) -> dict[str, str | None]:
    """What a run's run.json says of where it ran."""
    versions = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())
    machine = "{processor}, {cores} cores, {system}, trained on "
    return {
        "Versions": versions,
        "Commit": f"{run['commit']}{', with changes' if run.get('dirty') else ''}" if run.get("commit") else None,
        "Machine": f"{machine.format_map(run['machine'])}{run.get('device')}" if run.get("machine") else None,
        "Machines x processes": f"{run['nodes']} x {run['ranks']}" if run else None,
    }
