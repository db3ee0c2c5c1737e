"""Suggestions for misspelled flags: over all flags of pretrain_gpt.py, none where none is near."""

import pytest

from megatron_muon.cli import COMMANDS
from megatron_muon.megatron.flags.arguments import build_parser
from megatron_muon.megatron.flags.suggest import did_you_mean, nearest


@pytest.fixture(scope="module")
def flags():
    return list(build_parser()._option_string_actions)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        # a slip of the fingers
        ("--hidden-sise", "--hidden-size"),
        ("--num-layres", "--num-layers"),
        ("--bf61", "--bf16"),
        ("--Weight_Decay", "--weight-decay"),
        # the words in another form or order, or one missing
        ("--num-lay", "--num-layers"),
        ("--sequence-length", "--seq-length"),
        ("--warmup-fraction", "--lr-warmup-fraction"),
    ],
)
def test_the_flag_that_was_meant(flags, typed, meant):
    assert nearest(typed, flags) == meant


@pytest.mark.parametrize(
    "typed",
    [
        "--foo", "--batch", "--gpus", "--num-gpus", "--epochs", "--lr-schedule", "--scheduler", "--log",
        "--fp32", "--resume", "--precision", "--nproc", "--save-path",
    ],
)  # fmt: skip
def test_no_suggestion_is_better_than_a_wrong_one(flags, typed):
    assert nearest(typed, flags) is None
    assert did_you_mean(typed, flags) == ""


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("trian", "train"), ("sumary", "summary"), ("sweeps", "sweep"), ("rehearsal", "rehearse"), ("deploy", None)],
)
def test_commands(typed, meant):
    assert nearest(typed, COMMANDS) == meant
