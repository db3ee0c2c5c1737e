"""Whether a learning rate that was found at one value of a setting, a narrow model's for instance, holds at others.

Arms that differ in the setting, in what follows from it and in the rate make a *family*, a scale mode for instance; in
a family each value of the setting is a *line*: final losses by rate. Arithmetic and the table; `plots` draws lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.core.numbers import is_number
from megatron_muon.errors import UserError
from megatron_muon.tools.report.arms import Arm, Spread
from megatron_muon.tools.report.markdown import code, plain, table

_RATES = ("lr", "min_lr", "muon_lr", "muon_min_lr")

ABOUT = (
    "For each value of {key}: the rate with the lowest final {final}, the loss there, and the loss at the rate that "
    "is best for {first}, the first value: the cost of reusing that rate. A best rate that is the least or the "
    "most of those tried may lie beyond. Where other rates were varied too, a point is the best of them."
)


@dataclass(frozen=True)
class Line:
    """Final losses by learning rate at one value of the setting, of rates whose runs all finished; at least one."""

    value: str
    losses: Mapping[float, Spread]
    tried: Sequence[float]

    @property
    def best(self) -> float:
        """The rate of the lowest mean."""
        return min(self.losses, key=lambda rate: self.losses[rate].mean)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the least or the most of those tried."""
        return self.best in (min(self.tried), max(self.tried))

    def lost(self, rate: float) -> float | None:
        """How much higher than the lowest the loss is at another rate; None where its runs did not all finish."""
        return self.losses[rate].mean - self.losses[self.best].mean if rate in self.losses else None


@dataclass(frozen=True)
class Family:
    """Lines of runs that are otherwise alike; `name` has the settings that tell them from other families."""

    name: str
    lines: Sequence[Line]


def families(arms: Sequence[Arm], key: str) -> list[Family]:
    """The families of a setting, by its flag without dashes; lines in the order of its values.

    Raises:
        UserError: the setting is the same in all runs, or no value of it has a run that finished.
    """
    settings = [dict(arm.settings) for arm in arms]
    differing = dict.fromkeys(name for each in settings for name in each)
    if key not in differing:
        others = ", ".join(name for name in differing if name not in _RATES) or "nothing but rates"
        raise UserError(f"--transfer {key} is the same in all runs; they differ in {others}")
    telling = [name for name in differing if name != key and name not in _RATES and not _follows(name, key, settings)]
    found: dict[str, dict[str, list[Arm]]] = {}
    for arm, each in zip(arms, settings, strict=True):
        if arm.rate is not None:
            name = ", ".join(f"{other}={each[other]}" for other in telling if other in each)
            found.setdefault(name, {}).setdefault(each.get(key, "not given"), []).append(arm)
    made = [Family(name, lines) for name, by_value in found.items() if (lines := _lines(by_value))]
    if not made:
        raise UserError(f"--transfer {key}: no value of it has a learning rate whose runs have all finished")
    return made


def _follows(name: str, key: str, settings: Sequence[Mapping[str, str]]) -> bool:
    """Whether a setting has one value for each of `key`, as heads for each width."""
    pairs = {(each.get(key), each.get(name)) for each in settings}
    return len(pairs) == len({value for value, _ in pairs})


def _lines(by_value: Mapping[str, Sequence[Arm]]) -> list[Line]:
    made = []
    for value, arms in by_value.items():
        losses: dict[float, Spread] = {}
        for arm in arms:
            if arm.counts and (final := arm.final) and arm.rate:
                losses[arm.rate] = min(final, losses.get(arm.rate, final), key=lambda spread: spread.mean)
        if losses:
            made.append(Line(value, dict(sorted(losses.items())), sorted(arm.rate for arm in arms if arm.rate)))
    return sorted(made, key=lambda line: (0, float(line.value), "") if is_number(line.value) else (1, 0.0, line.value))


def transfer_table(found: Sequence[Family], key: str) -> str:
    """A row for each line: its best rate, the loss there, and what the first line's best rate loses."""
    rows = []
    for family in found:
        first = family.lines[0].best
        for line in family.lines:
            lost = line.lost(first)
            rows.append(
                [
                    code(family.name) if family.name else "all",
                    plain(line.value),
                    f"{line.best:g}{', at the edge' if line.at_edge else ''}",
                    f"{line.losses[line.best]:.4f}",
                    f"{line.losses[first]:.4f}" if lost is not None else "-",
                    f"{lost:+.4f}" if lost is not None else "-",
                ]
            )
    head = ["settings", plain(key), "best rate", "loss there", "loss at the first's best rate", "more by"]
    return table(head, rows, numbers=range(1, 6))
