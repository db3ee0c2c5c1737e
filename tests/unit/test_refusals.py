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
NVME = "--muon-offload nvme --muon-offload-dir ."
ALL = "--muon-offload cpu --muon-offload-state all"
SPHERE = "--muon-hyperball --weight-decay 0"
GRAPH = "--cuda-graph-impl full_iteration does not work with Muon"


def refused(words: str | None) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(UserError, match=words) if words else contextlib.nullcontext()


def parsed(parser: arguments.Parser, line: str) -> dict[str, Any]:
    base = [
        "--transformer-impl",
        "local",
        "--mock-data",
        "--data-parallel-sharding-strategy",
        "optim",
    ]
    return vars(arguments.parse(parser, [*base, *line.split()]))


def on_the_line(
    parser: arguments.Parser, line: str, words: str | None, *, device: str = "cpu"
) -> None:
    with refused(words):
        arguments.check_settings(SimpleNamespace(**parsed(parser, line)), device=device)


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
    ("--pipeline-model-parallel-size 2", "cpu", None),
    (
        f"--pipeline-model-parallel-size 2 {FSDP}",
        "cpu",
        "-size 2 does not work with --use-megatron-fsdp",
    ),
    ("--optimizer adam --fp16", "cpu", None),
    ("--optimizer muon --fp16", "cpu", "--fp16 is not supported with --optimizer muon; use --bf16"),
    ("--async-save --use-persistent-ckpt-worker", "cuda", None),
    ("--async-save", "cuda", "needs --use-persistent-ckpt-worker"),
    ("--async-save", "cpu", "does not work on the CPU"),
    ("--hybrid-layer-pattern M*", "cpu", "makes a hybrid model"),
    (
        "--optimizer adam --muon-allow-missing-state",
        "cpu",
        "-state needs --use-megatron-fsdp; add it or leave",
    ),
    (
        "--transformer-impl transformer_engine",
        "cpu",
        r"needs a GPU and Transformer Engine; .*'\.\[te\]'",
    ),
    ("--optimizer adaptive_muon", "cpu", "--optimizer adaptive_muon needs --use-megatron-fsdp"),
    ("--optimizer dist_muon", "cpu", None),
    # megatron-core's clip ended the first step of an Adam run in an AttributeError
    *(
        (f"{ADAM} {flag}", "cpu", f"{flag} with .* needs --o.* muon")
        for flag in ("--qk-clip", "--log-max-attention-logit")
    ),
    # each of Megatron-LM's functional tests had several reasons, of which one was shown at a time
    (
        f"{MUON} --fp16 --async-save --optimizer-cuda-graph",
        "cpu",
        r"^--async-save [^\n]*\n--fp16 [^\n]*\n--optimizer-cuda-graph [^\n]*$",
    ),
]


@pytest.mark.parametrize(("line", "device", "words"), OF_ANY_RUN)
def test_flags_are_refused_where_they_do_not_work(parser, line, device, words):
    on_the_line(parser, line, words, device=device)


OF_MUON = (
    *("--muon-lr 0.1", "--muon-ns gram", "--muon-split-gated-mlp --swiglu", "--muon-split-heads"),
    *("--muon-exclude router linear_fc?", "--muon-share-replicated", "--muon-offload cpu", NVME),
    "--muon-momentum-dtype bf16",
)


@pytest.mark.parametrize("flags", OF_MUON)
def test_flags_of_muon_are_refused_without_it(parser, flags):
    words = f"{flags.split()[0]} needs --optimizer muon --use-megatron-fsdp; add them or"
    for others in (ADAM, "--optimizer muon"):
        on_the_line(parser, f"{others} {flags}", words)


IN_PARTS = (
    r"--muon-tp-mode (distributed|duplicated) is not supported with {}, .* 2; use --muon-tp-mode"
    r" blockwise"
)
HASH = "--check-weight-hash-across-dp-replicas-interval"

OF_MUONS_RUN = [
    ("--cuda-graph-impl full_iteration", GRAPH),
    (
        "--qk-clip --attention-backend flash",
        "--attention-backend flash does not work with --qk-clip",
    ),
    (
        "--log-max-attention-logit --cuda-graph-impl local",
        "--cuda-graph-impl does not work with --log-max-attention",
    ),
    (
        "--qk-clip --experimental-attention-variant dsa",
        "--experimental-attention-variant does not work with --qk-clip",
    ),
    ("--optimizer-cuda-graph", "--optimizer-cuda-graph does not work with Muon under"),
    (
        "--qk-clip --qk-layernorm",
        "--qk-layernorm does not work with --qk-clip; leave one of the two out",
    ),
    ("--log-max-attention-logit --qk-layernorm", None),
    ("--qk-clip --qk-clip-alpha 1.0", "-alpha 1 is out of range"),
    ("--use-precision-aware-optimizer", "-optimizer does not work with Muon"),
    ("--megatron-fsdp-main-params-dtype bf16", "-main-params-dtype does not work with Muon"),
    ("--optimizer-cpu-offload", "-cpu-offload does not work with Muon"),
    ("--optimizer dist_muon", "megatron-core's layer-wise Muon"),
    ("--muon-split-gated-mlp", "--muon-split-gated-mlp has no gate to split"),
    (
        "--muon-split-heads --muon-no-split-qkv",
        "--muon-no-split-qkv does not work with --muon-split-heads",
    ),
    (
        "--adaptive-muon-beta2 0.5",
        "-beta2 needs --optimizer adaptive_muon; add it or leave --adaptive",
    ),
    # exchange and strategy
    (
        "--muon-exchange allgather --muon-exchange-dtype bf16",
        "--muon-exchange-dtype has no effect here",
    ),
    (
        "--muon-exchange allgather --muon-team-size 2",
        "-team-size has no effect here: --muon-exchange allgather gathers",
    ),
    ("--muon-exchange allgather --muon-exchange-buffer-mb 8", "gathers fp32, matrix by matrix"),
    ("--muon-share-replicated", "--muon-share-replicated has no effect here: it is for no_shard"),
    (f"{NO_SHARD} --muon-exchange allgather", "--muon-exchange has no effect here"),
    (f"{NO_SHARD} --muon-ns gram", "--muon-ns has no effect here"),
    (
        f"{NO_SHARD} --num-distributed-optimizer-instances 2",
        "-instances does not work with .* no_shard",
    ),
    (SHARED, None),
    (f"{SHARED} --muon-exchange allgather", "--muon-exchange has no effect here"),
    (
        f"{SHARED} --muon-team-size 4",
        "-team-size has no effect .*: --muon-share-replicated gives .* update; leave it out",
    ),
    (f"{NORMUON} --muon-team-size 2", "NorMuon .*; use --muon-team-size 1"),
    # blocks that tensor-parallel replicas have in parts
    (f"{SHARED} --muon-tp-mode distributed {TP2}", IN_PARTS.format("--muon-share-replicated")),
    (
        f"{NO_SHARD} --muon-split-heads {TP2} --muon-tp-mode duplicated",
        IN_PARTS.format("--muon-split-heads"),
    ),
    (f"{NO_SHARD} {SPHERE} {TP2} --muon-tp-mode duplicated", IN_PARTS.format("--muon-hyperball")),
    (
        f"{NO_SHARD} {NORMUON} {TP2} --muon-tp-mode duplicated",
        IN_PARTS.format("--optimizer adaptive_muon"),
    ),
    (f"{SHARED} --muon-tp-mode blockwise {TP2}", None),
    (f"{NO_SHARD} --muon-split-heads {TP2} --muon-tp-mode blockwise", None),
    (f"{NORMUON} --muon-tp-mode duplicated {TP2}", None),
    # decay and norms
    (
        "--muon-hyperball --weight-decay 0.1",
        "-decay 0.1 does not work with --muon-hyperball; use --weight-decay 0$",
    ),
    ("--muon-hyperball", "--weight-decay 0.01 does not work with .*; use --weight-decay 0$"),
    (
        f"{SPHERE} --muon-cautious-weight-decay",
        "--muon-cautious-weight-decay does not work with --muon-hyperball",
    ),
    (
        f"{SPHERE} --optimizer adaptive_muon",
        "--optimizer adaptive_muon does not work with --muon-hyperball",
    ),
    (f"{SPHERE} --qk-clip", "--qk-clip does not work with"),
    (
        "--muon-cautious-weight-decay --weight-decay 0",
        "--weight-decay 0 does not work with --muon-cautious-weight-decay",
    ),
    # where momentum lives
    ("--muon-offload cpu --muon-offload-fraction 0.5 --muon-ns-device cpu", None),
    (f"{NVME} --muon-offload-buffer-mb 1 --muon-momentum-dtype int8", None),
    ("--muon-momentum-dtype bf16", None),
    (
        f"{NVME} --muon-offload-state all --muon-offload-fraction 0.5 --muon-momentum-dtype int8",
        None,
    ),
    (ALL, None),
    (f"{NO_SHARD} {SPHERE} --muon-offload cpu", None),
    (f"{NVME} --muon-offload-fraction 0", "--muon-offload-fraction 0 is out of range"),
    (f"{NVME} --muon-offload-buffer-mb inf", "--muon-offload-buffer-mb inf is not finite"),
    ("--muon-offload nvme", "--muon-offload nvme needs --muon-offload-dir DIR"),
    ("--muon-offload cpu --muon-offload-dir x", "--muon-offload-dir needs --muon-offload nvme"),
    ("--muon-offload-fraction 0.5", "--muon-offload-fraction needs --muon-offload cpu or nvme"),
    (f"{NVME} --muon-ns-device accelerator", "this run has none"),
    ("--muon-ns-device cpu", "--muon-ns-device needs --muon-offload cpu or nvme"),
    (
        "--muon-offload-state all",
        "--muon-offload-state needs --muon-offload cpu or nvme, and it is none",
    ),
    *(
        (
            f"{ALL} {flags}",
            f"{' '.join(flags.split()[:shown])} does not work with --muon-offload-state all",
        )
        for flags, shown in (
            *(
                ("--muon-ns-device cpu", 2),
                ("--optimizer adaptive_muon", 2),
                (SHARED, 2),
                (SPHERE, 1),
            ),
            *(("--fp8-format hybrid", 1), ("--fp4-format e2m1", 1), ("--qk-clip", 1)),
        )
    ),
    *(
        line
        for flags in ("--muon-offload cpu", NVME, "--muon-momentum-dtype int8")
        for line in (
            (
                f"{NO_SHARD} {flags}",
                f"{flags.split()[0]} has no effect here: .*--muon-share-replicated",
            ),
            (f"{SHARED} {flags}", None),
        )
    ),
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
        ("--muon-momentum-dtype fp8", "invalid choice: 'fp8'"),
        *(
            (
                f"{SPHERE} {flag} 0.1",
                f"{flag} 0.1 does not work with --muon-hyperball; use {flag} 0",
            )
            for flag in ("--start-weight-decay", "--end-weight-decay")
        ),
        *(
            (f"{ALL} {flag}", f"{flag.split()[0]} does not work with --muon-offload-state all")
            for flag in (
                "--log-params-norm",
                "--save-params-interval 5",
                f"{HASH} 5",
                "--async-save",
            )
        ),
        *(
            (f"{adaptive} {flags}", None)
            for adaptive in ("", "--optimizer adaptive_muon")
            for flags in OF_MUON[:5]
        ),
    ],
)
def test_what_only_flags_can_ask_for_is_refused(parser, line, words):
    on_the_line(parser, f"{MUON} {line}", words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}, GRAPH),
        (
            {"megatron_fsdp_main_params_dtype": torch.bfloat16},
            "-main-params-dtype does not work with Muon",
        ),
        ({"megatron_fsdp_main_params_dtype": torch.float32}, None),
        (
            {"muon_cautious_weight_decay": True, "decoupled_weight_decay": False},
            "=False does not work",
        ),
        (
            {"qk_clip": True, "fp8_dot_product_attention": True},
            "fp8_dot_product_attention=True does not",
        ),
        (
            {"muon_exchange": "pigeon"},
            "--muon-exchange pigeon does not exist; use owner, allgather",
        ),
        # of the latents
        ({"qk_clip": True, "multi_latent_attention": True, "qk_layernorm": True}, None),
    ],
)
def test_what_only_a_script_can_ask_for_is_refused(given, words):
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
