"""What the command line refuses with Muon under Megatron-FSDP, a config of a script refuses too, in the same words."""

from __future__ import annotations

import contextlib
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


def refused(words: str | None) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(UserError, match=words) if words else contextlib.nullcontext()


def on_the_line(parser, line: str, strategy: str = "optim") -> None:
    args = arguments.parse(parser, [*RUN, "--data-parallel-sharding-strategy", strategy, *line.split()])
    arguments.check_settings(args, device="cpu", environ={"WORLD_SIZE": str(args.tensor_model_parallel_size)})


def in_a_script(monkeypatch, *, strategy: str = "optim", ddp=None, model=None, **optimizer) -> None:
    monkeypatch.setattr(settings, "is_mended", lambda: True)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy, use_distributed_optimizer=True
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    chunk = SimpleNamespace(ddp_config=sharding, config=config, parameters=lambda: iter([parameter]))
    given = MuonOptimizerConfig(lr=0.1)
    # As they are when a model has been made with them.
    for of, values in ((config, model or {}), (sharding, ddp or {}), (given, {"optimizer": "muon", **optimizer})):
        for name, value in values.items():
            setattr(of, name, value)
    check_supported(given, [chunk])


ALLGATHER, NO_SHARD = {"muon_exchange": "allgather"}, {"strategy": "no_shard"}
SPHERE = {"muon_hyperball": True, "weight_decay": 0.0}
NORMUON = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"}
ON_NORMUON = "--optimizer adaptive_muon --adaptive-muon-moment2-method normuon"
GRAPHS = {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}
OLDER = {"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}
PARTS = "--muon-hyperball --weight-decay=0 --muon-tp-mode=duplicated --tensor-model-parallel-size=2"
IN_PARTS = {**SPHERE, "muon_tp_mode": "duplicated", "model": {"tensor_model_parallel_size": 2}, **NO_SHARD}

CASES = [
    ("--cuda-graph-impl full_iteration", {"model": GRAPHS}, "--cuda-graph-impl full_iteration does not work with Muon"),
    ("--cuda-graph-scope full_iteration", {"model": OLDER}, "--cuda-graph-impl full_iteration does not work"),
    (
        "--qk-clip --attention-backend flash",
        {"model": {"qk_clip": True, "attention_backend": AttnBackend.flash}},
        "--attention-backend flash does not work with --qk-clip",
    ),
    (
        "--log-max-attention-logit --cuda-graph-impl local",
        {"model": {"log_max_attention_logit": True, "cuda_graph_impl": "local"}},
        "--cuda-graph-impl does not work with --log-max-attention-logit",
    ),
    (
        "--qk-clip --experimental-attention-variant dsa",
        {"model": {"qk_clip": True, "experimental_attention_variant": "dsa"}},
        "--experimental-attention-variant does not work with --qk-clip",
    ),
    ("--optimizer-cuda-graph", {"optimizer_cuda_graph": True}, "--optimizer-cuda-graph does not work with Muon under"),
    *(
        (
            f"--qk-clip --{name.replace('_', '-')}",
            {"model": {"qk_clip": True, name: True}},
            f"--{name.replace('_', '-')} does not work with --qk-clip; leave one of the two out",
        )
        for name in ("qk_layernorm", "qk_l2_norm")
    ),
    ("--qk-clip --qk-clip-alpha 1.0", {"model": {"qk_clip": True, "qk_clip_alpha": 1.0}}, "-alpha 1 is out of range"),
    ("--qk-clip --qk-clip-threshold 0", {"model": {"qk_clip": True, "qk_clip_threshold": 0}}, "-threshold 0 is out of"),
    ("--use-precision-aware-optimizer", {"use_precision_aware_optimizer": True}, "-optimizer does not work with Muon"),
    (
        "--megatron-fsdp-main-params-dtype bf16",
        {"ddp": {"megatron_fsdp_main_params_dtype": torch.bfloat16}},
        "-main-params-dtype does not work with Muon",
    ),
    ("--optimizer-cpu-offload", {"optimizer_cpu_offload": True}, "-cpu-offload does not work with Muon"),
    ("--fp16", {"fp16": True}, "--fp16 is not supported with --optimizer muon; use --bf16"),
    ("--optimizer dist_muon", {"optimizer": "dist_muon"}, "megatron-core's layer-wise Muon"),
    ("--muon-split-gated-mlp", {"muon_split_gated_mlp": True}, "--muon-split-gated-mlp has no gate to split"),
    ("--adaptive-muon-beta2 0.5", {"adaptive_muon_beta2": 0.5}, "-beta2 needs --optimizer adaptive_muon"),
    (
        "--muon-exchange allgather --muon-exchange-dtype bf16",
        {**ALLGATHER, "muon_exchange_dtype": "bf16"},
        "--muon-exchange-dtype has no effect here",
    ),
    (
        "--muon-exchange allgather --muon-team-size 2",
        {**ALLGATHER, "muon_team_size": "2"},
        "--muon-team-size has no effect here: --muon-exchange allgather gathers",
    ),
    ("--muon-team-size 1", {"muon_team_size": "1", **NO_SHARD}, "team-size has no .* no_shard exchanges nothing"),
    (
        "--muon-share-replicated --muon-team-size 4",
        {"muon_share_replicated": True, "muon_team_size": "4", **NO_SHARD},
        "--muon-team-size has no effect here: --muon-share-replicated gives .* its update; leave it out",
    ),
    (f"{ON_NORMUON} --muon-team-size 2", {**NORMUON, "muon_team_size": "2"}, "NorMuon .*; use --muon-team-size 1"),
    (
        "--muon-hyperball --weight-decay 0.1",
        {"muon_hyperball": True, "weight_decay": 0.1},
        "--weight-decay 0.1 does not work with --muon-hyperball; use --weight-decay 0$",
    ),
    ("--muon-hyperball", {"muon_hyperball": True}, "--weight-decay 0.01 does not work with .*; use --weight-decay 0$"),
    (
        "--muon-hyperball --muon-cautious-weight-decay --weight-decay 0",
        {**SPHERE, "muon_cautious_weight_decay": True},
        "--muon-cautious-weight-decay does not work with --muon-hyperball",
    ),
    (
        "--muon-hyperball --optimizer adaptive_muon --weight-decay 0",
        {**SPHERE, "optimizer": "adaptive_muon"},
        "--optimizer adaptive_muon does not work with --muon-hyperball",
    ),
    (PARTS, IN_PARTS, "duplicated is not supported with --muon-hyperball, no_shard and tensor parallel size 2"),
    (
        "--muon-hyperball --weight-decay 0 --qk-clip",
        {**SPHERE, "model": {"qk_clip": True}},
        "--qk-clip does not work with",
    ),
    (
        "--muon-cautious-weight-decay --weight-decay 0",
        {"muon_cautious_weight_decay": True, "weight_decay": 0.0},
        "--weight-decay 0 does not work with --muon-cautious-weight-decay",
    ),
    ("--muon-exchange allgather", {**ALLGATHER, **NO_SHARD}, "--muon-exchange has no effect here"),
    (
        "--cuda-graph-impl local --muon-team-size 2",
        {"model": {"cuda_graph_impl": "local"}, "muon_team_size": "2"},
        None,
    ),
    (f"{ON_NORMUON} --muon-team-size 1", {**NORMUON, "muon_team_size": "1"}, None),
    ("--muon-hyperball --weight-decay 0 --muon-offload cpu", {**SPHERE, **NO_SHARD, "muon_offload": "cpu"}, None),
    ("--log-max-attention-logit --qk-layernorm", {"model": {"log_max_attention_logit": True}}, None),
]


@pytest.mark.parametrize(("line", "given", "words"), CASES)
def test_a_script_is_refused_what_the_command_line_refuses(parser, monkeypatch, line, given, words):
    with refused(words):
        on_the_line(parser, line, given.get("strategy", "optim"))
    with refused(words):
        in_a_script(monkeypatch, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"muon_cautious_weight_decay": True, "decoupled_weight_decay": False},
            "=False does not work",
        ),
        ({"model": {"qk_clip": True, "fp8_dot_product_attention": True}}, "fp8_dot_product_attention=True does not"),
        ({"muon_exchange": "pigeon"}, "--muon-exchange pigeon does not exist; use owner, allgather"),
        ({"model": {"qk_clip": True, "multi_latent_attention": True, "qk_layernorm": True}}, None),  # of the latents
    ],
)
def test_what_only_a_script_can_ask_for_is_refused(monkeypatch, given, words):
    with refused(words):
        in_a_script(monkeypatch, **given)


@pytest.mark.parametrize("flag", ["--start-weight-decay", "--end-weight-decay"])
def test_a_schedule_of_decay_on_a_sphere_is_refused(parser, flag):
    with refused(f"{flag} 0.1 does not work with --muon-hyperball; use {flag} 0"):
        on_the_line(parser, f"--muon-hyperball --weight-decay 0 {flag} 0.1")


@pytest.mark.parametrize("flag", ["--qk-clip", "--log-max-attention-logit"])
def test_logits_under_megatron_fsdp_need_muon(parser, flag):
    """megatron-core's clip ended the first step of an Adam run in an AttributeError."""
    with refused(f"{flag} with --use-megatron-fsdp needs --optimizer muon"):
        on_the_line(parser, f"--optimizer adam {flag}")
