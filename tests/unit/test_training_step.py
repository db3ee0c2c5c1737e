"""A simulated training step: what a model computes and holds, what is sent, and what Muon adds to
Adam's step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import plans
from megatron_muon import cpu
from megatron_muon.core.memory import Memory
from megatron_muon.settings import MuonSettings
from megatron_muon.tools.plan import training_step
from megatron_muon.tools.plan.estimate import HARDWARE, PRODUCT_SHARE, PlanSettings
from megatron_muon.tools.plan.training_step import Parameters, TrainedModel

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = PlanSettings(256, Memory(2))
TINY = TrainedModel(
    parameters=(Parameters(1_600_000, 1_200_000, 1, 16),),
    copies=1,
    sequence_flops=6e12,
    sequence_length=1000,
    has_vocabulary=True,
    global_batch=32,
    micro_batch=1,
    replicas=16,
    strategy="optim_grads_params",
    weight_bytes=2,
    reduced_bytes=4,
)


def changed(tmp_path: Path, name: str, changes: dict[str, object]) -> Path:
    """A shipped config with flags changed, added or (None) left out."""
    lines = (CONFIGS / f"{name}.yaml").read_text("utf-8").splitlines()
    kept = [
        line for line in lines if line.strip().removeprefix("--").partition(":")[0] not in changes
    ]
    added = [f"  --{flag}: {value}" for flag, value in changes.items() if value is not None]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join([*kept, *added]) + "\n", "utf-8")
    return path


def read_model(path: Path, world_size: int) -> TrainedModel:
    cpu.install(force=True)
    from megatron_muon.tools.plan.planned_model import read_model

    return read_model(path, world_size)[2]


def simulate(
    model: TrainedModel = TINY, mfu: float = 0.5, **changes: Any
) -> tuple[dict[str, Any], list[str]]:
    figures = {"world_size": 16, "step_ms": 5.0, "max_over_mean": 2.0} | changes
    return training_step.simulate(
        model, figures, settings=SETTINGS, hardware=HARDWARE["h100-sxm"], mfu=mfu
    )


def memory(model: TrainedModel, step_bytes: int = 0, **settings: Any) -> dict[str, Any]:
    config = SimpleNamespace(**vars(MuonSettings(**settings)), optimizer="muon")
    return training_step.memory(model, config, step_bytes, HARDWARE["h100-sxm"])


def test_a_dense_model_computes_and_holds_what_its_sizes_say() -> None:
    """Llama 3 8B: grouped queries, a gated MLP, and an output layer that does not share the
    embedding's weights.
    """
    model = read_model(CONFIGS / "llama3-8b.yaml", 1024)
    hidden, layers, vocabulary, length = 4096, 32, 128256, 8192
    layer = hidden * (hidden + 2 * 1024 + hidden) + 3 * hidden * 14336
    norms = (2 * layers + 1) * hidden
    (dense,) = model.parameters
    assert dense == Parameters(
        layers * layer + 2 * vocabulary * hidden + norms, layers * layer, 1, 1024
    )
    assert dense.count == 8_030_261_248
    causal_attention = layers * 2 * length * hidden  # scores and values, half of each
    assert model.sequence_flops == 3 * length * (
        2 * (layers * layer + vocabulary * hidden) + causal_attention
    )
    assert (model.global_batch, model.replicas, model.weight_bytes, model.reduced_bytes) == (
        512,
        1024,
        2,
        4,
    )


def test_a_mixture_computes_with_the_experts_of_a_token_and_holds_all(tmp_path: Path) -> None:
    model = read_model(changed(tmp_path, "moe-large", {"num-layers": 4}), 128)
    hidden, layers, vocabulary, length, heads = 2048, 4, 151936, 8192, 16 * 256
    attention, expert, router = hidden * (heads + 2 * 512 + heads), 3 * hidden * 512, 512 * hidden
    dense, experts = model.parameters
    assert experts == Parameters(layers * 512 * expert, layers * 512 * expert, 8, 16)
    norms = (2 * layers + 1) * hidden + layers * 2 * 256
    assert dense.count == layers * (attention + expert + router) + 2 * vocabulary * hidden + norms
    assert (dense.muon, dense.parts, dense.ranks) == (
        layers * (attention + expert + router),
        1,
        128,
    )
    # Megatron leaves the router out
    of_a_token = layers * (attention + (10 + 1) * expert) + vocabulary * hidden
    assert model.sequence_flops == 3 * length * (2 * of_a_token + layers * 2 * length * heads)


def test_tied_embeddings_are_held_once_and_multiplied_all_the_same(tmp_path: Path) -> None:
    ours, theirs = (
        read_model(changed(tmp_path, "llama3-8b", {"num-layers": 2, **tied}), 64)
        for tied in ({"untie-embeddings-and-output-weights": None}, {})
    )
    assert theirs.parameters[0].count - ours.parameters[0].count == 128256 * 4096
    assert theirs.parameters[0].muon == ours.parameters[0].muon
    assert theirs.sequence_flops == ours.sequence_flops


def test_tensor_parallel_ranks_and_instances_hold_their_part(tmp_path: Path) -> None:
    alone, cut = (
        read_model(changed(tmp_path, "llama3-8b", {"num-layers": 2, **cuts}), 8)
        for cuts in (
            {},
            {"tensor-model-parallel-size": 2, "num-distributed-optimizer-instances": 2},
        )
    )
    assert replace(cut.parameters[0], parts=1, ranks=8) == alone.parameters[0]
    assert (cut.parameters[0].parts, cut.parameters[0].ranks, cut.copies, cut.replicas) == (
        2,
        2,
        2,
        4,
    )


def test_the_step_adds_up_by_hand() -> None:
    figures, notes = simulate()
    hardware = HARDWARE["h100-sxm"]
    peak = hardware.bf16_tflops / PRODUCT_SHARE * 1e12
    passes = 1e3 / (hardware.memory_gb_per_s * 1e9)  # ms a byte
    forward_backward = 32 * 6e12 / (16 * peak * 0.5) * 1e3
    both = 100_000 * (4 + 8 + 4 + 2) * passes
    assert figures["adam_ms"] == pytest.approx(
        {
            "forward_backward": forward_backward,
            "communication": 0.0,
            "norm_clip_install": both,
            "adam": 100_000 * 28 * passes,
            "total": forward_backward + both + 100_000 * 28 * passes,
        }
    )
    elementwise = 75_000 * (12 + 12 + 4 + 20) * passes + 2 * 75_000 * (9 * 2 + 3 * 2) * passes
    ours = figures["muon_ms"]
    assert ours["adam"] == pytest.approx(25_000 * 28 * passes)
    assert ours["elementwise"] == pytest.approx(elementwise)
    assert ours["total"] == pytest.approx(
        forward_backward + both + 25_000 * 28 * passes + elementwise + 5.0
    )
    assert figures["muon_over_adam"] == ours["total"] / figures["adam_ms"]["total"]
    assert notes == []


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "collectives"),
    [
        ("optim_grads_params", 3, (6, 3)),
        ("optim_grads", 3, (1, 3)),
        ("optim", 3, (1, 1)),
    ],
)
def test_sharded_weights_and_gradients_travel_in_each_micro_batch(
    strategy: str, micro_batches: int, collectives: tuple[int, int]
) -> None:
    assert replace(TINY, strategy=strategy).collectives(micro_batches) == collectives


def test_a_node_shares_what_comes_from_other_nodes() -> None:
    hardware = replace(
        HARDWARE["h100-sxm"], node_ranks=8, node_gb_per_s=100.0, network_gb_per_s=10.0
    )
    dense, experts = Parameters(16 * 10**9, 0, 1, 16), Parameters(16 * 10**9, 0, 8, 2)
    # 32 GB to each rank, half of them from the other node, by 8 adapters: 2 GB each at 10 GB/s; 28
    # GB at 100 GB/s.
    assert dense.gather_s(hardware, 2) == pytest.approx(0.28)
    # Each of 8 expert-parallel ranks of a node gathers its own 4 GB from its one peer, in the other
    # node.
    assert experts.gather_s(hardware, 2) == pytest.approx(0.2)
    assert replace(dense, ranks=8).gather_s(
        replace(hardware, node_gb_per_s=1.0), 2
    ) == pytest.approx(28.0)


def test_a_step_that_mostly_waits_for_communication_says_so() -> None:
    """Muon / Adam was 1.002 over a step of which FSDP's communication took 75 %, and nothing said
    so.
    """
    slow, _ = simulate(replace(TINY, sequence_flops=6e6))
    adam = slow["adam_ms"]
    assert adam["communication"] > 0.5 * adam["total"]


@pytest.mark.parametrize(
    ("name", "world_size"), [("llama3-8b", 64), ("llama3-70b", 512), ("moe-large", 128)]
)
def test_the_shipped_configs_fit_and_compute_while_they_communicate(
    name: str, world_size: int
) -> None:
    """At the size that the file's first lines name."""
    assert f"--world-size {world_size}\n" in (CONFIGS / f"{name}.yaml").read_text("utf-8")
    model = read_model(CONFIGS / f"{name}.yaml", world_size)
    figures, _ = simulate(model, training_step.MFU, world_size=world_size)
    assert figures["adam_ms"]["communication"] == 0
    assert memory(model, 2**31)["fits"]


def test_the_memory_of_a_gpu_adds_up_by_hand() -> None:
    """100,000 parameters of a rank, 75,000 of them Muon's, in bf16 with fp32 main weights and
    gradients.
    """
    model = replace(TINY, activation_bytes=1e6)
    found, common = memory(model, 5000), {"gradients": 4e5, "activations": 1e6}
    assert found["adam"] == {**common, "weights": 6e5, "state": 8e5, "step": 0, "total": 2.8e6}
    state = 4 * 75_000 + 8 * 25_000
    assert (found["muon"]["state"], found["muon"]["total"]) == (state, 2e6 + state + 5000)
    assert found["capacity"] == 80e9
    assert not memory(replace(model, activation_bytes=80e9))["fits"]
    in_optim = memory(replace(model, strategy="optim"))["adam"]
    assert (in_optim["weights"], in_optim["gradients"]) == (2 * 1.6e6 + 4e5, 4 * 1.6e6)
    away = memory(model, muon_offload="cpu", muon_offload_state="all")["muon"]
    assert away == {**common, "weights": 2e5, "state": 0, "step": 0, "total": 1.6e6}
    assert memory(model, muon_momentum_dtype="int8")["muon"]["state"] == 75_000 + 8 * 25_000


def test_activations_are_megatrons(tmp_path: Path) -> None:
    """Llama 3 8B, a sequence of 8,192: 34 bytes an element and layer, logits; recomputed, 2 and one
    layer's 34.
    """
    kept, again = (
        read_model(changed(tmp_path, "llama3-8b", flags), 64).activation_bytes
        for flags in (
            {},
            {
                "recompute-granularity": "full",
                "recompute-method": "uniform",
                "recompute-num-layers": 1,
            },
        )
    )
    assert kept is not None
    assert again is not None
    length, hidden, others = 8192, 4096, 8192 * (8 + 4096 + 2 * (128256 + 4096))
    assert kept == pytest.approx(1.05 * (32 * 34 * length * hidden + others))
    assert again == pytest.approx(1.05 * (34 * length * hidden + others) + 32 * 2 * length * hidden)


def test_steps_that_cannot_be_and_vocabularies_that_nobody_knows_warn(tmp_path: Path) -> None:
    (note,) = simulate(replace(TINY, global_batch=8))[1]
    assert "0.5 of a sequence of 1,000 tokens" in note
    unknown = {"num-layers": 2, "vocab-size": None, "tokenizer-model": None}
    model = read_model(changed(tmp_path, "llama3-8b", unknown), 8)
    assert any("--vocab-size" in note for note in simulate(model)[1])


def test_muon_takes_little_of_a_large_step() -> None:
    """4 M tokens of Llama 3 8B on 1,024 H100: Muon takes at most 1.02 times Adam's step."""
    figures = plans.planned(CONFIGS / "llama3-8b.yaml", 1024)
    step = figures["training_step"]
    assert step["tokens"] == 4_194_304
    assert 1.0 < step["muon_over_adam"] <= 1.02
    assert step["muon_ms"]["muon_step"] == figures["step_ms"]


def test_the_table_of_plans_has_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = CONFIGS / "quickstart.yaml"
    plans.main(["--configs", str(quickstart), "--ranks", "2", "4"])
    heading, _, two, four = capsys.readouterr().out.splitlines()
    assert heading == f"| {' | '.join(plans.HEADINGS)} |"
    for line, ranks in ((two, 2), (four, 4)):
        figures = plans.planned(quickstart, ranks)
        assert line == f"| {' | '.join(plans.cells('quickstart', figures))} |"
        assert f"{figures['extra_bytes'] / 2**20:,.0f}" in line
