"""A small model that is not Megatron's, sharded by every framework that `megatron_muon.Muon`
knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megatron_muon
from megatron_muon import cpu

WORDS, WIDTH, INNER = 13, 23, 38


class Net(nn.Module):
    """Odd shapes, and with `narrow` and `back` matrices of which most ranks hold no row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, INNER),
                nn.GELU(),
                nn.Linear(INNER, WIDTH),
            )
            for _ in range(2)
        )
        self.narrow, self.back = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each next token."""
        x = self.embed_tokens(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer(x)
        x = x + self.back(self.narrow(x))
        scores = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(
            scores.flatten(0, 1),
            tokens[:, 1:].flatten(),
        )


def device() -> str:
    """Where models are: on what stands in for a GPU, where something does (two_memories.py)."""
    return "cuda" if cpu.installed() else "cpu"


def tokens(steps: int) -> list[torch.Tensor]:
    """A batch for each step, the same on every rank: averages over ranks are the gradients of one
    process.
    """
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(
            WORDS,
            (4, 9),
            generator=generator,
        )
        for _ in range(steps)
    ]
    return [batch.to(device()) for batch in batches]


@dataclass
class Training:
    """A model and its Muon as a framework gives them back; `whole` makes a parameter or state
    whole. Collective.
    """

    model: nn.Module
    optimizer: Any
    whole: Callable[[torch.Tensor], torch.Tensor] = field(
        default=lambda tensor: full(tensor),
    )

    def step(self, batch: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole weights by name, as the optimizer has them. Collective."""
        names = {p: each.name for p, each in self.optimizer.selection.choices.items()}
        return {
            name.replace("module.", ""): self.whole(parameter).clone()
            for parameter, name in names.items()
        }


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def full_of_uneven(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of rows that lie on the ranks as a framework chose, one after the other."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    parts: list[Any] = [None] * dist.get_world_size(tensor.device_mesh.get_group(-1))
    dist.all_gather_object(
        parts, tensor._local_tensor.detach().reshape(-1), group=tensor.device_mesh.get_group(-1)
    )
    whole = torch.cat(parts)
    assert whole.numel() >= tensor.numel()
    return whole[: tensor.numel()].view(tensor.shape)  # replicas are equal


SETTINGS: Mapping[str, Any] = {"lr": 0.02, "adamw_lr": 3e-3, "fp32_matmul_prec": "highest"}


def muon(model: nn.Module, **settings: Any) -> Any:
    return megatron_muon.Muon(model.named_parameters(), **{**SETTINGS, **settings})


def plain(**settings: Any) -> Training:
    model = Net().to(device())
    return Training(model, muon(model, **settings))


def ddp(**settings: Any) -> Training:
    model = nn.parallel.DistributedDataParallel(Net().to(device()))
    return Training(model, muon(model, **settings))


def fsdp2(
    shape: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Training:
    """`fully_shard` on a mesh of `shape`, of all ranks in a row without one."""
    names = ("replicate", "shard")[-max(len(shape), 1) :]
    mesh = init_device_mesh(device(), shape or (dist.get_world_size(),), mesh_dim_names=names)
    model = Net().to(device(), dtype)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **(options or {}))
    return Training(model, muon(model, **settings))


def fsdp2_tp(**settings: Any) -> Training:
    """Layers cut by tensor parallelism over two ranks, rows and columns, beside `fully_shard`."""
    mesh = init_device_mesh(
        device(),
        (dist.get_world_size() // 2, 2),
        mesh_dim_names=("dp", "tp"),
    )
    model = Net().to(device())
    plan = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
    plan |= {"narrow": ColwiseParallel(), "back": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    return Training(model, muon(model, **settings))


MEGATRON_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"


def megatron_fsdp(
    strategy: str = "optim_grads_params",
    package: str = MEGATRON_FSDP,
    **settings: Any,
) -> Training:
    """Megatron-FSDP as a library: that of megatron-core's wheel, or the package `megatron_fsdp`."""
    library = importlib.import_module(package)
    shape = (dist.get_world_size(), 1)
    model = library.fully_shard_model(
        Net().to(device()),
        device_mesh=init_device_mesh(device(), shape, mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[nn.Sequential],
        zero_dp_strategy=strategy,
    )
    model._replace_param_with_distributed_if_needed()
    optimizer = library.fully_shard_optimizer(muon(model, **settings))
    return Training(model, optimizer, whole=full_of_uneven)
