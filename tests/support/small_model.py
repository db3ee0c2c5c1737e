"""A model with a parameter of every kind, and gradients, for the tests of `megatron_muon.Muon`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 6)
        self.conv = nn.Conv2d(1, 2, 3)
        self.layers = nn.ModuleList(
            [nn.Linear(6, 8), nn.Linear(8, 6)],
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.lm_head = nn.Linear(6, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return self.lm_head(x * self.scale).square().mean()


def give_gradients(parameters: Iterable[torch.Tensor], seed: int = 0) -> None:
    """Random gradients, the same for the same shapes and seed."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(
            p.shape,
            generator=generator,
            dtype=torch.float32,
        ).to(p.dtype)
