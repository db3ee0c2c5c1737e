"""`megatron-muon plan` plans what a run does: for the same config and ranks both name the same
digest, and the same bytes of momentum.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import megatron_muon
from megatron_muon import cli as command
from tests.support import cli
from tests.support.cli import words
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

MODEL = words(
    "--num-layers 3 --hidden-size 48 --ffn-hidden-size 100 --num-attention-heads 4 --swiglu"
    " --seq-length 32 --max-position-embeddings 32 --vocab-size 257 --micro-batch-size 1"
    " --global-batch-size 12 --train-iters 1 --eval-iters 0 --lr 0.01 --split 90,10,0"
    " --optimizer muon --use-megatron-fsdp"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"
TP2 = "--disable-bias-linear --tensor-model-parallel-size 2"
LAYOUTS = {
    "tp2 dp2": (4, TP2),
    "experts ep2": (
        2,
        f"{EXPERTS} --disable-bias-linear --expert-model-parallel-size 2 --moe-grouped-gemm",
    ),
    "hsdp": (
        4,
        "--num-distributed-optimizer-instances 2 --muon-ns-steps-for linear_fc*=3 linear_qkv=8",
    ),
    "optim, a bias, untied": (
        4,
        "--data-parallel-sharding-strategy optim --bf16 --overlap-grad-reduce"
        " --untie-embeddings-and-output-weights",
    ),
    "optim_grads, predicted tokens": (
        3,
        "--data-parallel-sharding-strategy optim_grads --disable-bias-linear"
        " --position-embedding-type rope --mtp-num-layers 1",
    ),
    "dense experts tp2": (
        4,
        f"{EXPERTS} {TP2} --sequence-parallel --expert-tensor-parallel-size 2",
    ),
    "tp2 dp2 blockwise": (4, f"{TP2} --muon-tp-mode blockwise"),
    "soap, tp2 dp2": (4, f"{TP2} --optimizer soap"),
    "psgd, experts ep2": (
        2,
        f"{EXPERTS} --disable-bias-linear --expert-model-parallel-size 2 --optimizer adam"
        " --matrix-optimizer psgd_pro",
    ),
}


def planned(folder: Path, *argv: object) -> dict[str, Any]:
    target = folder / "plan.json"
    line = [*map(str, argv), "--hardware", "cpu-2core", "--json", str(target)]
    assert command.main(["plan", *line]) == 0
    figures: dict[str, Any] = json.loads(target.read_text("utf-8"))
    return figures


@pytest.mark.parametrize("name", wide_but(["tp2 dp2", "experts ep2", "soap, tp2 dp2"], LAYOUTS))
def test_a_plan_has_the_digest_and_the_momentum_of_the_run(
    ranks: Pool, tmp_path: Path, name: str
) -> None:
    """Plans differed from runs: they counted another iteration's cost, and a tied embedding has a
    bucket of its own.
    """
    world_size, more = LAYOUTS[name]
    flags = [*MODEL, *words(more)]
    config = tmp_path / "run.yaml"
    config.write_text("MODEL_ARGS: {}\n", "utf-8")
    (tmp_path / "corpus").mkdir()
    corpus = cli.make_corpus(tmp_path / "corpus")
    run = Trainings(ranks, tmp_path, (*flags, *corpus))(ranks=world_size).checked()
    (digest,) = set(re.findall(r"megatron-muon: plan ([0-9a-f-]+)", run.output))
    figures = planned(tmp_path, "--config", config, "--world-size", world_size, *flags)
    assert figures["digest"] == digest
    assert len(figures["groups"]) == 1 + ("experts ep" in name)
    state = r"(?:momentum fp32|\w+, of matrices)"
    found = re.search(rf"optimizer state: {state}: device ([0-9.]+) MB", run.output)
    assert found
    megabytes = figures["momentum_bytes"] / 1e6
    if len(figures["groups"]) == 1:
        assert f"{megabytes:.2f}" == found[1]
    assert megabytes >= float(found[1]) - 0.005


SIZES = {
    "vocab_size": 64,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
MIXTURE = {
    **SIZES,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 2,
}
# a config, and how many matrices Muon has of the model
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({"model_type": "llama", **SIZES}, 3 * 7),
    "qwen3_moe": ({**MIXTURE, "num_experts": 8}, 2 * (5 + 8 * 2)),
    "qwen3_moe, two experts": ({**MIXTURE, "num_experts": 2}, 2 * (5 + 2 * 2)),
}
# ranks, and models with the ranks over which experts lie
RUNS: dict[str, tuple[int, list[tuple[str, int]]]] = {
    "on 3": (3, [("llama", 1), ("qwen3_moe", 1)]),
    "on 4": (4, [("qwen3_moe", 2), ("qwen3_moe", 4), ("qwen3_moe, two experts", 2)]),
}


def digests_of_models(
    rank: int, world_size: int, *, folder: str, models: list[tuple[str, int]]
) -> list[str]:
    """In a worker: digests of models under `fully_shard`, with experts over ranks before, as in
    torchtitan.
    """
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers import AutoConfig, AutoModelForCausalLM

    everyone, found = init_device_mesh("cpu", (world_size,)), []
    for name, ep in models:
        config = AutoConfig.from_pretrained(f"{folder}/{name}.json")
        model = AutoModelForCausalLM.from_config(config)
        shape = (world_size // ep, ep)
        of_experts = init_device_mesh("cpu", shape, mesh_dim_names=("data", "experts"))
        for layer in model.model.layers:
            experts = getattr(layer.mlp, "experts", None)
            if ep > 1 and experts is not None:
                for part, p in list(experts.named_parameters(recurse=False)):
                    spread = distribute_tensor(p.detach(), of_experts["experts"], [Shard(0)])
                    experts.register_parameter(part, nn.Parameter(spread))
                rows = (lambda _: Shard(1)) if len(p) < world_size else None
                fully_shard(experts, mesh=of_experts["data"], shard_placement_fn=rows)
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
        found.append(megatron_muon.Muon(model).digest)
    return found


@pytest.mark.parametrize("run", RUNS)
def test_a_plan_of_a_hugging_face_model_is_the_runs(ranks: Pool, run: str, tmp_path: Path) -> None:
    world_size, models = RUNS[run]
    plans = []
    for name, ep in models:
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps(MODELS[name][0]), "utf-8")
        figures = planned(tmp_path, "--hf", config, "--world-size", world_size, "--ep", ep)
        assert figures["matrices"] == MODELS[name][1]
        plans.append(figures["digest"])
    assert len(set(plans)) == len(plans)
    for found in ranks(world_size, digests_of_models, folder=str(tmp_path), models=models):
        assert found == plans


@pytest.mark.parametrize("world_size", [6, 12])
def test_experts_that_cannot_be_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], world_size: int
) -> None:
    """On 12 ranks three would have to share the 40 rows of an expert, which torch refuses to cut
    unevenly.
    """
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS["qwen3_moe"][0]), "utf-8")
    line = ["--hf", str(config), "--world-size", str(world_size), "--ep", "4"]
    assert command.main(["plan", *line]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    expected = f"8 experts of 40 rows evenly over --world-size {world_size}"
    assert f"--ep 4 does not spread {expected}" in error
