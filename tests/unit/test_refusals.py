"""What the command line refuses with Muon under Megatron-FSDP, a config of a script refuses too, in the same words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron_muon.errors import UserError
from megatron_muon.megatron import settings
from megatron_muon.megatron.flags import arguments
from megatron_muon.megatron.settings import MuonOptimizerConfig, check_supported

RUN = ("--optimizer", "muon", "--use-megatron-fsdp", "--transformer-impl", "local", "--mock-data")


def on_the_line(parser, *argv: str, strategy: str) -> None:
    args = arguments.parse(parser, [*RUN, "--data-parallel-sharding-strategy", strategy, *argv])
    arguments.check_settings(args, device="cpu", environ={"WORLD_SIZE": str(args.tensor_model_parallel_size)})


def in_a_script(monkeypatch, *, strategy: str, ddp: dict, model: dict, **optimizer) -> None:
    monkeypatch.setattr(settings, "is_mended", lambda: True)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    for name, value in model.items():  # as they are when a model has been made with them
        setattr(config, name, value)
    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy, use_distributed_optimizer=True
    )
    for name, value in ddp.items():
        setattr(sharding, name, value)
    parameter = torch.nn.Parameter(torch.zeros(1))
    chunk = SimpleNamespace(ddp_config=sharding, config=config, parameters=lambda: iter([parameter]))
    given = MuonOptimizerConfig(lr=0.1)
    given.optimizer = "muon"
    for name, value in optimizer.items():
        setattr(given, name, value)
    check_supported(given, [chunk])


CASES = {
    "full iteration": (
        ("--cuda-graph-impl", "full_iteration"),
        {"model": {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}},
        "--cuda-graph-impl full_iteration is not supported with --optimizer muon: a replayed iteration runs no Python",
    ),
    "full iteration by the older flag": (
        ("--cuda-graph-scope", "full_iteration"),
        {"model": {"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}},
        "--cuda-graph-impl full_iteration is not supported with --optimizer muon",
    ),
    "optimizer graph": (
        ("--optimizer-cuda-graph",),
        {"optimizer_cuda_graph": True},
        "--optimizer-cuda-graph is not supported with --optimizer muon: its step reads the gradient norm on the host",
    ),
    "logits of flash attention": (
        ("--qk-clip", "--attention-backend", "flash"),
        {"model": {"qk_clip": True, "attention_backend": AttnBackend.flash}},
        "--qk-clip is not supported with --attention-backend flash, which returns no logits",
    ),
    "logits that are replayed": (
        ("--log-max-attention-logit", "--cuda-graph-impl", "local"),
        {"model": {"log_max_attention_logit": True, "cuda_graph_impl": "local"}},
        "--log-max-attention-logit is not supported with --cuda-graph-impl local: a replayed layer runs no Python",
    ),
    "logits of a variant": (
        ("--qk-clip", "--experimental-attention-variant", "dsa"),
        {"model": {"qk_clip": True, "experimental_attention_variant": "dsa"}},
        "--qk-clip is not supported with --experimental-attention-variant dsa",
    ),
    "clipped before a norm": (
        ("--qk-clip", "--qk-layernorm"),
        {"model": {"qk_clip": True, "qk_layernorm": True}},
        "--qk-clip has no effect with --qk-layernorm, which normalises queries and keys after the rows",
    ),
    "clipped before an L2 norm": (
        ("--qk-clip", "--qk-l2-norm"),
        {"model": {"qk_clip": True, "qk_l2_norm": True}},
        "--qk-clip has no effect with --qk-l2-norm",
    ),
    "all for the queries": (
        ("--qk-clip", "--qk-clip-alpha", "1.0"),
        {"model": {"qk_clip": True, "qk_clip_alpha": 1.0}},
        "--qk-clip-alpha 1 is out of range; choose more than 0 and less than 1",
    ),
    "no threshold": (
        ("--qk-clip", "--qk-clip-threshold", "0"),
        {"model": {"qk_clip": True, "qk_clip_threshold": 0}},
        "--qk-clip-threshold 0 is out of range; choose more than 0",
    ),
    "precision aware": (
        ("--use-precision-aware-optimizer",),
        {"use_precision_aware_optimizer": True},
        "--use-precision-aware-optimizer is not supported with --optimizer muon",
    ),
    "main weights": (
        ("--megatron-fsdp-main-params-dtype", "bf16"),
        {"ddp": {"megatron_fsdp_main_params_dtype": torch.bfloat16}},
        "is not supported with --optimizer muon, whose momentum and main weights are fp32",
    ),
    "offloaded Adam": (
        ("--optimizer-cpu-offload",),
        {"optimizer_cpu_offload": True},
        "--optimizer-cpu-offload is not supported with --optimizer muon; use --muon-offload cpu",
    ),
    "fp16": (("--fp16",), {"fp16": True}, "--fp16 is not supported with --optimizer muon"),
    "layer-wise": (("--optimizer", "dist_muon"), {"optimizer": "dist_muon"}, "megatron-core's layer-wise Muon"),
    "no gate": (
        ("--muon-split-gated-mlp",),
        {"muon_split_gated_mlp": True},
        "--muon-split-gated-mlp has no gate to split",
    ),
    "adaptive": (
        ("--adaptive-muon-beta2", "0.5"),
        {"adaptive_muon_beta2": 0.5},
        "--adaptive-muon-beta2 needs --optimizer adaptive_muon",
    ),
    "gathered in bf16": (
        ("--muon-exchange", "allgather", "--muon-exchange-dtype", "bf16"),
        {"muon_exchange": "allgather", "muon_exchange_dtype": "bf16"},
        "--muon-exchange-dtype has no effect here",
    ),
    "teams where all ranks do all": (
        ("--muon-exchange", "allgather", "--muon-team-size", "2"),
        {"muon_exchange": "allgather", "muon_team_size": "2"},
        "--muon-team-size has no effect here: --muon-exchange allgather gathers",
    ),
    "teams without shards": (
        ("--muon-team-size", "1"),
        {"muon_team_size": "1", "strategy": "no_shard"},
        "--muon-team-size has no effect here: .* no_shard exchanges nothing",
    ),
    "teams of replicas": (
        ("--muon-share-replicated", "--muon-team-size", "4"),
        {"muon_share_replicated": True, "muon_team_size": "4", "strategy": "no_shard"},
        "--muon-team-size has no effect here: --muon-share-replicated gives .* its update; leave it out",
    ),
    "teams of NorMuon": (
        ("--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", "normuon", "--muon-team-size", "2"),
        {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon", "muon_team_size": "2"},
        "--muon-team-size 2: NorMuon keeps the norm of a whole update, .*; use --muon-team-size 1",
    ),
    "decay on a sphere": (
        ("--muon-hyperball", "--weight-decay", "0.1"),
        {"muon_hyperball": True, "weight_decay": 0.1},
        "--weight-decay 0.1 has no effect with --muon-hyperball, .*; use --weight-decay 0",
    ),
    "cautious on a sphere": (
        ("--muon-hyperball", "--muon-cautious-weight-decay", "--weight-decay", "0"),
        {"muon_hyperball": True, "muon_cautious_weight_decay": True, "weight_decay": 0.0},
        "--muon-cautious-weight-decay has no effect with --muon-hyperball",
    ),
    "adaptive on a sphere": (
        ("--muon-hyperball", "--optimizer", "adaptive_muon", "--weight-decay", "0"),
        {"muon_hyperball": True, "optimizer": "adaptive_muon", "weight_decay": 0.0},
        "--muon-hyperball is not supported with --optimizer adaptive_muon",
    ),
    "parts of replicas on a sphere": (
        ("--muon-hyperball", "--weight-decay=0", "--muon-tp-mode=duplicated", "--tensor-model-parallel-size=2"),
        {
            "muon_hyperball": True,
            "weight_decay": 0.0,
            "muon_tp_mode": "duplicated",
            "model": {"tensor_model_parallel_size": 2},
            "strategy": "no_shard",
        },
        "--muon-tp-mode duplicated is not supported with --muon-hyperball, no_shard and tensor parallel size 2",
    ),
    "clipped on a sphere": (
        ("--muon-hyperball", "--weight-decay", "0", "--qk-clip"),
        {"muon_hyperball": True, "weight_decay": 0.0, "model": {"qk_clip": True}},
        "--qk-clip changes the norms that --muon-hyperball keeps; leave one of the two flags out",
    ),
    "cautious without decay": (
        ("--muon-cautious-weight-decay", "--weight-decay", "0"),
        {"muon_cautious_weight_decay": True, "weight_decay": 0.0},
        "--muon-cautious-weight-decay has no effect with --weight-decay 0",
    ),
    "nothing to exchange": (
        ("--muon-exchange", "allgather"),
        {"muon_exchange": "allgather", "strategy": "no_shard"},
        "--muon-exchange has no effect here",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_refused_what_the_command_line_refuses(parser, monkeypatch, name):
    argv, given, message = CASES[name]
    given = {"strategy": "optim", "ddp": {}, "model": {}, **given}
    with pytest.raises(UserError, match=message):
        on_the_line(parser, *argv, strategy=given["strategy"])
    with pytest.raises(UserError, match=message):
        in_a_script(monkeypatch, **given)


def test_what_is_supported_passes_both(parser, monkeypatch):
    normuon = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"}
    on_the_line(parser, "--cuda-graph-impl", "local", "--muon-team-size", "2", strategy="optim")
    in_a_script(monkeypatch, strategy="optim", ddp={}, model={"cuda_graph_impl": "local"}, muon_team_size="2")
    in_a_script(monkeypatch, strategy="optim", ddp={}, model={}, muon_team_size="1", **normuon)
    sphere = {"muon_hyperball": True, "weight_decay": 0.0}
    in_a_script(monkeypatch, strategy="no_shard", ddp={}, model={}, muon_offload="cpu", **sphere)
    on_the_line(parser, "--log-max-attention-logit", "--qk-layernorm", strategy="optim")
    latent = {"qk_clip": True, "multi_latent_attention": True, "qk_layernorm": True}  # norms of the latents
    in_a_script(monkeypatch, strategy="optim", ddp={}, model=latent)


def test_decay_in_the_gradient_cannot_be_cautious(monkeypatch):
    """It has no flag, so only a script can ask for both."""
    given = {"muon_cautious_weight_decay": True, "decoupled_weight_decay": False}
    with pytest.raises(UserError, match="--muon-cautious-weight-decay needs decoupled weight decay"):
        in_a_script(monkeypatch, strategy="optim", ddp={}, model={}, **given)


@pytest.mark.parametrize("flag", ["--start-weight-decay", "--end-weight-decay"])
def test_a_schedule_of_decay_on_a_sphere_is_refused(parser, flag):
    argv = ("--muon-hyperball", "--weight-decay", "0", flag, "0.1")
    with pytest.raises(UserError, match=f"{flag} 0.1 has no effect with --muon-hyperball"):
        on_the_line(parser, *argv, strategy="optim")


def test_logits_in_eight_bits_are_refused(monkeypatch):
    """A field of the model's config without a flag."""
    with pytest.raises(UserError, match="--qk-clip is not supported with fp8_dot_product_attention=True"):
        in_a_script(monkeypatch, strategy="optim", ddp={}, model={"qk_clip": True, "fp8_dot_product_attention": True})


@pytest.mark.parametrize("flag", ["--qk-clip", "--log-max-attention-logit"])
def test_logits_under_megatron_fsdp_need_muon(parser, flag):
    """megatron-core's clip ended the first step of an Adam run in an AttributeError."""
    with pytest.raises(UserError, match=f"{flag} with --use-megatron-fsdp needs --optimizer muon"):
        on_the_line(parser, "--optimizer", "adam", flag, strategy="optim")
