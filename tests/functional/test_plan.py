"""`megatron-muon plan` plans what a run does: for the same config and ranks both name the same
digest.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import megatron_muon
from megatron_muon import cli as command
from megatron_muon.errors import ExitStatus
from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

MODEL = {
    "--num-layers": "3",
    "--hidden-size": "48",
    "--ffn-hidden-size": "100",
    "--num-attention-heads": "4",
    "--swiglu": "true",
    "--disable-bias-linear": "true",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--vocab-size": "257",
    "--micro-batch-size": "1",
    "--global-batch-size": "12",
    "--train-iters": "1",
    "--eval-iters": "0",
    "--lr": "0.01",
    "--split": "90,10,0",
    "--optimizer": "muon",
    "--use-megatron-fsdp": "true",
}
EXPERTS = {
    "--num-experts": "4",
    "--moe-router-topk": "2",
    "--moe-router-load-balancing-type": "none",
}
TP2 = {"--tensor-model-parallel-size": "2"}
LAYOUTS = {
    "optim": (2, {"--data-parallel-sharding-strategy": "optim"}),
    "optim_grads": (3, {"--data-parallel-sharding-strategy": "optim_grads"}),
    "optim_grads_params": (4, {}),
    "tp2 dp2": (4, TP2),
    "tp2 dp2 blockwise": (4, {**TP2, "--muon-tp-mode": "blockwise"}),
    "experts ep2": (
        2,
        {**EXPERTS, "--expert-model-parallel-size": "2", "--moe-grouped-gemm": "true"},
    ),
    "optim, a bias, untied": (
        4,
        {
            **{
                "--data-parallel-sharding-strategy": "optim",
                "--disable-bias-linear": "false",
                "--bf16": "true",
            },
            **{"--untie-embeddings-and-output-weights": "true", "--overlap-grad-reduce": "true"},
        },
    ),
    "predicted tokens": (3, {"--position-embedding-type": "rope", "--mtp-num-layers": "1"}),
    "dense experts tp2": (
        4,
        {**EXPERTS, **TP2, "--sequence-parallel": "true", "--expert-tensor-parallel-size": "2"},
    ),
    "steps by matrix": (3, {"--muon-ns-steps-for": "[linear_fc*=3, linear_qkv=8]"}),
    "hsdp": (4, {"--num-distributed-optimizer-instances": "2"}),
}


@pytest.mark.parametrize("name", wide_but(["tp2 dp2", "experts ep2", "hsdp"], LAYOUTS))
def test_a_plan_has_the_digest_of_the_run(
    ranks: Pool, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans differed from runs: they counted another iteration's cost, and a tied embedding has a
    bucket of its own.
    """
    world_size, flags = LAYOUTS[name]
    config = tmp_path / "run.yaml"
    lines = [f"  {flag}: {value}\n" for flag, value in {**MODEL, **flags}.items()]
    config.write_text("MODEL_ARGS:\n" + "".join(lines), "utf-8")
    (tmp_path / "corpus").mkdir()
    corpus = cli.make_corpus(tmp_path / "corpus")
    run = Trainings(ranks, tmp_path, ("--config", str(config), *corpus))(ranks=world_size).checked()
    (digest,) = set(re.findall(r"megatron-muon: plan ([0-9a-f-]+)", run.output))

    planned = tmp_path / "plan.json"
    line = [
        "plan",
        "--config",
        str(config),
        "--world-size",
        str(world_size),
        "--hardware",
        "cpu-2core",
    ]
    assert command.main([*line, "--json", str(planned)]) == ExitStatus.OK
    assert json.loads(planned.read_text("utf-8"))["digest"] == digest
    assert f"digest {digest}" in capsys.readouterr().out
    assert len(digest.split("-")) == 1 + name.startswith("experts ep")


SIZES = {
    "vocab_size": 64,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
MIXTURE = {**SIZES, "num_hidden_layers": 2, "moe_intermediate_size": 20, "num_experts_per_tok": 2}
DEEPSEEK = {
    "num_key_value_heads": 6,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
} | {
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# a config, and how many matrices Muon has of the model
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({"model_type": "llama", **SIZES}, 3 * 7),
    "qwen3_moe": ({"model_type": "qwen3_moe", **MIXTURE, "num_experts": 8}, 2 * (5 + 8 * 2)),
    "qwen3_moe, two experts": (
        {"model_type": "qwen3_moe", **MIXTURE, "num_experts": 2},
        2 * (5 + 2 * 2),
    ),
    "mixtral": ({"model_type": "mixtral", **MIXTURE, "num_local_experts": 4}, 2 * (5 + 4 * 2)),
    "deepseek_v3": (
        {"model_type": "deepseek_v3", **MIXTURE, **DEEPSEEK, "n_routed_experts": 8},
        2 * 5 + 3 + 1 + 8 * 2 + 3,
    ),
}


# ranks, and models with the ranks over which experts lie
RUNS: dict[str, tuple[int, list[tuple[str, int]]]] = {
    **{f"llama on {size}": (size, [("llama", 1)]) for size in (2, 3, 4)},
    "experts on 4": (4, [("qwen3_moe", 2), ("qwen3_moe, two experts", 2)]),
    "mixtures on 4": (
        4,
        [(model, ep) for model in ("qwen3_moe", "mixtral", "deepseek_v3") for ep in (1, 2, 4)],
    ),
    "experts on 3": (3, [("qwen3_moe", 1), ("qwen3_moe, two experts", 1)]),
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
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(f"{folder}/{name}.json")
        )
        of_experts = init_device_mesh(
            "cpu", (world_size // ep, ep), mesh_dim_names=("data", "experts")
        )
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


@pytest.mark.parametrize("run", wide_but(["llama on 3", "experts on 4"], RUNS))
def test_a_plan_of_a_hugging_face_model_is_the_runs(ranks: Pool, run: str, tmp_path: Path) -> None:
    world_size, models = RUNS[run]
    for name, _ in models:
        (tmp_path / f"{name}.json").write_text(json.dumps(MODELS[name][0]), "utf-8")

    def planned(name: str, ep: int) -> dict[str, Any]:
        given = [
            "plan",
            "--hf",
            str(tmp_path / f"{name}.json"),
            "--world-size",
            str(world_size),
            "--ep",
            str(ep),
        ]
        assert (
            command.main([*given, "--json", str(tmp_path / "plan.json"), "--hardware", "cpu-2core"])
            == 0
        )
        figures: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text("utf-8"))
        return figures

    figures = [planned(*of) for of in models]
    for found in ranks(world_size, digests_of_models, folder=str(tmp_path), models=models):
        assert found == [each["digest"] for each in figures]
    for (name, ep), each in zip(models, figures, strict=True):
        assert each["matrices"] == MODELS[name][1]
        # with an expert-parallel rank for each rank, experts lie as without
        if ep not in (1, world_size):
            assert planned(name, 1)["digest"] != each["digest"]


@pytest.mark.parametrize(
    ("model", "sizes", "text"),
    [
        (
            "qwen3_moe",
            (6, 4),
            "--ep 4 does not spread 8 experts of 40 rows evenly over --world-size 6;",
        ),
        (
            "qwen3_moe",
            (12, 4),
            "--ep 4 does not spread 8 experts of 40 rows evenly over --world-size 12;",
        ),
    ],
)
def test_experts_that_cannot_be_spread(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    sizes: tuple[int, int],
    text: str,
) -> None:
    """On 12 ranks three would have to share the 40 rows of an expert, which torch refuses to cut
    unevenly.
    """
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS[model][0]), "utf-8")
    assert (
        command.main(
            [
                "plan",
                "--hf",
                str(config),
                *map(str, ("--world-size", sizes[0], "--ep", sizes[1])),
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
