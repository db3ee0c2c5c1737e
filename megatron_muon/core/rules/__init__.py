"""The rules of which a Muon is made; a new one is a module here and a line of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_muon.core.rules.hyperball import Hyperball
from megatron_muon.core.rules.plain import CautiousDecay, CoupledDecay, Decay, Descent, Momentum
from megatron_muon.core.rules.rule import Held, Measure, Rule
from megatron_muon.core.rules.second_moments import AdaMuon, NorMuon

RULES: dict[str, type[Rule]] = {
    "coupled_decay": CoupledDecay,
    "momentum": Momentum,
    "adamuon": AdaMuon,
    "normuon": NorMuon,
    "measure": Measure,
    "decay": Decay,
    "cautious_decay": CautiousDecay,
    "descent": Descent,
    "hyperball": Hyperball,
}
"""In the order in which a step runs them."""


def make_rules(chosen: Sequence[str], held: Held, options: Mapping[str, Any]) -> list[Rule]:
    """The rules with these names, in the order of a step."""
    return [kind(held, options) for name, kind in RULES.items() if name in chosen]


def chosen_rules(
    *,
    moment2: str | None = None,
    cautious: bool = False,
    hyperball: bool = False,
    decoupled: bool = True,
) -> list[str]:
    """The names of the rules of a Muon: with a second moment or without, and what becomes of weight decay."""
    names = ["momentum", "measure"] if moment2 is None else ["momentum", moment2, "measure"]
    if hyperball:
        return [*names, "hyperball"]
    return [
        *names,
        "cautious_decay" if cautious else "decay" if decoupled else "coupled_decay",
        "descent",
    ]
