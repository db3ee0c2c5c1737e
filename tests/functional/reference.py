"""An independent optimizer on whole matrices in one process: what sharded training has to reproduce.

Muon is emerging-optimizers' own class (torch.optim.Muon iterates in bf16 only), with a QKV split by row indices; the
rest is torch's AdamW or Adam, or emerging-optimizers' Lion. Nothing of megatron_muon or of Megatron is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from emerging_optimizers.scalar_optimizers import Lion

from tests.functional.model import Case, cosine, gradient_of, initial_value


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon takes a parameter: 2D, and neither an embedding nor the output layer."""
    return len(shape) == 2 and "embedding" not in name and "output_layer" not in name


def qkv_rows(case: Case) -> list[list[int]]:
    """The rows of the query, key and value block in Megatron's fused matrix.

    Query group after query group, each holds the rows of its query heads, of its key head and of its value head.
    """
    width = case.hidden // case.heads
    heads_in_group = case.heads // case.query_groups
    query: list[int] = []
    key: list[int] = []
    value: list[int] = []
    row = 0
    for _ in range(case.query_groups):
        for rows, heads in ((query, heads_in_group), (key, 1), (value, 1)):
            rows.extend(range(row, row + heads * width))
            row += heads * width
    return [query, key, value]


class SplitMuon(Muon):
    """emerging-optimizers' Muon that orthogonalises blocks of rows alone."""

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **_group: Any) -> torch.Tensor:
        blocks = getattr(p, "row_blocks", None)
        if blocks is None:
            return self.scaled_orthogonalize_fn(grad)
        update = torch.empty_like(grad)
        for rows in blocks:
            update[rows] = self.scaled_orthogonalize_fn(grad[rows])
        return update


class Reference:
    """The whole model's parameters and their optimizers."""

    def __init__(self, case: Case, shapes: dict[str, tuple[int, ...]], *, steps: int = 10) -> None:
        torch.set_num_threads(1)
        self.case, self.shapes, self.steps, self.steps_done = case, shapes, steps, 0
        self.weights = {name: torch.nn.Parameter(initial_value(name, shape)) for name, shape in shapes.items()}
        settings = case.settings
        decay = settings["weight_decay"]
        matrices, rest = [], []
        for name, weight in self.weights.items():
            if not case.trains(name):
                continue
            if is_matrix(name, shapes[name]):
                matrices.append(weight)
                if "linear_qkv" in name and settings["muon_split_qkv"]:
                    weight.row_blocks = qkv_rows(case)
            else:
                rest.append({"params": [weight], "weight_decay": decay if weight.ndim > 1 else 0.0})
        self.optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self.optimizers.append(self._muon(matrices))
        if rest:
            self.optimizers.append(self._scalar(rest))

    def step(self, gradient: Callable[[str, Sequence[int], int], torch.Tensor] = gradient_of) -> None:
        """One update from whole gradients."""
        settings = self.case.settings
        for optimizer in self.optimizers:
            highest, lowest = settings["lr"], settings["min_lr"]
            if isinstance(optimizer, Muon):
                highest = highest if settings["muon_lr"] is None else settings["muon_lr"]
                lowest = lowest if settings["muon_min_lr"] is None else settings["muon_min_lr"]
            for group in optimizer.param_groups:
                group["lr"] = cosine(highest, lowest, self.steps_done, self.steps)
                for weight in group["params"]:
                    name = next(name for name, other in self.weights.items() if other is weight)
                    weight.grad = gradient(name, self.shapes[name], self.steps_done)
            optimizer.step()
        self.steps_done += 1

    def whole(self) -> dict[str, torch.Tensor]:
        """Every parameter."""
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def momentum(self) -> dict[str, torch.Tensor]:
        """Muon's momentum of every matrix."""
        return {
            name: state["momentum_buffer"].clone()
            for name, weight in self.weights.items()
            for optimizer in self.optimizers
            if "momentum_buffer" in (state := optimizer.state.get(weight, {}))
        }

    def _muon(self, matrices: list[torch.nn.Parameter]) -> Muon:
        settings = self.case.settings
        return SplitMuon(
            matrices,
            lr=settings["lr"],
            momentum=settings["muon_momentum"],
            weight_decay=settings["weight_decay"],
            nesterov=settings["muon_nesterov"],
            weight_decay_method="decoupled" if settings["decoupled_weight_decay"] else "l2",
            fp32_matmul_prec=settings["muon_fp32_matmul_prec"],
            coefficient_type="quintic",
            num_ns_steps=5,
            scale_mode=settings["muon_scale_mode"],
            extra_scale_factor=settings["muon_extra_scale_factor"],
        )

    def _scalar(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        settings = self.case.settings
        if settings["muon_scalar_optimizer"] == "lion":
            return Lion(groups, lr=settings["lr"], betas=(0.95, 0.98))
        kind = torch.optim.AdamW if settings["decoupled_weight_decay"] else torch.optim.Adam
        return kind(groups, lr=settings["lr"], betas=(0.9, 0.999), eps=1e-8)
