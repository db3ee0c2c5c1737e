"""Which known flag, key or command a user may have meant: difflib's nearest, and other systems' names of Megatron's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_OTHER_NAMES = {
    "bf16": ("use-bf16",),
    "clip-grad": ("grad-clip",),
    "data-parallel-sharding-strategy": ("sharding-strategy",),
    "eval-iters": ("eval-steps",),
    "expert-model-parallel-size": ("expert-parallel-size",),
    "ffn-hidden-size": ("intermediate-size",),
    "hidden-size": ("d-model", "hidden-dim"),
    "lr": ("learning-rate",),
    "min-lr": ("min-learning-rate",),
    "muon-lr": ("muon-learning-rate",),
    "muon-num-ns-steps": ("muon-ns-steps", "ns-steps"),
    "num-attention-heads": ("heads", "num-heads"),
    "num-layers": ("layers", "n-layers"),
    "num-query-groups": ("num-key-value-heads", "num-kv-heads"),
    "save-interval": ("save-every", "save-steps"),
    "seed": ("random-seed",),
    "seq-length": ("context-length", "max-seq-len", "max-seq-length"),
    "tensor-model-parallel-size": ("tensor-parallel-size",),
    "train-iters": ("max-steps", "num-iters", "num-steps", "steps"),
    "weight-decay": ("wd",),
}
SYNONYMS = {theirs: megatrons for megatrons, names in _OTHER_NAMES.items() for theirs in names}
"""Other systems' names of Megatron's flags."""

_CUTOFF = 0.75
"""difflib's ratio from which names are alike; lower ones suggest flags that have nothing to do with what was typed."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The end of an error message that names the nearest of `known`; empty where none is near."""
    near = nearest(wrong, known)
    return f"; did you mean {near}?" if near is not None else ""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `wrong`; None where none is.

    Dashes, underscores and case of the flag, key or command do not count.
    """
    names = {plain(name): name for name in reversed(list(known))}
    typed = plain(wrong)
    spelling = SYNONYMS.get(typed, typed)
    near = [spelling] if spelling in names else difflib.get_close_matches(typed, names, n=1, cutoff=_CUTOFF)
    return names[near[0]] if near else None


def plain(name: str) -> str:
    """A name as all of its spellings: lower case, inner dashes."""
    return name.lstrip("-").replace("_", "-").lower()
