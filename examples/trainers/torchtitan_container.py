"""Muon in torchtitan: the config of an optimizers container, for `Trainer.Config(optimizer=...)`.

    torchrun --nproc-per-node 2 examples/trainers/torchtitan_container.py [--resume]

trains a small Llama of transformers under FSDP2 by what torchtitan's trainer calls of it: `build`,
`step`, `zero_grad`, the schedulers' container and the state of its checkpoints. Needs torchtitan
and transformers.
"""

from dataclasses import dataclass, field
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

import megatron_muon


class MuonContainer(OptimizersContainer):
    """One Muon for each part of the model, of which a pipeline has several."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Settings of `megatron_muon.Muon`; `param_groups` and `implementation` are ignored."""

        settings: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Create them after sharding, as torchtitan does; its checkpoints use the groups' names."""
        self.model_parts = model_parts
        self.optimizers = [
            megatron_muon.Muon(part.named_parameters(), **config.settings) for part in model_parts
        ]
        parameters = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                names = map(optimizer.selection.name, group["params"])
                group["param_names"] = [canonical_fqn(name) for name in names]
                parameters += group["params"]
        self._post_init(parameters)


class Weights:
    """The model's part of a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        """Of this model."""
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Its weights."""
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such weights."""
        set_model_state_dict(self.model, state)


def train() -> None:
    """Train, or go on from the checkpoint."""
    given = common.arguments(__doc__)
    dist.init_process_group("gloo" if common.ON_CPU else "nccl")
    device = torch.device("cpu" if common.ON_CPU else f"cuda:{dist.get_rank()}")
    model, tokens = common.small_llama().to(device), torch.tensor(common.rows(), device=device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizers = MuonContainer.Config(settings={"lr": 0.02, "adamw_lr": 3e-3}).build(
        model_parts=[model]
    )
    schedule = LRSchedulersContainer.Config(warmup_steps=2)
    schedulers = schedule.build(optimizers=optimizers, training_steps=common.STEPS)
    states = {"model": Weights(model), "optimizer": optimizers, "lr_scheduler": schedulers}
    if given.resume:
        dcp.load(states, checkpoint_id=given.folder)
    losses = []
    for step in range(common.SAVED * given.resume, common.STEPS):
        first = (step * common.RANKS + dist.get_rank()) * common.BATCH
        batch = tokens[first : first + common.BATCH]
        optimizers.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        schedulers.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / common.RANKS)
        if step + 1 == common.SAVED and not given.resume:
            dcp.save(states, checkpoint_id=given.folder)
    common.show(losses)


if __name__ == "__main__":
    train()
    common.end()
