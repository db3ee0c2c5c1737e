"""QK-clip keeps logits under its threshold; the table of parity shows that clipped rows are those
of the reference.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_muon.tools.train.records import read_events
from tests.support import cli
from tests.support.case import Case, batches
from tests.support.cases import CLIP
from tests.support.model import Trainer
from tests.support.parity import Curve, curves, step_with_logits
from tests.support.pool import Pool
from tests.support.training import Trainings

THRESHOLD = CLIP["qk_clip_threshold"]
STILL = {"lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0}
ONE_LAYER = Case(layers=1, optimizer=STILL, attention=CLIP)
WHOLE_AGAIN = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SAME_BATCH = {
    "no_shard": ONE_LAYER.but(strategy="no_shard"),
    "optim": ONE_LAYER.but(strategy="optim", overlap=True),
    "layers again": ONE_LAYER.but(layers=2, attention=CLIP | WHOLE_AGAIN),
    "bf16": ONE_LAYER.but(bf16=True),
}


@pytest.mark.wide
def test_the_same_logits_come_to_the_threshold(ranks: Pool) -> None:
    """With weights that only clipping changes, two steps on the same tokens: the second one's
    logits are clipped.
    """
    found: dict[str, Curve] = ranks(
        2, curves, cases=SAME_BATCH, steps=3, micro_batches=2, same=True
    )[0]
    for label, (first, second, third) in found.items():
        assert first.logit > 1.25 * THRESHOLD, label
        # a logit of one has an error of 2 ** -8, and so has each of the weights
        if label == "bf16":
            assert second.logit == pytest.approx(THRESHOLD, rel=0.02)
        elif label in ("no_shard", "optim"):
            assert [second.logit, third.logit] == pytest.approx(
                [THRESHOLD] * 2,
                rel=1e-5,
            ), label
        else:  # the second layer sees what the first one's attention has become
            assert THRESHOLD * (1 - 1e-5) <= second.logit <= 1.1 * THRESHOLD, label


LIMIT = 20.0


def test_logits_that_explode_stay_under_the_threshold(ranks: Pool) -> None:
    """A learning rate twenty times as high as in other tests: logits grow past five times the
    threshold without a clip.

    A clip undoes what a step has found, then the update of that step adds to it: here up to two
    thirds of the threshold, because an update is that large beside a clipped weight. So logits stay
    under twice the threshold.
    """
    case = Case(layers=1, optimizer={"lr": 0.2, "min_lr": 0.2, "weight_decay": 0.0})
    cases = {
        "logged": case.but(attention={"log_max_attention_logit": True}),
        "clipped": case.but(attention={"qk_clip": True, "qk_clip_threshold": LIMIT}),
    }
    found = ranks(2, curves, cases=cases, steps=24, micro_batches=2)[0]
    without, clipped = ([step.logit for step in found[label]] for label in cases)
    first = next(step for step, logit in enumerate(without) if logit > LIMIT)
    assert clipped[: first + 1] == without[: first + 1], (
        "below the threshold clipping changes no bit"
    )
    assert max(without) > 5 * LIMIT
    assert max(clipped) < 2 * LIMIT


def skipped_step(rank: int, world_size: int) -> None:
    """In a worker: a step with an infinite gradient, the next one, logits that no step took, and a
    step without any.
    """
    case = Case(layers=1, attention=CLIP)
    trainer = Trainer(case)
    before = trainer.bits()
    assert not step_with_logits(trainer, scale=float("inf"))[0]
    assert all(torch.equal(value, before[name]) for name, value in trainer.bits().items())
    step_with_logits(trainer)
    assert float(trainer.optimizer.qk_clip.largest) > THRESHOLD
    core = next(
        module.core_attention
        for module in trainer.model.modules()
        if hasattr(module, "core_attention")
    )
    core.current_max_attn_logits = torch.full((case.heads,), 1e6, device="cuda")  # of an evaluation
    trainer.train(batches(1)[0][:4])
    assert float(trainer.optimizer.qk_clip.largest) < 1e3
    with pytest.raises(RuntimeError, match="--qk-clip: a layer's attention kept no logits"):
        trainer.step()


@pytest.mark.usefixtures("two_memories_too")
def test_a_skipped_step_clips_nothing(ranks: Pool) -> None:
    ranks(2, skipped_step)


@pytest.mark.usefixtures("two_memories_too")
def test_a_run_logs_the_largest_logit(ranks: Pool, tmp_path: Path) -> None:
    """By the command line, with local attention, where 0.19 asks for Transformer Engine;
    TensorBoard has every step.
    """
    flags = (*cli.TINY, *cli.make_corpus(tmp_path), *cli.MUON, "--train-iters", "4")
    log = "--log-max-attention-logit --tensorboard-log-interval 1 --tensorboard-dir events"
    clip = "--qk-clip --qk-clip-threshold 0.05"
    Trainings(
        ranks,
        tmp_path,
        flags,
        batch=4,
    )(*cli.words(f"{log} {clip}")).checked()
    points = read_events(tmp_path / "events").points("max_attention_logit")
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert all(0.05 < point.value < 1.0 for point in points)
