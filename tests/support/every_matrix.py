"""Small models of transformers, and a reference that updates them on whole matrices.

Weights and gradients of a `Run` are the same for the reference and the optimizer under test, which
gets parts of them (`placements`); each rank compares what it holds with its part of what the
reference has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import megatron_muon

STEPS = 6
LR, ADAMW_LR, DECAY = 0.02, 3e-3, 0.1
SETTINGS: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {"moment2_method": "normuon"},
    # of less, elements near zero are rounding alone
    "adamuon": {"moment2_method": "adamuon", "moment2_eps": 1e-2},
    "hyperball": {"hyperball": True, "weight_decay": 0.0, "adamw_weight_decay": DECAY},
    "all-gather": {"exchange": "allgather"},
    "disk": {"offload": "nvme"},
}


@dataclass(frozen=True)
class Model:
    """A configuration of transformers, and what a user would say of its matrices."""

    config: dict[str, Any]
    transposed: Sequence[str] = ()
    flatten: Mapping[str, bool] = field(default_factory=dict)
    # rows of the blocks, repeated
    split: Mapping[str, tuple[int, ...] | str] = field(default_factory=dict)
    # parts of names for AdamW
    excluded: Sequence[str] = ("embed", "lm_head", "wte", "wpe", "bias")

    def build(self) -> nn.Module:
        """The model, from seed 0."""
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**self.config)
        # grouped products want sizes in multiples of 16 bytes
        config._experts_implementation = "eager"
        kind: Any = transformers.AutoModelForCausalLM
        return kind.from_config(config, attn_implementation="eager").train()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The input of a step."""
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(self.config["vocab_size"], (8, 17), generator=generator)
        return {"input_ids": words, "labels": words}

    def matrices(self, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """What Muon reads a parameter as, views of it; none where AdamW takes it."""
        flat = any(self.flatten[part] for part in self.flatten if part in name)
        if whole.ndim < 2 or (not flat and any(part in name for part in self.excluded)):
            return []
        parts = [whole.flatten(1)]
        if not flat:
            parts = list(whole.view(-1, *whole.shape[-2:]))
        return (
            [part.T for part in parts] if any(part in name for part in self.transposed) else parts
        )

    def blocks(self, name: str, rows: int) -> list[slice]:
        """The rows of each of a matrix's blocks."""
        sizes = next(
            (sizes for part, sizes in self.split.items() if part in name),
            (rows,),
        )
        if sizes == "interleaved":
            return [slice(0, rows, 2), slice(1, rows, 2)]
        assert not isinstance(sizes, str)
        ends = [0, *itertools.accumulate(sizes * (rows // sum(sizes)))]
        assert ends[-1] == rows
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def muon(
        self, parameters: Iterable[tuple[str, torch.Tensor]], **settings: Any
    ) -> megatron_muon.Muon:
        """The optimizer under test."""
        mine = {"split": self.split, "transposed": self.transposed, "flatten": self.flatten}
        common = {
            "lr": LR,
            "adamw_lr": ADAMW_LR,
            "weight_decay": DECAY,
            "fp32_matmul_prec": "highest",
        }
        return megatron_muon.Muon(parameters, **{**common, **mine, **settings})


_TEXT: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 21,
    "intermediate_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
_EXPERTS = {"moe_intermediate_size": 10, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "head_dim": 4,
    "num_key_value_heads": 3,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: dict[str, Model] = {
    "qwen3-moe": Model(
        {"model_type": "qwen3_moe", **_TEXT, **_EXPERTS, "num_experts": 5},
        split={"gate_up_proj": (10, 10)},
    ),
    "deepseek-v3": Model(
        {"model_type": "deepseek_v3", **_TEXT, **_EXPERTS, **_LATENT}, split={"kv_b_proj": (6, 5)}
    ),
    "llama4": Model(  # stacks as (experts, inputs, outputs)
        {"model_type": "llama4_text", **_TEXT, "intermediate_size_mlp": 20, "num_local_experts": 4},
        transposed=("gate_up_proj", "experts.down_proj"),
        split={"gate_up_proj": (18, 18)},
    ),
    "gpt-oss": Model(  # as (experts, inputs, outputs), gate and up in turns
        {"model_type": "gpt_oss", **_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2},
        transposed=("gate_up_proj", "experts.down_proj"),
        split={"gate_up_proj": "interleaved"},
    ),
    "gpt2": Model(
        {
            "model_type": "gpt2",
            "vocab_size": 50,
            "n_embd": 22,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
        },
        transposed=("c_attn", "c_proj", "c_fc"),
        split={"c_attn": (22, 22, 22)},
    ),
}
SCANNED = "scanned"
_SHAPES = {
    "layers.experts.up_proj": (2, 3, 10, 21),
    "layers.experts.down_proj": (2, 3, 21, 10),
    "patch.projection.weight": (22, 3, 4, 4),
    "embed.weight": (50, 21),
}
"""Layers whose experts are stacked in one parameter `(L, E, m, n)`, as scanned models have them,
and a convolution.
"""

WITH_SCANNED = MODELS | {
    SCANNED: Model(
        {},
        split={"up_proj": (4, 6)},
        flatten={"projection": True},
    )
}


class Whole:
    """A model's weights, and the reference's optimizers of them: whole matrices in one process."""

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any],
    ) -> None:
        from megatron_muon.core.reference import SplitAdaptiveMuon, SplitHyperball, SplitMuon

        self.model, self.weights = model, {name: weight.clone() for name, weight in weights.items()}
        self._parts: dict[str, list[nn.Parameter]] = {}
        taken: list[nn.Parameter] = []
        rest: list[dict[str, Any]] = []
        for name, weight in self.weights.items():
            # which share the weight's memory
            parts = [nn.Parameter(part) for part in model.matrices(name, weight)]
            for part in parts:
                part.row_blocks = model.blocks(name, len(part))  # type: ignore[attr-defined]
            taken += parts
            if not parts:
                parts = [nn.Parameter(weight)]
                rest.append({"params": parts, "weight_decay": DECAY if weight.ndim > 1 else 0.0})
            self._parts[name] = parts
        given: dict[str, Any] = {
            "lr": LR,
            "momentum": 0.95,
            "nesterov": True,
            "weight_decay": settings.get("weight_decay", DECAY),
            "fp32_matmul_prec": "highest",
            "coefficient_type": "simple",
            "scale_mode": "shape_scaling",
        }
        kind: Any = SplitHyperball if settings.get("hyperball") else SplitMuon
        if method := settings.get("moment2_method"):
            kind = SplitAdaptiveMuon
            eps = settings.get("moment2_eps", 1e-8)
            given |= {"moment2_method": method, "beta2": 0.95, "eps": eps}
        adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), eps=1e-8)
        self._optimizers = [kind(taken, **given), adamw]

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """One update from whole gradients; of a matrix whose gradient is missing or not finite,
        none.
        """
        for name, parts in self._parts.items():
            whole = gradients.get(name)
            several: list[Any] = [None] * len(parts)
            if whole is not None:
                several = self.model.matrices(name, whole) or [whole]
            for part, gradient in zip(parts, several, strict=True):
                part.grad = gradient if gradient is not None and gradient.isfinite().all() else None
        for optimizer in self._optimizers:
            optimizer.step()


@dataclass(frozen=True)
class Run:
    """A model's weights at the start, the gradients of each step, and the reference's weights at
    the end.
    """

    model: str
    settings: str
    start: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    end: dict[str, torch.Tensor]

    def muon(
        self, parameters: Mapping[str, torch.Tensor], folder: str = "", **other: Any
    ) -> megatron_muon.Muon:
        """The optimizer under test; momentum on disk goes into the folder."""
        settings = {**SETTINGS[self.settings], **other}
        if "offload" in settings:
            settings["offload_dir"] = folder
        return WITH_SCANNED[self.model].muon(parameters.items(), **settings)


@functools.cache
def run_of(name: str, settings: str) -> Run:
    """A run of a model."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def randoms(
        scale: float,
        shapes: Mapping[str, Sequence[int]],
    ) -> dict[str, torch.Tensor]:
        return {
            key: scale * torch.randn(tuple(shape), generator=generator)
            for key, shape in shapes.items()
        }

    shapes = _SHAPES
    if name != SCANNED:
        shapes = {key: p.shape for key, p in MODELS[name].build().named_parameters()}
    start = randoms(0.2, shapes)
    gradients = [randoms(0.01, shapes) for _ in range(STEPS)]
    whole = Whole(WITH_SCANNED[name], start, SETTINGS[settings])
    for each in gradients:
        whole.step(each)
    return Run(name, settings, start, gradients, whole.weights)
