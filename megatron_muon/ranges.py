"""Ranges of numeric settings: one table for flags, experiment files, configs and constructors."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

from megatron_muon.errors import SettingError


class Range(NamedTuple):
    """Numbers allowed for a setting, from `low` to less than `high`; never NaN or infinite."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False  # `low` itself is too low
    closed: bool = False  # `high` itself is possible
    whole: bool = False
    hint: str = ""  # added to the error for a number outside

    def holds(self, value: float) -> bool:
        """True for a value in the range."""
        low = value > self.low if self.above else value >= self.low
        high = value <= self.high if self.closed else value < self.high
        return low and high and not (self.whole and value != int(value))

    def __str__(self) -> str:
        text = "a whole number, " if self.whole else ""
        text += f"{'more than' if self.above else 'at least'} {self.low:g}"
        if self.high < math.inf:
            text += f" and {'at most' if self.closed else 'less than'} {self.high:g}"
        return f"{text} ({self.hint})" if self.hint else text


_COUNT = Range(low=1, whole=True)
RANGES = {
    **dict.fromkeys(
        ("lr", "min_lr", "muon_lr", "muon_min_lr", "weight_decay", "adam_eps"), Range()
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2"), Range(high=1.0)),
    **dict.fromkeys(("muon_momentum", "adaptive_muon_beta2"), Range(high=1.0)),
    **dict.fromkeys(("muon_exchange_buffer_mb", "muon_offload_buffer_mb"), Range(low=0.001)),
    **dict.fromkeys(
        ("log_interval", "seed", "seq_length", "num_layers", "hidden_size", "num_attention_heads"),
        _COUNT,
    ),
    "muon_num_ns_steps": Range(low=1, whole=True, hint="5 is usual"),
    "muon_extra_scale_factor": Range(above=True, hint="0.2 gives updates of AdamW's size"),
    "adaptive_muon_eps": Range(above=True, hint="1e-8 is usual"),
    "muon_offload_fraction": Range(high=1.0, above=True, closed=True),
    "qk_clip_alpha": Range(high=1.0, above=True, hint="0.5 scales queries and keys alike"),
    "qk_clip_threshold": Range(above=True, hint="100 is usual"),
    "muon_metrics_interval": Range(whole=True, hint="0 measures nothing"),
    "muon_audit_interval": Range(whole=True, hint="0 audits nothing"),
    "eval_interval": Range(low=1, whole=True, hint="{eval_iters} 0 leaves validation out"),
}
"""The ranges, by the names that the settings have in parsed flags and in MuonOptimizerConfig."""


def number_of(value: Any) -> Any:
    """Convert a numpy scalar, or an array or tensor of one element, to a Python number.

    Returns any other value as it is. Waits for the device of a tensor.
    """
    shape = getattr(value, "shape", None)
    return value if shape is None or math.prod(shape) != 1 else value.item()


def check_number(name: str, value: Any, *, setting: str = "") -> None:
    """Raise a SettingError for a value outside the range of `name`, given as `setting` if named.

    Accepts any value that `number_of` reads.
    """
    setting = setting or name
    remedy = f"choose {RANGES[name]}"
    value = number_of(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SettingError(setting, repr(value), "is not a number", remedy)
    try:
        number = float(value)
    except OverflowError:  # more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise SettingError(setting, number, "is not finite", remedy)
    if not RANGES[name].holds(number):
        raise SettingError(setting, number, "is out of range", remedy)


def check_numbers(values: Any) -> None:
    """Check all numbers of parsed flags or of a config; no lowest rate may exceed its peak."""
    given = {name: number_of(value) for name, value in vars(values).items() if value is not None}
    for name, value in given.items():
        if name in RANGES:
            check_number(name, value)
    for lowest, peak in (("min_lr", "lr"), ("muon_min_lr", "muon_lr")):
        # Muon takes the common rate where its own is not given.
        low, high = (
            name if name in given else name.removeprefix("muon_") for name in (lowest, peak)
        )
        if given.get(low, 0.0) > given.get(high, math.inf):
            reason = f"is above {{{high}}} {given[high]:g}"
            remedy = f"choose {{{lowest}}} of at most {given[high]:g}"
            raise SettingError(low, float(given[low]), reason, remedy)


def is_number(text: str) -> bool:
    """True for text that float() reads."""
    try:
        float(text)
    except ValueError:
        return False
    return True
