"""QK-clip on shards equals QK-clip of whole weights, and keeps logits under its threshold.

Given gradients and given logits, weights after ten steps agree to 2e-6 with those of the independent reference, to
which a clip of its own is added here: row by row, from the definition. A rank sees other logits than the next one, and
only their maximum counts. Rows shrink by factors of at most one, so the tolerance is that of test_exact_updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.errors import UserError
from megatron_muon.tools.train.events import read_events
from tests.functional.test_exact_updates import Seen
from tests.functional.test_layouts import LAYOUTS, OUTER, SHARDED, TP, TRAINED
from tests.support import cli
from tests.support.case import LATENT, STRATEGIES, Case, batches, gradient_of, values_of
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.reference import Reference
from tests.support.training import Trainings
from tests.support.wide import wide_but

TEN = 10
THRESHOLD = 1.0
CLIP = {"qk_clip": True, "qk_clip_threshold": THRESHOLD, "qk_clip_alpha": 0.3}


def logits_of(layer: int, heads: int, step: int, rank: int) -> torch.Tensor:
    """The largest logits of a layer's heads as one data-parallel rank sees them: about half are over the threshold."""
    return THRESHOLD + 0.5 * values_of(f"{layer}", (heads,), salt=f"logits{step}/{rank}")


def step_with_logits(trainer: Trainer, *, scale: float = 1.0) -> Any:
    """A step with given gradients, before which the attention of every layer has kept logits as in a forward pass."""
    case, tensor_parallel = trainer.case, trainer.groups.tp
    here = case.heads // case.tensor
    mine = slice(tensor_parallel.rank() * here, (tensor_parallel.rank() + 1) * here)
    cores = [module.core_attention for module in trainer.model.modules() if hasattr(module, "core_attention")]

    def gradient(*what: Any) -> torch.Tensor:
        for layer, core in enumerate(cores):
            seen = logits_of(layer, case.heads, trainer.steps_done, trainer.groups.dp_cp.rank())
            core.current_max_attn_logits = seen[mine].cuda()
        return scale * gradient_of(*what)

    return trainer.step(gradient)


def run(rank: int, world_size: int, *, cases: dict[str, Case], steps: int = TEN) -> Any:
    """In a worker: every case, looked at after one step and after all; how many data-parallel ranks there were."""
    seen: dict[str, Any] = {}
    for label, case in cases.items():
        trainer = Trainer(case, steps=steps)
        found = Seen(trainer.shapes, steps, {})
        for step in range(1, steps + 1):
            assert step_with_logits(trainer)[0], "the step was skipped"
            if step in (1, steps):
                found.after[step] = (trainer.whole(), trainer.whole_state("momentum_buffer"))
        seen[label] = found, trainer.groups.dp_cp.size()
    return seen if rank == 0 else None


def rows_to_scale(case: Case, name: str, gamma: list[float]) -> Iterator[tuple[int, float]]:
    """Each row of a projection with its factor, by walking through the heads; `gamma` has one for each group."""
    alpha = case.attention["qk_clip_alpha"]
    unit: list[tuple[str, int]] = []
    if "linear_qkv." in name:
        width, in_group = case.hidden // case.heads, case.heads // case.query_groups
        unit = [("query", in_group * width), ("gate", in_group * width * case.output_gate)]
        unit += [("key", width), ("value", width)]
    elif "linear_q_up_proj" in name or "linear_q_proj" in name:
        unit = [("query", LATENT["qk_head_dim"]), ("rotary", LATENT["qk_pos_emb_head_dim"])]
    elif "linear_kv_up_proj" in name:
        unit = [("key", LATENT["qk_head_dim"]), ("value", LATENT["v_head_dim"])]
    row = 0
    for factor in gamma if unit else []:
        scales = {"query": factor**alpha, "key": factor ** (1.0 - alpha), "rotary": factor}
        for kind, rows in unit:
            for _ in range(rows):
                yield row, scales.get(kind, 1.0)
                row += 1


def clip(reference: Reference, ranks: int, *, step: int) -> int:
    """Clip the weights of a reference by logits that `ranks` ranks have seen; how many rows were scaled."""
    case, scaled = reference.case, 0
    for name, weight in reference.weights.items():
        if "self_attention" not in name:
            continue
        layer = int(name.split("layers.")[1].split(".")[0])
        largest = [
            max(seen)
            for seen in zip(*(logits_of(layer, case.heads, step, r).tolist() for r in range(ranks)), strict=True)
        ]
        groups = case.heads if case.latent else case.query_groups
        size = case.heads // groups
        of_groups = [max(largest[group * size : (group + 1) * size]) for group in range(groups)]
        gamma = [THRESHOLD / logit if logit > THRESHOLD else 1.0 for logit in of_groups]
        with torch.no_grad():
            for row, factor in rows_to_scale(case, name, gamma):
                weight[row] *= factor
                scaled += factor != 1.0
    return scaled


def check(seen: tuple[Seen, int], case: Case, *, atol: float = 2e-6) -> None:
    """Compare what a worker saw with the reference."""
    found, ranks = seen
    reference, scaled = Reference(case, found.shapes, steps=found.steps), 0
    for step in range(1, found.steps + 1):
        reference.step()
        scaled += clip(reference, ranks, step=step - 1)
        if step in found.after:
            weights, momentum = found.after[step]
            assert weights.keys() == reference.weights.keys()
            for what, mine, expected in (
                ("weight", weights, reference.whole()),
                ("momentum", momentum, reference.momentum()),
            ):
                for name in expected:
                    torch.testing.assert_close(
                        mine[name], expected[name], rtol=0.0, atol=atol, msg=lambda t, n=name, w=what: f"{w} {n}: {t}"
                    )
    assert scaled, "nothing to clip"


KINDS = {
    "grouped queries": Case(attention=CLIP),
    "one group": Case(query_groups=1, attention=CLIP),
    "no groups, odd heads": Case(hidden=35, heads=5, query_groups=5, attention=CLIP),
    "gated attention": Case(output_gate=True, attention=CLIP),
    "biases of QKV alone": Case(attention=CLIP | {"add_bias_linear": False, "add_qkv_bias": True}),
    "latent attention": Case(latent=True, attention=CLIP),
    "latent attention, query latent": Case(latent=True, query_latent=True, attention=CLIP),
    "projections with Adam": Case(optimizer={"muon_exclude": ["linear_qkv"]}, excluded=("linear_qkv",), attention=CLIP),
}
OFTEN = ["latent attention, query latent"]


@pytest.mark.parametrize(
    ("strategy", "world_size", "labels"),
    wide_but(
        [("optim_grads_params", 3, OFTEN)],
        [
            ("optim_grads_params", 3, OFTEN),
            *((*case, list(KINDS)) for case in itertools.product(STRATEGIES, (1, 2, 3, 4))),
        ],
    ),
)
def test_clipped_rows_equal_the_reference(ranks: Pool, strategy: str, world_size: int, labels: list[str]) -> None:
    cases = {label: KINDS[label].but(strategy=strategy) for label in labels}
    seen = ranks(world_size, run, cases=cases)[0]
    for label, case in cases.items():
        check(seen[label], case)
    with pytest.raises(AssertionError, match="linear_q"):  # the check can fail: another share for the queries
        check(seen[labels[0]], cases[labels[0]].but(attention=CLIP | {"qk_clip_alpha": 0.301}))


CLIPPED_LAYOUTS = LAYOUTS | {"tp2 dp2, latent": (4, TP.but(latent=True, query_latent=True))}


@pytest.mark.parametrize(
    ("name", "strategy"),
    wide_but(
        [],
        [
            (name, strategy)
            for name, (_, case) in CLIPPED_LAYOUTS.items()
            for strategy in (*SHARDED, *((OUTER,) if case.instances > 1 else ()))
        ],
    ),
)
def test_clipped_rows_equal_the_reference_on_every_layout(ranks: Pool, name: str, strategy: str) -> None:
    """Heads of a tensor-parallel rank may have their rows on others; of instances one has a layer's largest logit."""
    world_size, case = CLIPPED_LAYOUTS[name]
    case = case.but(attention=CLIP)
    given = case.but(outer="optim") if strategy == OUTER else case.but(strategy=strategy)
    check(ranks(world_size, run, cases={"": given})[0][""], case)


@pytest.mark.wide
def test_clipped_rows_equal_the_reference_where_a_gpus_memory_is_not_the_hosts(ranks: Pool) -> None:
    four = ("tp2 dp2, latent", "hsdp", "hsdp tp2", "ep2", "expert tp2")
    by_size = {
        2: KINDS | {strategy: Case(strategy=strategy, attention=CLIP) for strategy in STRATEGIES},
        4: {name: CLIPPED_LAYOUTS[name][1].but(attention=CLIP) for name in four},
    }
    for world_size, cases in by_size.items():
        with ranks.two_memories():
            seen = ranks(world_size, run, cases=cases, steps=2)[0]
        for label, case in cases.items():
            check(seen[label], case)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["tp2 dp2", "tp2, swiglu", "tp2 dp2, latent"])
def test_whole_parts_of_tensor_parallel_ranks_are_clipped_too(ranks: Pool, name: str) -> None:
    """Under no_shard Megatron-FSDP does not note where a tensor-parallel rank's part begins; Adam has the weights."""
    world_size, case = CLIPPED_LAYOUTS[name]
    scalar = {"muon_exclude": ["weight"], "muon_tp_mode": "blockwise"}
    case = case.but(strategy="no_shard", attention=CLIP, optimizer=scalar, excluded=("weight",))
    check(ranks(world_size, run, cases={"": case})[0][""], case)


def curve(rank: int, world_size: int, *, case: Case, steps: int, same: bool = False, micro_batches: int = 2) -> Any:
    """In a worker: loss and largest logit of each step, of `same` tokens or of others every time."""
    trainer, found = Trainer(case, steps=steps), []
    for tokens in batches(1) * steps if same else batches(steps):
        loss, _ = trainer.train(tokens, micro_batches=micro_batches)
        found.append((loss, float(trainer.optimizer.qk_clip.largest)))
    return found


STILL = {"lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0}


@pytest.mark.parametrize(
    "case",
    wide_but(
        [],
        [
            *(Case(layers=1, strategy=strategy, overlap=strategy == "optim") for strategy in STRATEGIES),
            Case(attention={"recompute_granularity": "selective"}),
            Case(attention={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
            Case(layers=1, bf16=True),
        ],
    ),
)
def test_the_same_logits_come_to_the_threshold(ranks: Pool, case: Case) -> None:
    """With weights that only clipping changes, two steps on the same tokens: the second one's logits are clipped."""
    clipped = case.but(optimizer=STILL, attention=CLIP | case.attention)
    (_, first), (_, second), (_, third) = ranks(2, curve, case=clipped, steps=3, same=True)[0]
    assert first > 1.25 * THRESHOLD
    if case.bf16:  # a logit of one has an error of 2 ** -8, and so has each of the weights
        assert second == pytest.approx(THRESHOLD, rel=0.02)
    elif case.layers == 1:
        assert second == pytest.approx(THRESHOLD, rel=1e-5)
        assert third == pytest.approx(THRESHOLD, rel=1e-5)
    else:  # the second layer sees what the first one's attention has become
        assert THRESHOLD * (1 - 1e-5) <= second <= 1.1 * THRESHOLD


EXPLODING = Case(layers=1, optimizer={"lr": 0.2, "min_lr": 0.2, "weight_decay": 0.0})
LIMIT = 20.0


def test_logits_that_explode_stay_under_the_threshold(ranks: Pool) -> None:
    """A learning rate twenty times as high as in other tests: logits grow past five times the threshold without a clip.

    A clip undoes what a step has found, then the update of that step adds to it: here up to two thirds of the
    threshold, because an update is that large beside a clipped weight. So logits stay under twice the threshold.
    """
    logged = EXPLODING.but(attention={"log_max_attention_logit": True})
    clipped = EXPLODING.but(attention={"qk_clip": True, "qk_clip_threshold": LIMIT})
    without, with_clip = ([logit for _, logit in ranks(2, curve, case=case, steps=24)[0]] for case in (logged, clipped))
    first = next(step for step, logit in enumerate(without) if logit > LIMIT)
    assert with_clip[: first + 1] == without[: first + 1], "below the threshold clipping changes no bit"
    assert max(without) > 5 * LIMIT
    assert max(with_clip) < 2 * LIMIT


@pytest.mark.usefixtures("two_memories_too")
def test_a_skipped_step_clips_nothing(ranks: Pool) -> None:
    for seen in ranks(2, skipped_step, case=Case(layers=1, attention=CLIP)):
        assert seen == ["skipped", "kept", "clipped", "forgotten", "no logits"]


def skipped_step(rank: int, world_size: int, *, case: Case) -> list[str]:
    """In a worker: what became of a step with an infinite gradient, of the next, and of logits that no step took."""
    trainer, found = Trainer(case), []
    before = trainer.bits()
    found += [] if step_with_logits(trainer, scale=float("inf"))[0] else ["skipped"]
    found += ["kept"] if all(torch.equal(value, before[name]) for name, value in trainer.bits().items()) else []
    step_with_logits(trainer)
    found += ["clipped"] if float(trainer.optimizer.qk_clip.largest) > THRESHOLD else []
    core = next(module.core_attention for module in trainer.model.modules() if hasattr(module, "core_attention"))
    core.current_max_attn_logits = torch.full((case.heads,), 1e6, device="cuda")  # of an evaluation
    trainer.train(batches(1)[0][:4])
    found += ["forgotten"] if float(trainer.optimizer.qk_clip.largest) < 1e3 else []
    try:
        trainer.step()
    except RuntimeError as error:
        found += ["no logits"] if "--qk-clip: a layer's attention kept no logits" in str(error) else []
    return found


def refusal(rank: int, world_size: int, *, case: Case) -> str:
    """In a worker: what the optimizer says to a case."""
    with pytest.raises(UserError) as caught:
        Trainer(case)
    return str(caught.value)


@pytest.mark.wide
def test_weights_that_do_not_train_are_not_clipped(ranks: Pool) -> None:
    said = ranks(1, refusal, case=Case(layers=1, attention=CLIP, frozen=("linear_qkv",)))[0]
    assert "--qk-clip would scale rows of decoder.layers.0.self_attention.linear_qkv.weight, which is frozen" in said


CLIPPED_TRAINING = {
    layout: case.but(attention={"qk_clip": True, "qk_clip_threshold": 0.2})
    for layout, case in TRAINED["dense"][1].items()
}


@pytest.fixture(scope="module")
def alone(ranks: Pool) -> list[tuple[float, float]]:
    """Losses and largest logits on one rank that holds everything, where clipping is at work.

    In as many micro-batches as on four: another order of the gradients' sums moves the fourth logit by 6e-4 by itself.
    """
    case = CLIPPED_TRAINING["DP"].but(strategy="no_shard")
    found = ranks(1, curve, case=case, steps=5, micro_batches=3)[0]
    other = ranks(1, curve, case=case.but(attention={"log_max_attention_logit": True}), steps=5, micro_batches=3)[0]
    assert abs(found[-1][0] - other[-1][0]) > 1e-3, "clipping must be at work"
    return found


@pytest.mark.parametrize(
    ("layout", "strategy"),
    wide_but(
        [],
        [(name, s) for name, case in CLIPPED_TRAINING.items() for s in STRATEGIES[case.instances > 1 :]],
    ),
)
def test_clipped_training_equals_that_of_one_rank(ranks: Pool, alone: Any, layout: str, strategy: str) -> None:
    case = CLIPPED_TRAINING[layout].but(strategy=strategy)
    found = ranks(4, curve, case=case, steps=5, micro_batches=3)[0]
    for step, ((loss, logit), (other_loss, other_logit)) in enumerate(zip(found, alone, strict=True)):
        assert abs(loss - other_loss) <= 1e-4, step
        assert logit == pytest.approx(other_logit, rel=1e-3), step


@pytest.mark.usefixtures("two_memories_too")
def test_a_run_logs_the_largest_logit(ranks: Pool, tmp_path: Path) -> None:
    """By the command line, with local attention, where 0.19 asks for Transformer Engine; TensorBoard has every step."""
    training = Trainings(
        ranks, tmp_path, (*cli.TINY, *cli.make_corpus(tmp_path), *cli.MUON, "--train-iters", "4"), batch=4
    )
    log = ("--log-max-attention-logit", "--tensorboard-log-interval", "1", "--tensorboard-dir")
    clip = ("--qk-clip", "--qk-clip-threshold", "0.05")
    training(*log, "events", *clip).checked()
    points = read_events(tmp_path / "events").points("max_attention_logit")
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert all(0.05 < point.value < 1.0 for point in points)
