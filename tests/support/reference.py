"""An independent optimizer on whole matrices in one process: what sharded training has to
reproduce.

Muon is emerging-optimizers' own class (torch.optim.Muon iterates in bf16 only), with a QKV split by
row indices; the rest is torch's AdamW or Adam, or emerging-optimizers' Lion. Nothing of
megatron_muon or of Megatron is used.
"""

from __future__ import annotations

import ast
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from emerging_optimizers import psgd, registry
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon, Muon
from emerging_optimizers.scalar_optimizers import Lion

try:
    from emerging_optimizers import soap
except ImportError:  # 0.5
    from emerging_optimizers import legacy_soap as soap

from megatron_muon.core.reference import muon_on
from tests.support.case import (
    HYBRID,
    LATENT,
    QUERY_LATENT,
    Case,
    cosine,
    gradient_of,
    initial_value,
)


def is_matrix(case: Case, name: str, shape: Sequence[int]) -> bool:
    """Whether Muon takes a parameter: 2D or a stack of experts, and neither embedding nor output
    layer nor excluded.
    """
    if any(part in name for part in ("embedding", "output_layer", *case.excluded)):
        return False
    return len(shape) == 2 or (len(shape) == 3 and ".experts." in name)


def row_blocks(
    case: Case,
    name: str,
    shape: Sequence[int],
) -> list[list[int]] | None:
    """The rows of each block of a matrix, or of one expert of a stack; None for one block.

    Walks through the heads of Megatron's fused matrices row by row and says what each row belongs
    to.
    """
    settings, owner = case.settings, []
    if "linear_qkv." in name:
        width, in_group = case.hidden // case.heads, case.heads // case.query_groups
        kinds = ["query"] * in_group + ["gate"] * (in_group * case.output_gate) + ["key", "value"]
        owner = [(kind, head, width) for head, kind in enumerate(kinds * case.query_groups)]
    elif "in_proj" in name:
        owner = [
            (kind, kind, rows // case.tensor)
            for _ in range(case.tensor)
            for kind, rows in in_projection(name)
        ]
    elif "linear_kv_up_proj" in name:
        owner = [
            (kind, (kind, head), LATENT[size])
            for head in range(case.heads)
            for kind, size in (("key", "qk_head_dim"), ("value", "v_head_dim"))
        ]
    elif "linear_q_up_proj" in name or "linear_q_proj" in name:
        owner = [
            ("query", head, LATENT["qk_head_dim"] + LATENT["qk_pos_emb_head_dim"])
            for head in range(case.heads)
        ]
    elif "linear_kv_down_proj" in name:
        owner = [
            ("latent", "latent", LATENT["kv_lora_rank"]),
            ("rotary", "rotary", LATENT["qk_pos_emb_head_dim"]),
        ]
    elif "linear_qkv_down_proj" in name:
        owner = [("query", "query", QUERY_LATENT), ("latent", "latent", LATENT["kv_lora_rank"])]
        owner += [("rotary", "rotary", LATENT["qk_pos_emb_head_dim"])]
    elif "linear_q_down_proj" in name:
        owner = [("latent", "latent", QUERY_LATENT)]
    elif "linear_fc1" in name and case.swiglu and settings["muon_split_gated_mlp"]:
        parts = case.expert_tensor if ".experts." in name else case.tensor
        half = shape[-2] // (2 * parts)  # each tensor-parallel rank has rows of gate and then of up
        rows = range(shape[-2])
        return [[row for row in rows if row // half % 2 == which] for which in (0, 1)]
    if not owner or not settings["muon_split_qkv"]:
        return None
    blocks: dict[Any, list[int]] = {}
    row = 0
    per_head = settings["muon_split_heads"]
    for kind, head, rows in owner:
        blocks.setdefault(head if per_head else kind, []).extend(range(row, row + rows))
        row += rows
    assert row == shape[-2], (name, row, shape)
    return list(blocks.values())


def in_projection(name: str) -> list[tuple[str, int]]:
    """The parts of Mamba's or GatedDeltaNet's `in_proj` and their rows, in the order of their
    forward passes.
    """
    size = HYBRID
    if "mixer" in name:
        heads, state = size["mamba_num_heads"], size["mamba_num_groups"] * size["mamba_state_dim"]
        inner = heads * size["mamba_head_dim"]
        return [
            ("z", inner),
            ("x", inner),
            ("B", state),
            ("C", state),
            ("dt", heads),
        ]
    keys, values = (
        size[f"linear_num_{kind}_heads"] * size[f"linear_{kind}_head_dim"]
        for kind in ("key", "value")
    )
    heads = size["linear_num_value_heads"]
    return [
        ("query", keys),
        ("key", keys),
        ("value", values),
        ("z", values),
        ("beta", heads),
        ("alpha", heads),
    ]


def rows_to_scale(
    case: Case,
    name: str,
    gamma: list[float],
) -> Iterator[tuple[int, float]]:
    """Each row of a projection with its factor of QK-clip, by walking through the heads; `gamma` is
    of each group.
    """
    alpha = case.attention["qk_clip_alpha"]
    unit: list[tuple[str, int]] = []
    if "linear_qkv." in name:
        width, in_group = case.hidden // case.heads, case.heads // case.query_groups
        unit = [("query", in_group * width), ("gate", in_group * width * case.output_gate)]
        unit += [("key", width), ("value", width)]
    elif "linear_q_up_proj" in name or "linear_q_proj" in name:
        unit = [("query", LATENT["qk_head_dim"]), ("rotary", LATENT["qk_pos_emb_head_dim"])]
    elif "linear_kv_up_proj" in name:
        unit = [("key", LATENT["qk_head_dim"]), ("value", LATENT["v_head_dim"])]
    rows = itertools.count()
    for factor in gamma if unit else []:
        scales = {"query": factor**alpha, "key": factor ** (1.0 - alpha), "rotary": factor}
        for kind, count in unit:
            yield from ((next(rows), scales.get(kind, 1.0)) for _ in range(count))


REGISTERED = psgd, soap
"""Modules whose classes are registered by importing them."""

_ARGUMENTS = {
    "soap": {"betas": (0.9, 0.999), "use_kl_shampoo": True},
    "rekls": {"betas": (0.9, 0.999)},
}
"""Arguments that megatron-core's own factory gives, from the defaults of its config."""


class OfBlocks:
    """A class of emerging-optimizers on matrices whose blocks of rows are parameters of their own.

    One that draws random numbers draws for each block and step from a seed of the block's name.
    """

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        lr: float,
        weight_decay: float,
        *,
        cautious: bool,
    ) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        self._steps = 0
        kind = registry.get_optimizer_cls(name)
        self._cautious = weight_decay if cautious else 0.0
        decay = {"weight_decay": 0.0 if cautious else weight_decay}
        decay["weight_decay_method"] = "decoupled"
        self._make = lambda block: kind([block], lr=lr, **decay, **arguments)
        self._blocks: list[tuple[str, torch.Tensor, Any, torch.nn.Parameter, Any]] = []

    def add(self, label: str, weight: torch.Tensor, blocks: Sequence[Any]) -> None:
        """Take a matrix with the rows of its blocks."""
        for number, rows in enumerate(blocks):
            block = torch.nn.Parameter(weight.detach()[rows].clone())
            self._blocks.append((f"{label}/{number}", weight, rows, block, self._make(block)))

    @torch.no_grad()
    def step(self) -> None:
        """One update of every block."""
        for label, weight, rows, block, optimizer in self._blocks:
            block.grad = weight.grad[rows].clone()  # type: ignore[index]
            optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
                torch.manual_seed(zlib.crc32(f"{label}/{self._steps}".encode()))
                optimizer.step()
            before = weight[rows]
            shrinks = (before - block) * before >= 0.0
            block -= self._cautious * self.param_groups[0]["lr"] * shrinks * before
            weight[rows] = block
        self._steps += 1


class Reference:
    """The whole model's parameters and their optimizers. Experts of a stack are parameters of their
    own.
    """

    def __init__(
        self,
        case: Case,
        shapes: dict[str, tuple[int, ...]],
        *,
        steps: int = 10,
    ) -> None:
        torch.set_num_threads(1)
        self.case, self.shapes, self.steps, self.steps_done = case, shapes, steps, 0
        self.weights: dict[str, list[torch.nn.Parameter]] = {}
        settings = case.settings
        matrices: dict[int, list[torch.nn.Parameter]] = {}
        rest = []
        for name, shape in shapes.items():
            value = initial_value(name, shape)
            self.weights[name] = [
                torch.nn.Parameter(part) for part in (value if len(shape) == 3 else [value])
            ]
            if not case.trains(name):
                continue
            for weight in self.weights[name]:
                if is_matrix(case, name, shape):
                    steps_for = [steps for part, steps in case.steps_for if part in name]
                    matrices.setdefault((steps_for or [5])[-1], []).append(weight)
                    weight.row_blocks = row_blocks(case, name, shape) or [slice(None)]  # type: ignore[attr-defined]
                else:
                    decay = settings["weight_decay"] if weight.ndim > 1 else 0.0
                    rest.append({"params": [weight], "weight_decay": decay})
        if settings["optimizer"] in ("muon", "adaptive_muon"):
            self.optimizers = [self._muon(some, ns_steps) for ns_steps, some in matrices.items()]
        else:
            self.optimizers = [self._of_blocks(itertools.chain(*matrices.values()))]
        if rest:
            self.optimizers.append(self._scalar(rest))

    def step(
        self, gradient: Callable[[str, Sequence[int], int], torch.Tensor] = gradient_of
    ) -> None:
        """One update from whole gradients."""
        settings = self.case.settings
        for name, parts in self.weights.items():
            whole = gradient(name, self.shapes[name], self.steps_done)
            for weight, part in zip(parts, whole if whole.ndim == 3 else [whole], strict=True):
                weight.grad = part
        for optimizer in self.optimizers:
            highest, lowest = settings["lr"], settings["min_lr"]
            if isinstance(optimizer, Muon | AdaptiveMuon | OfBlocks):
                highest = highest if settings["muon_lr"] is None else settings["muon_lr"]
                lowest = lowest if settings["muon_min_lr"] is None else settings["muon_min_lr"]
            for group in optimizer.param_groups:
                group["lr"] = cosine(highest, lowest, self.steps_done, self.steps)
            optimizer.step()
        self.steps_done += 1

    def clip(self, logits: Callable[[int], Sequence[float]]) -> int:
        """QK-clip by the largest logits of a layer's heads, row by row; how many rows were
        scaled.
        """
        case, scaled = self.case, 0
        group_size = 1 if case.latent else case.heads // case.query_groups
        threshold = case.attention["qk_clip_threshold"]
        for name, (weight, *_) in self.weights.items():
            if "self_attention" in name:
                of_heads = logits(int(name.split("layers.")[1].split(".")[0]))
                of_groups = [max(heads) for heads in itertools.batched(of_heads, group_size)]
                gamma = [threshold / logit if logit > threshold else 1.0 for logit in of_groups]
                with torch.no_grad():
                    for row, factor in rows_to_scale(case, name, gamma):
                        weight[row] *= factor
                        scaled += factor != 1.0
        return scaled

    def whole(self) -> dict[str, torch.Tensor]:
        """Every parameter."""
        return {name: self._joined(name, parts) for name, parts in self.weights.items()}

    def state(self, slot: str) -> dict[str, torch.Tensor]:
        """A slot of the state of every matrix, `momentum_buffer` or `moment2_buffer`."""
        states = {
            weight: state
            for optimizer in self.optimizers
            for weight, state in optimizer.state.items()
        }
        return {
            name: self._joined(name, [states[part][slot] for part in parts])
            for name, parts in self.weights.items()
            if slot in states.get(parts[0], {})
        }

    def _joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = torch.stack(list(parts)) if len(self.shapes[name]) == 3 else parts[0]
        return whole.detach().clone()

    def _of_blocks(self, matrices: Iterator[torch.nn.Parameter]) -> OfBlocks:
        settings = self.case.settings
        optimizer = OfBlocks(
            settings["optimizer"],
            _ARGUMENTS.get(settings["optimizer"], {})
            | {
                name: ast.literal_eval(value)
                for name, value in (
                    pair.split("=") for pair in settings.get("matrix_optimizer_args", ())
                )
            },
            settings["lr"],
            settings["weight_decay"],
            cautious=settings.get("muon_cautious_weight_decay", False),
        )
        labels = {}
        for name, parts in self.weights.items():
            for number, part in enumerate(parts):
                label = name.replace(".experts.experts.", ".experts.local_experts.")
                labels[part] = label if len(parts) == 1 else f"{label}[{number}]"
        for weight in matrices:
            optimizer.add(labels[weight], weight, weight.row_blocks)  # type: ignore[attr-defined]
        return optimizer

    def _muon(
        self,
        matrices: list[torch.nn.Parameter],
        ns_steps: int,
    ) -> torch.optim.Optimizer:
        settings = self.case.settings
        common = {
            "lr": settings["lr"],
            "momentum": settings["muon_momentum"],
            "weight_decay": settings["weight_decay"],
            "nesterov": settings["muon_nesterov"],
            "weight_decay_method": "decoupled" if settings["decoupled_weight_decay"] else "l2",
            "fp32_matmul_prec": settings["muon_fp32_matmul_prec"],
            "coefficient_type": "quintic",
            "num_ns_steps": ns_steps,
            "scale_mode": settings["muon_scale_mode"],
            "extra_scale_factor": settings["muon_extra_scale_factor"],
        }
        variants = []
        if settings["optimizer"] == "adaptive_muon":
            variants.append(settings.get("adaptive_muon_moment2_method", "adamuon"))
        if settings.get("muon_cautious_weight_decay", False):
            variants.append("cautious")
        if settings.get("muon_hyperball"):
            variants.append("hyperball")
        second_moment = {
            "beta2": settings.get("adaptive_muon_beta2", 0.95),
            "eps": settings.get("adaptive_muon_eps", 1e-8),
        }
        return muon_on(matrices, variants, second_moment, **common)

    def _scalar(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        settings = self.case.settings
        if settings["muon_scalar_optimizer"] == "lion":
            return Lion(groups, lr=settings["lr"], betas=(0.95, 0.98))
        kind = torch.optim.AdamW if settings["decoupled_weight_decay"] else torch.optim.Adam
        return kind(groups, lr=settings["lr"], betas=(0.9, 0.999), eps=1e-8)
