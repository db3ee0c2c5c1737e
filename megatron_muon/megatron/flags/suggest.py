"""Which known flag, key or command a user may have meant: difflib's nearest, and other systems' names of Megatron's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SYNONYMS = {
    "use-bf16": "bf16",
    "grad-clip": "clip-grad",
    "sharding-strategy": "data-parallel-sharding-strategy",
    "eval-steps": "eval-iters",
    "expert-parallel-size": "expert-model-parallel-size",
    "intermediate-size": "ffn-hidden-size",
    **dict.fromkeys(("d-model", "hidden-dim"), "hidden-size"),
    "learning-rate": "lr",
    "min-learning-rate": "min-lr",
    "muon-learning-rate": "muon-lr",
    **dict.fromkeys(("muon-ns-steps", "ns-steps"), "muon-num-ns-steps"),
    **dict.fromkeys(("heads", "num-heads"), "num-attention-heads"),
    **dict.fromkeys(("layers", "n-layers"), "num-layers"),
    **dict.fromkeys(("num-key-value-heads", "num-kv-heads"), "num-query-groups"),
    **dict.fromkeys(("save-every", "save-steps"), "save-interval"),
    "random-seed": "seed",
    **dict.fromkeys(("context-length", "max-seq-len", "max-seq-length"), "seq-length"),
    "tensor-parallel-size": "tensor-model-parallel-size",
    **dict.fromkeys(("max-steps", "num-iters", "num-steps", "steps"), "train-iters"),
    "wd": "weight-decay",
}
"""Other systems' names of Megatron's flags."""

_CUTOFF = 0.75
"""difflib's ratio from which names are alike; lower ones suggest flags that have nothing to do with what was typed."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The end of an error message that names the nearest of `known`; empty where none is near."""
    near = nearest(wrong, known)
    return f"; did you mean {near}?" if near is not None else ""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `wrong`, whatever dashes, underscores and case; None where none is."""
    names = {plain(name): name for name in reversed(list(known))}
    typed = plain(wrong)
    spelling = SYNONYMS.get(typed, typed)
    near = [spelling] if spelling in names else difflib.get_close_matches(typed, names, n=1, cutoff=_CUTOFF)
    return names[near[0]] if near else None


def plain(name: str) -> str:
    """A name as all of its spellings: lower case, inner dashes."""
    return name.lstrip("-").replace("_", "-").lower()
