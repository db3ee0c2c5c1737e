"""A run resumed within its warm-up or its decay is the uninterrupted one: losses, and every group's
learning rate.

With learning rates of Muon's own beside Adam's, wherever state is kept, with and without
--override-opt-param-scheduler.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.functional.test_checkpoints import FULL, SWIGLU, differences, saved, warnings
from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings

STEPS, WARMUP = 8, 4
ADAM_RATES, MUON_RATES = (0.004, 0.0004), (0.02, 0.005)
SCHEDULE = cli.words(
    "--lr 0.004 --min-lr 0.0004 --muon-lr 0.02 --muon-min-lr 0.005 --lr-decay-style cosine"
    f" --lr-warmup-iters {WARMUP}"
)
OFFLOADS = {
    "on the device": (),
    "all on the host": ("--muon-offload", "cpu", "--muon-offload-state", "all"),
}
OVERRIDE = "--override-opt-param-scheduler"


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    """Eight steps of twelve sequences, of which every one is saved."""
    steps = ("--train-iters", str(STEPS), "--save-interval", "1")
    return Trainings(
        ranks,
        tmp_path,
        (
            *cli.TINY,
            *corpus,
            *FULL,
            *SWIGLU,
            *steps,
            *SCHEDULE,
        ),
        batch=12,
    )


def rate(step: int, highest: float, lowest: float) -> float:
    """The learning rate after so many steps: a linear warm-up, then half a cosine."""
    if step <= WARMUP:
        return highest * step / WARMUP
    turn = math.pi * (step - WARMUP) / (STEPS - WARMUP)
    return lowest + 0.5 * (1.0 + math.cos(turn)) * (highest - lowest)


def group_rates(training: Trainings, name: str, step: int) -> dict[str, set[float]]:
    """The rates of Adam's and of Muon's parameters in a checkpoint."""
    entries = saved(training, name, step)
    momentum = {
        entry.split(".state.")[1].rpartition(".")[0]
        for entry in entries
        if entry.endswith("momentum_buffer")
    }
    found: dict[str, set[float]] = {"adam": set(), "muon": set()}
    for entry, value in entries.items():
        if entry.endswith(".lr"):
            parameter = entry.removeprefix("optimizer.param_to_group_meta.").removesuffix(".lr")
            halves = {parameter, f"{parameter}_w"}
            found["muon" if halves & momentum else "adam"].add(float(value))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_run_resumed_within_its_schedule_is_the_uninterrupted_one(
    training: Trainings, offload: str
) -> None:
    flags = OFFLOADS[offload]
    whole = training(*flags, "--save", "whole").checked()
    for step in range(1, STEPS + 1):
        rates = group_rates(training, "whole", step)
        assert list(rates["adam"]) == pytest.approx([rate(step, *ADAM_RATES)]), step
        assert list(rates["muon"]) == pytest.approx([rate(step, *MUON_RATES)]), step
    for done, more in ((2, ()), (6, (OVERRIDE,))):  # within the warm-up, within the decay
        name = f"from {done}"
        again = ("--load", "whole", "--ckpt-step", str(done), "--save", name)
        run = training(*flags, *again, *more).checked()
        assert warnings(run) == []
        first, second, *rest = whole.losses[done:]
        # The second line of a start averages over its first step too.
        assert run.losses == [
            first,
            pytest.approx(
                (first + second) / 2,
                abs=2e-6,
            ),
            *rest,
        ], name
        for step in range(done + 1, STEPS + 1):
            different = differences(saved(training, name, step), saved(training, "whole", step))
            assert different == [], (name, step)
