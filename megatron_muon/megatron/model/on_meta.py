"""The model that some flags describe, to plan: on the meta device, without ranks."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_layer
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_muon.megatron.model.gpt import gpt_config
from megatron_muon.patching import Patches


@contextlib.contextmanager
def process_groups(args: argparse.Namespace) -> Iterator[ProcessGroupCollection]:
    """megatron-core's process groups as rank 0 of `args.world_size` has them, on paper; none may exist before."""
    torch.distributed.init_process_group("fake", rank=0, world_size=args.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def build_model(args: argparse.Namespace, groups: ProcessGroupCollection) -> Any:
    """The model that a run with these validated flags builds, for its parameters alone, in the dtype of its training.

    megatron-core's local layers stand for those of Transformer Engine, and so does a linear layer for that of latent
    experts, which needs it.
    """
    config = gpt_config(args)
    config.transformer.use_cpu_initialization, config.transformer.perform_initialization = True, False
    config.attention_backend = AttnBackend.auto
    with Patches() as changes, torch.device("meta"):
        changes.replace(LocalSpecProvider, "core_attention", lambda _provider: torch.nn.Identity)
        changes.replace(moe_layer, "HAVE_TE", True)
        changes.replace(moe_layer, "TELinear", _Linear)
        model = config.get_builder_cls()(config).build_model(groups, True, True)
    return model.bfloat16() if args.bf16 else model


class _Linear(torch.nn.Linear):
    """The parameters of Transformer Engine's linear layer."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: Any, **_settings: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)
