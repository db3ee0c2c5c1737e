"""One rule for the numbers of a run: every flag refuses what it cannot be, wherever it is given."""

import argparse
import math
from fractions import Fraction

import pytest

from benchmarks.command import buffer_mb
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.muon_config import MuonOptimizerConfig, check_supported
from megatron_muon.ranges import RANGES, check_number, check_numbers
from tests.support.cli import words

RUN = words(
    "--optimizer muon --use-megatron-fsdp --transformer-impl local --mock-data --lr 0.02"
    " --data-parallel-sharding-strategy optim"
)


def check(parser, *argv: str) -> None:
    args = arguments.parse(parser, [*RUN, *argv])
    arguments.check_settings(args, device="cpu")


OUTSIDE = [
    ("lr", "-1"),
    ("muon_lr", "-1"),
    ("weight_decay", "-0.1"),
    ("muon_momentum", "1"),
    ("muon_extra_scale_factor", "0"),
    ("muon_num_ns_steps", "0"),
    ("muon_metrics_interval", "-1"),
    ("muon_exchange_buffer_mb", "0"),
    ("muon_offload_buffer_mb", "0"),
    ("muon_offload_fraction", "1.1"),
    ("adaptive_muon_beta2", "1"),
    ("adaptive_muon_eps", "0"),
    ("seed", "0"),
]
FLOATS = [name for name, possible in RANGES.items() if not possible.whole]


@pytest.mark.parametrize(
    ("name", "value"), OUTSIDE + [(name, bad) for name in FLOATS for bad in ("nan", "inf")]
)
def test_impossible_numbers_are_refused_as_flags_and_in_configs(parser, name, value):
    """`--muon-lr -1` trained uphill, `--muon-lr nan` made every weight NaN."""
    flag = "--" + name.replace("_", "-")
    wrong = "out of range" if math.isfinite(float(value)) else "not finite"
    message = rf"^{flag} {float(value):g} is {wrong}; choose .*"
    with pytest.raises(UserError, match=message):
        check(parser, f"{flag}={value}")
    # else a field of the model's config: test_refusals
    if name in MuonOptimizerConfig.__dataclass_fields__:
        with pytest.raises(UserError, match=message):
            check_supported(MuonOptimizerConfig(**{name: float(value)}), [])


def test_every_number_of_this_package_has_a_range(parser):
    """A new flag has to say what it may be."""
    mine = next(
        group for group in parser._action_groups if group.title == "muon under megatron-fsdp"
    )
    assert {
        action.dest for action in mine._group_actions if action.type in (int, float)
    } <= RANGES.keys()
    fields = MuonOptimizerConfig.__dataclass_fields__
    numeric = {
        name
        for name, field in fields.items()
        if name.startswith("muon_") and "float" in str(field.type)
    }
    assert len(numeric) >= 7
    assert numeric <= RANGES.keys()


def test_defaults_are_in_their_ranges(parser):
    check(parser)
    check_numbers(MuonOptimizerConfig(lr=0.02))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--muon-lr 0.01 --muon-min-lr 0.1",
            r"--muon-min-lr 0\.1 is above --muon-lr 0\.01; .* of at most 0",
        ),
        (
            "--muon-min-lr 0.1",
            r"--muon-min-lr 0\.1 is above --lr 0\.02; choose --muon-min-lr of at most 0\.02",
        ),
        (
            "--muon-lr 1e-3 --min-lr 0.01",
            r"--min-lr 0\.01 is above --muon-lr 0\.001; choose --muon-min-lr",
        ),
        ("--min-lr 0.1", r"--min-lr 0\.1 is above --lr 0\.02; choose --min-lr of at most 0\.02"),
    ],
)
def test_the_lowest_rate_is_at_most_the_peak(parser, argv, message):
    with pytest.raises(UserError, match=message):
        check(parser, *argv.split())
    check(parser, "--muon-lr", "0.01", "--muon-min-lr", "0.01", "--min-lr", "0.02")


@pytest.mark.parametrize("text", ["nan", "inf", "0"])
def test_the_buffers_of_bench_keep_to_it(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"{text} is out of range; choose at least 0.001"
    ):
        buffer_mb(text)


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("0.1", "number"),
        (None, "number"),
        (True, "number"),
        (10**400, "finite"),
        (Fraction(-(10**400), 3), "finite"),
    ],
    ids=["text", "nothing", "bool", "large", "fraction"],
)
def test_what_is_no_number_and_what_no_float_holds_is_refused(value, wrong):
    """With 400 digits it was an OverflowError."""
    pattern = rf"^muon_num_ns_steps .* is not (a )?{wrong}; choose a whole number, at least 1"
    with pytest.raises(UserError, match=pattern):
        check_number("muon_num_ns_steps", value)
