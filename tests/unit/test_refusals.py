"""What is refused before torch.distributed starts: on the command line, and in the same words in a
script's config.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.muon_config import MuonOptimizerConfig, check_supported, with_settings

FSDP = "--use-megatron-fsdp"
MUON, ADAM = (f"--optimizer {name} {FSDP}" for name in ("muon", "adam"))
NO_SHARD = "--data-parallel-sharding-strategy no_shard"
SHARED = f"{NO_SHARD} --muon-share-replicated"
NORMUON = "--optimizer adaptive_muon --adaptive-muon-moment2-method normuon"
TP2 = "--tensor-model-parallel-size 2"
WHOLE = f"{TP2} --muon-tp-mode duplicated"
NVME = "--muon-offload nvme --muon-offload-dir ."
ALL = "--muon-offload cpu --muon-offload-state all"
SPHERE = "--muon-hyperball --weight-decay 0"
GRAPH = "--cuda-graph-impl full_iteration does not work with Muon"


def refused(words: str | None) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(UserError, match=words) if words else contextlib.nullcontext()


BASE = "--transformer-impl local --mock-data --data-parallel-sharding-strategy optim"


def parsed(parser: arguments.Parser, line: str) -> dict[str, Any]:
    return vars(arguments.parse(parser, f"{BASE} {line}".split()))


def on_the_line(parser: arguments.Parser, line: str, words: str | None) -> None:
    with refused(words):
        arguments.check_settings(SimpleNamespace(**parsed(parser, line)), device="cpu")


def in_a_script(words: str | None, **given: Any) -> None:
    model = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim",
        use_distributed_optimizer=True,
    )
    config = MuonOptimizerConfig(lr=0.1)
    config.optimizer = "muon"
    for name, value in given.items():  # as they are when a model has been made with them
        for of in (model, sharding, config):
            if hasattr(of, name):
                setattr(of, name, value)
    parameter = torch.nn.Parameter(torch.zeros(1))
    chunk = SimpleNamespace(ddp_config=sharding, config=model, parameters=lambda: iter([parameter]))
    with refused(words):
        check_supported(config, [chunk])


OF_ANY_RUN = [
    ("--pipeline-model-parallel-size 2", None),
    (f"--pipeline-model-parallel-size 2 {FSDP}", "-size 2 does not work with --use-megatron-fsdp"),
    ("--optimizer adam --fp16", None),
    ("--optimizer muon --fp16", "--fp16 is not supported with --optimizer muon; use --bf16"),
    ("--hybrid-layer-pattern M*", "makes a hybrid model"),
    ("--optimizer dist_muon", None),
    (f"--optimizer dist_muon {FSDP}", "layer-wise Muon, does not work on Megatron-FSDP's shards"),
    (f"{MUON} {ALL} --log-params-norm", "-norm does not work with --muon-offload-state all"),
    (f"{MUON} --data-parallel-random-init", "-init does not work with Muon under Megatron-FSDP"),
    # each of Megatron-LM's functional tests had several reasons, of which one was shown at a time
    (
        f"{MUON} --fp16 --async-save --optimizer-cuda-graph",
        r"^--async-save [^\n]*\n--fp16 [^\n]*\n--optimizer-cuda-graph [^\n]*$",
    ),
]


@pytest.mark.parametrize(("line", "words"), OF_ANY_RUN)
def test_flags_are_refused_where_they_do_not_work(parser, line, words):
    on_the_line(parser, line, words)


@pytest.mark.parametrize("flags", ["--muon-lr 0.1", "--muon-exclude router linear_fc?", NVME])
def test_flags_of_muon_are_refused_without_it(parser, flags):
    words = f"{flags.split()[0]} needs --optimizer muon --use-megatron-fsdp; add them or"
    for others in (ADAM, "--optimizer muon"):
        on_the_line(parser, f"{others} {flags}", words)


IN_PARTS = (
    r"--muon-tp-mode (distributed|duplicated) is not supported with {}, .* 2; use --muon-tp-mode"
    r" blockwise"
)
OF_MUONS_RUN = [
    ("--cuda-graph-impl full_iteration", GRAPH),
    ("--optimizer-cuda-graph", "--optimizer-cuda-graph does not work with Muon under"),
    ("--qk-clip --qk-layernorm", "--qk-layernorm does not work with --qk-clip; leave one of the"),
    ("--log-max-attention-logit --qk-layernorm", None),
    ("--qk-clip --qk-clip-alpha 1.0", "-alpha 1 is out of range"),
    ("--megatron-fsdp-main-params-dtype bf16", "-main-params-dtype does not work with Muon"),
    ("--muon-split-heads --muon-no-split-qkv", "-split-qkv does not work with --muon-split-heads"),
    ("--adaptive-muon-beta2 0.5", "-beta2 needs --optimizer adaptive_muon; add it or leave"),
    # exchange and strategy
    (f"{NO_SHARD} --muon-ns gram", "--muon-ns has no effect .*--muon-share-replicated"),
    (f"{NO_SHARD} --muon-audit-interval 5", "--muon-audit-interval has no effect here"),
    (f"{NO_SHARD} --muon-audit-interval 0", None),
    (f"{NO_SHARD} --muon-momentum-dtype int8", "--muon-momentum-dtype has no effect"),
    (f"{SHARED} --muon-momentum-dtype int8", None),
    (f"{NO_SHARD} --num-distributed-optimizer-instances 2", "-instances does not work with"),
    ("--muon-exchange allgather --muon-exchange-dtype bf16", "-dtype has no effect here"),
    ("--muon-exchange allgather --muon-team-size 2", "-size has no effect here: .* gathers fp32"),
    ("--muon-share-replicated", "-replicated has no effect here: it is for no_shard"),
    (f"{NO_SHARD} --muon-exchange allgather", "--muon-exchange has no effect here"),
    (f"{SHARED} --muon-team-size 4", "-team-size has no effect here: .* leave it out"),
    (f"{NORMUON} --muon-team-size 2", "NorMuon .*; use --muon-team-size 1"),
    # blocks that tensor-parallel replicas have in parts
    (f"{SHARED} --muon-tp-mode distributed {TP2}", IN_PARTS.format("--muon-share-replicated")),
    (f"{NO_SHARD} --muon-split-heads {WHOLE}", IN_PARTS.format("--muon-split-heads")),
    (f"{NO_SHARD} {SPHERE} {WHOLE}", IN_PARTS.format("--muon-hyperball")),
    (f"{NO_SHARD} {NORMUON} {WHOLE}", IN_PARTS.format("--optimizer adaptive_muon")),
    (f"{SHARED} --muon-tp-mode blockwise {TP2}", None),
    (f"{NORMUON} {WHOLE}", None),
    # decay and norms
    ("--muon-hyperball", "--weight-decay 0.01 does not work with .*; use --weight-decay 0$"),
    ("--muon-cautious-weight-decay --weight-decay 0", "--weight-decay 0 does not work with"),
    (f"{SPHERE} --muon-cautious-weight-decay", "-decay does not work with --muon-hyperball"),
    (f"{SPHERE} --qk-clip", "--qk-clip does not work with"),
    # where momentum lives
    ("--muon-offload cpu --muon-offload-fraction 0.5 --muon-ns-device cpu", None),
    (f"{NVME} --muon-offload-state all --muon-momentum-dtype int8", None),
    (ALL, None),
    (f"{NVME} --muon-offload-fraction 0", "--muon-offload-fraction 0 is out of range"),
    ("--muon-offload nvme", "--muon-offload nvme needs --muon-offload-dir DIR"),
    ("--muon-ns-device cpu", "--muon-ns-device needs --muon-offload cpu or nvme"),
    (f"{ALL} --muon-ns-device cpu", "-device cpu does not work with --muon-offload-state all"),
    (f"{ALL} {SHARED}", "no_shard does not work with --muon-offload-state all"),
    ("--muon-offload cpu --muon-offload-dir .", "-dir needs --muon-offload nvme; change that"),
    (f"{ALL} --fp8-format hybrid", "--fp8-format does not work with --muon-offload-state all"),
]


@pytest.mark.parametrize(("line", "words"), OF_MUONS_RUN)
def test_a_script_is_refused_what_the_command_line_refuses(
    parser, tmp_path, monkeypatch, line, words
):
    monkeypatch.chdir(tmp_path)
    on_the_line(parser, f"{MUON} {line}", words)
    plain, typed = parsed(parser, ""), {"muon_tp_mode"} if "--muon-tp-mode" in line else set()
    given = {
        name: value
        for name, value in parsed(parser, line).items()
        if name in typed or value != plain[name]
    }
    in_a_script(words, **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--cuda-graph-scope full_iteration", "--cuda-graph-impl full_iteration does not work"),
        ("--muon-offload disk", "invalid choice: 'disk'"),
        (f"{SPHERE} --end-weight-decay 0.1", "--end-weight-decay 0.1 does not work with"),
        (f"{ALL} --async-save", "--async-save does not work with --muon-offload-state all"),
    ],
)
def test_flags_that_scripts_do_not_have_are_refused(parser, line, words):
    on_the_line(parser, f"{MUON} {line}", words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}, GRAPH),
        (
            {"megatron_fsdp_main_params_dtype": torch.bfloat16},
            "-main-params-dtype does not work with Muon",
        ),
        (
            {"muon_cautious_weight_decay": True, "decoupled_weight_decay": False},
            "=False does not work",
        ),
        (
            {"muon_exchange": "pigeon"},
            "--muon-exchange pigeon does not exist; use owner, allgather",
        ),
        # of the latents
        ({"qk_clip": True, "multi_latent_attention": True, "qk_layernorm": True}, None),
    ],
)
def test_settings_that_only_scripts_have_are_refused(given, words):
    in_a_script(words, **given)


def test_settings_that_megatron_core_names_too_are_taken_where_its_config_says_nothing_of_them():
    """Its defaults won, so that `enable(adaptive_muon_moment2_method="normuon")` had no effect."""
    config = OptimizerConfig(optimizer="adaptive_muon", adaptive_muon_beta2=0.9)
    given = {
        "adaptive_muon_moment2_method": "normuon",
        "adaptive_muon_beta2": 0.5,
        "muon_exchange": "allgather",
    }
    made = with_settings(config, given)
    assert [getattr(made, name) for name in given] == ["normuon", 0.9, "allgather"]
