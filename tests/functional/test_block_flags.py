"""The real command line with the flags that say what a block is, which matrices are Muon's, and
with adaptive Muon.
"""

import math

import pytest

from megatron_muon.tools.train.records import read_events
from tests.support import cli

ADAPTIVE = (
    *cli.words("--optimizer adaptive_muon --use-megatron-fsdp"),
    *cli.words("--muon-extra-scale-factor 0.02"),
)
SHARDED = ("--data-parallel-sharding-strategy", "optim_grads_params")
SWIGLU = cli.words("--swiglu --normalization RMSNorm --disable-bias-linear")
SIX_STEPS = ("--global-batch-size", "4", "--train-iters", "6")


def assert_trains(run: cli.Run, steps: int) -> None:
    assert [iteration.number for iteration in run.iterations] == list(range(1, steps + 1))
    assert all(
        math.isfinite(iteration.loss) and iteration.skipped == 0 for iteration in run.iterations
    )
    assert run.losses[-1] < run.losses[0] - 0.2


def listed(run: cli.Run) -> dict[str, str]:
    """The optimizer of every parameter, from --muon-log-params."""
    lines = (line for line in run.output.splitlines() if " decoder.layers." in line)
    rows = [line.split() for line in lines if not line.startswith("megatron-muon: ")]
    return {next(word for word in row if word.startswith("decoder.")): row[0] for row in rows}


def test_every_flag_that_says_what_a_block_is(tmp_path, corpus):
    flags = cli.words(
        "--num-experts 2 --moe-router-topk 2 --muon-log-params --muon-split-gated-mlp"
        " --muon-split-heads --muon-exclude router layers.1.*linear_proj"
    )
    line = (
        *cli.TINY,
        *corpus,
        *SIX_STEPS,
        *cli.MUON,
        *SHARDED,
        *SWIGLU,
        *flags,
    )
    run = cli.torchrun(tmp_path, *line).checked()
    assert_trains(run, 6)
    optimizers = listed(run)
    for layer in range(3):
        prefix = f"decoder.layers.{layer}"
        assert optimizers[f"{prefix}.mlp.router.weight"] == "adam"
        assert optimizers[f"{prefix}.self_attention.linear_proj.weight"] == (
            "adam" if layer == 1 else "muon"
        )
        assert optimizers[f"{prefix}.mlp.experts.local_experts.1.linear_fc1.weight"] == "muon"


@pytest.mark.wide
@pytest.mark.parametrize("method", ["adamuon", "normuon"])
def test_a_continued_run_of_adaptive_muon_is_the_uninterrupted_one(tmp_path, corpus, method):
    """A second moment that is lost, or stays on its old owner, is off from the first step on."""
    args = (*cli.TINY, *corpus, *ADAPTIVE, *SHARDED, *SWIGLU, *SIX_STEPS)
    args += cli.words(f"--adaptive-muon-moment2-method {method} --tensorboard-log-interval 1")
    there = ("--save", "checkpoints", "--save-interval", "3", "--tensorboard-dir", "whole")
    assert_trains(cli.torchrun(tmp_path, *args, *there).checked(), 6)
    again = ("--load", "checkpoints", "--ckpt-step", "3", "--tensorboard-dir", "continued")
    cli.torchrun(tmp_path, *args, *again).checked()
    expected, found = (
        {point.step: point.value for point in read_events(tmp_path / folder).points("lm loss")}
        for folder in ("whole", "continued")
    )
    assert found == {step: expected[step] for step in (4, 5, 6)}
