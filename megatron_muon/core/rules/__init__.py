"""The rules of Muon's variants; a new one is a module here and a line of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_muon.core.rules.cautious import CautiousDecay
from megatron_muon.core.rules.held import Held
from megatron_muon.core.rules.hyperball import Hyperball
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.rules.second_moments import AdaMuon, NorMuon

RULES: dict[str, type[Rule]] = {
    "adamuon": AdaMuon,
    "normuon": NorMuon,
    "cautious": CautiousDecay,
    "hyperball": Hyperball,
}
"""In the order in which a step runs them."""


def make_rules(
    chosen: Sequence[str],
    held: Held,
    options: Mapping[str, Any],
) -> list[Rule]:
    """The rules with these names, in the order of a step."""
    return [kind(held, options) for name, kind in RULES.items() if name in chosen]
