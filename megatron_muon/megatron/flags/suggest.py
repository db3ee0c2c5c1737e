"""Which known flag, key or command a user may have meant: one rule for every "did you mean". Imports nothing heavy.

A name is like another when it is the same but for a slip of the fingers (`--num-layres`), or when it has the same
words, each perhaps misspelled or shortened, in any order and with one more or fewer (`--warmup-fraction` for
`--lr-warmup-fraction`). A wrong suggestion is worse than none, so letters in common are not enough, and where two names
are equally near there is none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_OTHER_NAMES = {
    "data-parallel-sharding-strategy": ("sharding-strategy",),
    "expert-model-parallel-size": ("expert-parallel-size",),
    "ffn-hidden-size": ("intermediate-size",),
    "hidden-size": ("d-model", "hidden-dim"),
    "muon-num-ns-steps": ("muon-ns-steps", "ns-steps"),
    "num-attention-heads": ("heads", "num-heads"),
    "num-layers": ("layers", "n-layers"),
    "num-query-groups": ("num-key-value-heads", "num-kv-heads"),
    "seed": ("random-seed",),
    "seq-length": ("context-length", "max-seq-len", "max-seq-length"),
    "tensor-model-parallel-size": ("tensor-parallel-size",),
    "train-iters": ("max-steps", "num-iters", "num-steps", "steps"),
    "weight-decay": ("wd",),
}
SYNONYMS = {theirs: megatrons for megatrons, names in _OTHER_NAMES.items() for theirs in names}
"""Other systems' names of Megatron's flags."""

_WORDS = {"learning-rate": "lr", "iterations": "iters", "steps": "iters", "every": "interval"}
"""Other systems' words within a flag: `--min-learning-rate` is `--min-lr`."""

_FILLERS = {"use", "enable"}
_NEGATIONS = {"no", "disable", "not"}
_SHORTEST = 3
"""Letters that a shortened word must keep."""

_SAME_START_UP_TO = 5
"""Names up to this length are taken for each other only if they begin alike: --heads is not --seeds."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The end of an error message that names the nearest of `known`; empty where none is near."""
    near = nearest(wrong, known)
    return f"; did you mean {near}?" if near is not None else ""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `wrong`; None where none is, or two are equally.

    Dashes, underscores and case of the flag, key or command do not count.
    """
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(plain(name), name)
    typed = translated = plain(wrong)
    for words, other in _WORDS.items():
        translated = re.sub(rf"(?<![^-]){words}(?![^-])", other, translated)
    spellings = tuple(dict.fromkeys((typed, SYNONYMS.get(typed, typed), translated)))
    for spelling in spellings:
        if spelling in names:
            return names[spelling]
    costs: dict[int, set[str]] = {}
    for spelling, known_name in itertools.product(spellings, names):
        if (cost := _cost(spelling, known_name)) is not None:
            costs.setdefault(cost, set()).add(names[known_name])
    least = costs[min(costs)] if costs else set()
    return least.pop() if len(least) == 1 else None


def plain(name: str) -> str:
    """A name as all of its spellings: lower case, inner dashes."""
    return name.lstrip("-").replace("_", "-").lower()


def _cost(typed: str, known: str) -> int | None:
    """How far two names are apart: slips before missing words before extra ones; None where they are not alike."""
    words, others = ([word for word in name.split("-") if word not in _FILLERS] for name in (typed, known))
    if _NEGATIONS & set(words) != _NEGATIONS & set(others):
        return None
    if (slips := _slips("".join(words), "".join(others))) is not None:
        return slips
    few, many = sorted((words, others), key=len)
    more = len(many) - len(few)
    if more > 1 or (more and len(few) < 2):
        return None
    left = list(many)
    cost = 10 if not more else 20 if many is others else 30
    for word in few:
        near = [(inexact, other) for other in left if (inexact := _word_cost(word, other)) is not None]
        if not near:
            return None
        inexact, other = min(near)
        cost += inexact
        left.remove(other)
    return cost


def _word_cost(word: str, other: str) -> int | None:
    """0 for the same word, 1 for a shortened one, 2 for a misspelled one."""
    if word == other:
        return 0
    if min(len(word), len(other)) >= _SHORTEST and (word.startswith(other) or other.startswith(word)):
        return 1
    return 2 if _slips(word, other) is not None else None


def _slips(typed: str, known: str) -> int | None:
    """Letters left out, added, changed or swapped; None where there are too many for a slip, or digits differ."""
    if sorted(filter(str.isdigit, typed)) != sorted(filter(str.isdigit, known)):
        return None  # fp8 is not fp4
    length = min(len(typed), len(known))
    if length < 2 or (length <= _SAME_START_UP_TO and typed[0] not in known[:2]):
        return None
    most = 1 if length < 8 else 2
    if abs(len(typed) - len(known)) > most:
        return None
    distance = _distance(typed, known)
    return distance if distance <= most else None


def _distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Edit distance in which two swapped neighbours count as one edit (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(second, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]
