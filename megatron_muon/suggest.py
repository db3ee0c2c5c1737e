"""Which known flag, key or command a user may have meant: one rule for every "did you mean". Imports nothing heavy.

A name is like another when it is the same but for a slip of the fingers (`--num-layres`), or when it has the same
words, each perhaps misspelled or shortened, in any order and with one more or fewer (`--warmup-fraction` for
`--lr-warmup-fraction`). A wrong suggestion is worse than none, so letters in common are not enough, and where two names
are equally near there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SYNONYMS = {
    "context-length": "seq-length",
    "d-model": "hidden-size",
    "expert-parallel-size": "expert-model-parallel-size",
    "hidden-dim": "hidden-size",
    "heads": "num-attention-heads",
    "intermediate-size": "ffn-hidden-size",
    "layers": "num-layers",
    "max-seq-len": "seq-length",
    "max-seq-length": "seq-length",
    "max-steps": "train-iters",
    "n-layers": "num-layers",
    "num-heads": "num-attention-heads",
    "num-iters": "train-iters",
    "num-key-value-heads": "num-query-groups",
    "num-kv-heads": "num-query-groups",
    "num-steps": "train-iters",
    "random-seed": "seed",
    "sharding-strategy": "data-parallel-sharding-strategy",
    "steps": "train-iters",
    "tensor-parallel-size": "tensor-model-parallel-size",
    "wd": "weight-decay",
}
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

    Args:
        wrong: a flag, key or command as typed; dashes, underscores and case do not count.
        known: those that exist.
    """
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(plain(name), name)
    typed = plain(wrong)
    spellings = [typed, SYNONYMS.get(typed, typed), _translated(typed)]
    for spelling in spellings:
        if spelling in names:
            return names[spelling]
    costs: dict[str, int] = {}
    for spelled, name in names.items():
        if found := [cost for spelling in spellings if (cost := _cost(spelling, spelled)) is not None]:
            costs[name] = min(found)
    least = [name for name, cost in costs.items() if cost == min(costs.values())]
    return least[0] if len(least) == 1 else None


def plain(name: str) -> str:
    """A name as all of its spellings: lower case, inner dashes."""
    return name.lstrip("-").replace("_", "-").lower()


def _translated(typed: str) -> str:
    for words, other in _WORDS.items():
        typed = re.sub(rf"(?<![^-]){words}(?![^-])", other, typed)
    return typed


def _cost(typed: str, known: str) -> int | None:
    """How far two names are apart: slips before missing words before extra ones; None where they are not alike."""
    words, others = ([word for word in name.split("-") if word not in _FILLERS] for name in (typed, known))
    if _NEGATIONS & set(words) != _NEGATIONS & set(others):
        return None
    slips = _slips("".join(words), "".join(others))
    if slips is not None:
        return slips
    few, many = sorted((words, others), key=len)
    more = len(many) - len(few)
    if more > 1 or (more and len(few) < 2):
        return None
    left = list(many)
    inexact = 0
    for word in few:
        best = min(((cost, other) for other in left if (cost := _word_cost(word, other)) is not None), default=None)
        if best is None:
            return None
        inexact += best[0]
        left.remove(best[1])
    return (10 if not more else 20 if many is others else 30) + inexact


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
    distance = _distance(typed, known)
    return distance if distance <= (1 if length < 8 else 2) else None


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
