"""A small GPT and how it is trained, for tests that run on several ranks: sizes, initial values,
gradients, batches.

The sizes divide by nothing, the initial values and the gradients depend on names alone: they are
the same for every strategy and number of ranks. Imports no Megatron.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SEQUENCE = 8
VOCABULARY = 131
LATENT = {"kv_lora_rank": 6, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3}
QUERY_LATENT = 10
HYBRID = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 3,
    "mamba_state_dim": 5,
    "mamba_num_groups": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4,
}
STACKED = {"linear_fc1": (10, 6), "linear_fc2": (5, 6)}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes:
        ffn: with 45 Megatron-FSDP cuts a bucket every 90 elements, so ranks share matrices; with 47
            every 1,410, so small matrices lie whole on one rank and other ranks hold none of their
            rows.
        optimizer: fields of MuonOptimizerConfig that differ from `config`'s.
        frozen: a substring of parameter names for each kind of parameter that does not train.
        own_loop: the loop leaves finishing the gradient reduction to the optimizer, as a script
            without Megatron's finalize_model_grads does.
        trainable: if given, only parameters with one of these substrings train.
        tensor: tensor parallel size; `sequence` adds sequence parallelism.
        context: context parallel size of the process groups; the model itself is built without.
        instances: instances of the distributed optimizer (HSDP), which share its state if `outer`
            is "optim".
        experts: number of experts of each layer, over `expert_parallel` ranks, each cut over
            `expert_tensor`.
        stacked: each layer has weights `(stacked, rows, columns)` beside its MLP, as experts kept
            in one parameter are; the forward pass does not use them.
        latent: multi-latent attention, with the query's latent where `query_latent`; with
            `fused_down` one projection makes both latents.
        output_gate: attention with a gate for each query head.
        hybrid: layers of a HybridModel, a letter each as in --hybrid-layer-pattern, instead of
            `layers`; never run.
        attention: fields of TransformerConfig for QK-clip and for biases.
        excluded: substrings of the names that `muon_exclude` names, for the reference.
        steps_for: Newton-Schulz steps by such substrings of names, for the reference; the last one
            that is found holds.
    """

    strategy: str = "optim_grads_params"
    layers: int = 2
    hidden: int = 30
    heads: int = 6
    query_groups: int = 3
    ffn: int = 45
    swiglu: bool = False
    tied: bool = False
    bf16: bool = False
    overlap: bool = False
    own_loop: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    trainable: tuple[str, ...] | None = None
    vocabulary: int = VOCABULARY
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    instances: int = 1
    outer: str = "no_shard"
    experts: int = 0
    expert_parallel: int = 1
    expert_tensor: int = 1
    stacked: int = 0
    latent: bool = False
    query_latent: bool = False
    fused_down: bool = False
    output_gate: bool = False
    hybrid: str = ""
    attention: dict[str, Any] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    steps_for: tuple[tuple[str, int], ...] = ()

    def but(self, **changes: Any) -> Case:
        """This case with other values."""
        return replace(self, **changes)

    @property
    def settings(self) -> dict[str, Any]:
        """The optimizer's settings, also for the reference."""
        return {
            "optimizer": "muon",
            "lr": 0.01,
            "min_lr": 0.001,
            "weight_decay": 0.1,
            "decoupled_weight_decay": True,
            "muon_lr": None,
            "muon_min_lr": None,
            "muon_momentum": 0.9,
            "muon_nesterov": True,
            "muon_split_qkv": True,
            "muon_split_gated_mlp": False,
            "muon_split_heads": False,
            "muon_scale_mode": "spectral",
            "muon_extra_scale_factor": 0.2,
            "muon_fp32_matmul_prec": "highest",
            "muon_scalar_optimizer": "adam",
            "clip_grad": 0.0,
            **self.optimizer,
        }

    @property
    def clips(self) -> bool:
        """Whether QK-clip is at work."""
        return bool(self.attention.get("qk_clip"))

    def trains(self, name: str) -> bool:
        """Whether the parameter of this name has a gradient."""
        if self.trainable is not None:
            return any(part in name for part in self.trainable)
        return not any(part in name for part in self.frozen)


def values_of(
    name: str,
    shape: Sequence[int],
    *,
    salt: str = "",
) -> torch.Tensor:
    """Normal fp32 numbers that depend on the name alone."""
    generator = torch.Generator().manual_seed(
        zlib.crc32(f"{salt}/{name}".encode()),
    )
    return torch.randn(tuple(shape), generator=generator)


def initial_value(name: str, shape: Sequence[int]) -> torch.Tensor:
    """A parameter's value before the first step."""
    return (1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.1 * values_of(
        name, shape
    )


def gradient_of(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
    """A parameter's whole gradient at a step."""
    return 0.01 * values_of(name, shape, salt=f"gradient{step}")


def batches(count: int, *, size: int = 24) -> list[torch.Tensor]:
    """`count` global batches of a text that can be learnt: each token follows from the one before,
    mostly.
    """
    generator = torch.Generator().manual_seed(7)
    result = []
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
        for _ in range(SEQUENCE):
            noise = torch.randint(0, 3, (size, 1), generator=generator)
            tokens = torch.cat(
                [tokens, (tokens[:, -1:] * 5 + noise) % VOCABULARY],
                dim=1,
            )
        result.append(tokens)
    return result


def cosine(highest: float, lowest: float, step: int, steps: int) -> float:
    """The learning rate of the step-th step of `steps`, by the formula and not by Megatron's
    code.
    """
    return lowest + 0.5 * (1.0 + math.cos(math.pi * step / steps)) * (highest - lowest)
