"""Rounded momentum of matrices that teams cut, on replicas of the same rows."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import megatron_muon


def momentum_of_replicas(rank: int, world_size: int) -> torch.Tensor:
    """In a worker: momentum of a rank's rows after two steps; two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model = torch.nn.Linear(384, 256, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = megatron_muon.Muon(
        model.named_parameters(), lr=0.02, momentum_dtype="int8", team_size="2", matrices=["*"]
    )
    for _ in range(2):
        # neighboring columns of different magnitude, which a scale too many would change
        gradient = torch.randn(256, 384) * torch.logspace(-3, 3, 384)
        local = distribute_tensor(gradient, mesh["shards"], [Shard(0)]).to_local()
        model.weight.grad = torch.zeros_like(model.weight)
        model.weight.grad.to_local().copy_(local)
        optimizer.step()
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
    return momentum.to_local().clone()
