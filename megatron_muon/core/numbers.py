"""What the numbers among the settings may be: one rule for flags, experiment files, configs of scripts, constructors.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from megatron_muon.core.errors import UserError


@dataclass(frozen=True)
class Range:
    """Numbers that a setting may have, from `low` to less than `high`; never NaN or infinite."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False  # `low` itself is too low
    closed: bool = False  # `high` itself is possible
    whole: bool = False
    hint: str = ""  # what else to say of a number outside

    def holds(self, value: float) -> bool:
        """Whether `value` is one of them."""
        low = value > self.low if self.above else value >= self.low
        high = value <= self.high if self.closed else value < self.high
        return low and high and not (self.whole and value != int(value))

    def __str__(self) -> str:
        kind = "a whole number, " if self.whole else ""
        low = f"{kind}{'more than' if self.above else 'at least'} {self.low:g}"
        high = f" and {'at most' if self.closed else 'less than'} {self.high:g}" if self.high < math.inf else ""
        return low + high + (f" ({self.hint})" if self.hint else "")


_RATE = Range()
_SHARE = Range(high=1.0)
_BUFFER = Range(low=0.001)
_COUNT = Range(low=1, whole=True)
RANGES = {
    "lr": _RATE,
    "min_lr": _RATE,
    "muon_lr": _RATE,
    "muon_min_lr": _RATE,
    "weight_decay": Range(),
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_eps": Range(),
    "lion_beta1": _SHARE,
    "lion_beta2": _SHARE,
    "muon_momentum": _SHARE,
    "muon_num_ns_steps": Range(low=1, whole=True, hint="5 is usual"),
    "muon_extra_scale_factor": Range(above=True, hint="0.2 gives updates of AdamW's size"),
    "adaptive_muon_beta2": _SHARE,
    "adaptive_muon_eps": Range(above=True, hint="1e-8 is usual"),
    "muon_exchange_buffer_mb": _BUFFER,
    "muon_offload_buffer_mb": _BUFFER,
    "muon_offload_fraction": Range(high=1.0, above=True, closed=True),
    "qk_clip_alpha": Range(high=1.0, above=True, hint="0.5 scales queries and keys alike"),
    "qk_clip_threshold": Range(above=True, hint="100 is usual"),
    "muon_metrics_interval": Range(whole=True, hint="0 measures nothing"),
    "eval_interval": Range(low=1, whole=True, hint="--eval-iters 0 leaves validation out"),
    "log_interval": _COUNT,
    "seed": _COUNT,
    "seq_length": _COUNT,
    "num_layers": _COUNT,
    "hidden_size": _COUNT,
    "num_attention_heads": _COUNT,
}
"""The ranges, by the names that the settings have in parsed flags and in MuonOptimizerConfig."""

_INFINITE = ("grad_norm_skip_threshold",)
"""Fields of megatron-core's OptimizerConfig that are infinite unless they are set."""


def check_number(name: str, value: Any, *, flag: str | None = None) -> None:
    """Check one setting, a name of `RANGES`; `flag` is what the user typed for it, where that is another flag.

    Raises:
        UserError: a value out of its range, or none that is a number.
    """
    flag = flag or flag_of(name)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{flag} {value!r} is not a number; choose {RANGES[name]}")
    _require_finite(flag, value, str(RANGES[name]))
    if not RANGES[name].holds(float(value)):
        raise UserError(f"{flag} {value:g} is out of range; choose {RANGES[name]}")


def check_numbers(values: Any) -> None:
    """Check all numbers of parsed flags or of a config: ranges, nothing NaN or infinite, no lowest rate above its peak.

    Raises:
        UserError: names the value and the remedy.
    """
    given = vars(values)
    for name in RANGES.keys() & given.keys():
        if given[name] is not None:
            check_number(name, given[name])
    for name, value in given.items():
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(number, (int, float)) and name not in _INFINITE:
                _require_finite(flag_of(name), number, "a finite number")
    for lowest, peak in (("min_lr", "lr"), ("muon_min_lr", "muon_lr")):
        low, high = (_first_given(given, name) for name in (lowest, peak))
        if low and high and low[1] > high[1]:
            raise UserError(
                f"{flag_of(low[0])} {low[1]:g} is above {flag_of(high[0])} {high[1]:g}; choose {flag_of(lowest)} of "
                f"at most {high[1]:g}"
            )


def _first_given(given: dict[str, Any], name: str) -> tuple[str, float] | None:
    """A rate's name and value; of a rate of Muon's that is not given, those of the rate that it takes."""
    names = (name, name.removeprefix("muon_"))
    return next(((each, given[each]) for each in names if given.get(each) is not None), None)


def _require_finite(flag: str, value: Any, possible: str) -> None:
    try:
        if not math.isfinite(value):
            raise UserError(f"{flag} {value:g} is not finite; choose {possible}")
    except OverflowError:  # a whole number of more than 308 digits
        raise UserError(f"{flag} {Decimal(int(value)):.1e} is too large; choose {possible}") from None


def flag_of(name: str) -> str:
    """How the setting of this name is typed."""
    return "--" + name.replace("_", "-")


def is_number(text: str) -> bool:
    """Whether float() reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return True
