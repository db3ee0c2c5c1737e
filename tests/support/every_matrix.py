"""Small models of transformers, and a reference that trains them on whole matrices.

A model is trained once by the reference; its start and the gradients of its steps are kept. The
optimizer under test gets parts of them (`placements`), and each rank compares what it holds with
its part of what the reference has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import megatron_muon

STEPS = 10
LR, ADAMW_LR, DECAY = 0.02, 3e-3, 0.1
SETTINGS: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {"moment2_method": "normuon"},
    # of less, elements near zero are rounding alone
    "adamuon": {"moment2_method": "adamuon", "moment2_eps": 1e-2},
    "hyperball": {"hyperball": True, "weight_decay": 0.0, "adamw_weight_decay": DECAY},
    "all-gather": {"exchange": "allgather"},
    "host": {"offload": "cpu"},
    "disk": {"offload": "nvme"},
    "int8": {"momentum_dtype": "int8"},
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
    excluded: Sequence[str] = ("embed", "lm_head", "wte", "wpe", "classifier", "bias")

    def build(self) -> nn.Module:
        """The model, from seed 0."""
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**self.config)
        # grouped products want sizes in multiples of 16 bytes
        config._experts_implementation = "eager"
        is_vision = "image_size" in self.config
        kind: Any = (
            transformers.AutoModelForImageClassification
            if is_vision
            else transformers.AutoModelForCausalLM
        )
        return kind.from_config(config, attn_implementation="eager").train()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The input of a step."""
        generator = torch.Generator().manual_seed(step)
        if "image_size" in self.config:
            images = torch.randn(16, 3, 8, 8, generator=generator)
            return {"pixel_values": images, "labels": torch.randint(2, (16,), generator=generator)}
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
        sizes = next((sizes for part, sizes in self.split.items() if part in name), (rows,))
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


class ScannedLayer(nn.Module):
    """Layers whose experts are stacked in one parameter `(L, E, m, n)`, as scanned models have
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterDict(
            {
                "up_proj": nn.Parameter(torch.randn(2, 3, 10, 21) / 5),
                "down_proj": nn.Parameter(torch.randn(2, 3, 21, 10) / 5),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for ups, downs in zip(
            self.experts["up_proj"].unbind(), self.experts["down_proj"].unbind(), strict=True
        ):
            x = x + sum(
                torch.tanh(x @ up.mT) @ down.mT
                for up, down in zip(ups.unbind(), downs.unbind(), strict=True)
            )
        return x


class ScannedModel(nn.Module):
    """The least around such layers that can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 21)
        self.model = nn.ModuleDict({"layers": nn.ModuleList([ScannedLayer()])})
        self.lm_head = nn.Linear(21, 50, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.model["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        loss = nn.functional.cross_entropy(
            self.lm_head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
        )
        return SimpleNamespace(loss=loss)


@dataclass(frozen=True)
class Scanned(Model):
    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return ScannedModel()


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
    "llama": Model({"model_type": "llama", **_TEXT}),
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
    "scanned": Scanned({"vocab_size": 50}, split={"up_proj": (4, 6)}),
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
    "vit": Model(
        {
            "model_type": "vit",
            "hidden_size": 22,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
        flatten={"projection": True},
    ),
}


class Whole:
    """A model's weights, and the reference's optimizers of them: whole matrices in one process."""

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any],
    ) -> None:
        from tests.support.reference import SplitAdaptiveMuon, SplitHyperball, SplitMuon

        self.model, self.weights = model, {name: weight.clone() for name, weight in weights.items()}
        self._parts: dict[str, list[nn.Parameter]] = {}
        rest: list[dict[str, Any]] = []
        for name, weight in self.weights.items():
            # which share the weight's memory
            parts = [nn.Parameter(part) for part in model.matrices(name, weight)]
            for part in parts:
                part.row_blocks = model.blocks(name, len(part))  # type: ignore[attr-defined]
            if not parts:
                parts = [nn.Parameter(weight)]
                rest.append({"params": parts, "weight_decay": DECAY if weight.ndim > 1 else 0.0})
            self._parts[name] = parts
        taken = [
            part for parts in self._parts.values() for part in parts if hasattr(part, "row_blocks")
        ]
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
        if settings.get("moment2_method"):
            eps = settings.get("moment2_eps", 1e-8)
            kind, more = (
                SplitAdaptiveMuon,
                {
                    "moment2_method": settings["moment2_method"],
                    "beta2": 0.95,
                    "eps": eps,
                },
            )
            given |= more
        self._optimizers = [kind(taken, **given)]
        adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), eps=1e-8)
        self._optimizers.append(adamw)

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """One update from whole gradients; of a matrix whose gradient is missing or not finite,
        none.
        """
        for name, parts in self._parts.items():
            whole = gradients.get(name)
            several = (
                [None] * len(parts)
                if whole is None
                else self.model.matrices(name, whole) or [whole]
            )
            for part, gradient in zip(parts, several, strict=True):
                part.grad = gradient if gradient is not None and gradient.isfinite().all() else None
        for optimizer in self._optimizers:
            optimizer.step()


@dataclass(frozen=True)
class Run:
    """Weights at the start of a training by the reference, the gradients of each step, and the
    weights at the end.
    """

    start: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    end: dict[str, torch.Tensor]


@functools.cache
def trained(name: str) -> Run:
    """A model's training, by its own gradients."""
    torch.set_num_threads(1)
    module = MODELS[name].build()
    start = {key: p.detach().clone() for key, p in module.named_parameters()}
    whole, gradients = Whole(MODELS[name], start, {}), []
    for step in range(STEPS):
        with torch.no_grad():
            for key, p in module.named_parameters():
                p.copy_(whole.weights[key])
        module.zero_grad()
        module(**MODELS[name].batch(step)).loss.backward()
        gradients.append(
            {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
        )
        whole.step(gradients[-1])
    return Run(start, gradients, whole.weights)


@functools.cache
def expected(name: str, settings: str) -> dict[str, torch.Tensor]:
    """Weights after the gradients of `trained`: by the reference, or by one process where momentum
    is rounded.
    """
    run, given = trained(name), SETTINGS[settings]
    if given.get("momentum_dtype"):
        weights = {key: nn.Parameter(weight.clone()) for key, weight in run.start.items()}
        optimizer = MODELS[name].muon(weights.items(), **given)
        for gradients in run.gradients:
            for key, p in weights.items():
                p.grad = gradients[key].clone()
            optimizer.step()
        return {key: p.detach() for key, p in weights.items()}
    whole = Whole(MODELS[name], run.start, given)
    for gradients in run.gradients:
        whole.step(gradients)
    return whole.weights
