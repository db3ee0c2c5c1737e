"""The model that some flags describe, to validate settings and to plan: on the meta device, without ranks."""

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
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_muon.megatron.model.gpt import gpt_config
from megatron_muon.patching import Patches

_STREAMS = ((MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"), (SharedExpertMLP, "stream"))
"""Class attributes of megatron-core that the first instance sets for all others of the process.

A stream that a model on paper made would stay: another than the one that a rank's own model is to wait for."""


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


def build_model(args: argparse.Namespace, groups: ProcessGroupCollection, *, runnable: bool = True) -> Any:
    """The GPT that a run with these validated flags builds, in the dtype that it trains in.

    One that is not `runnable` is for its parameters alone: megatron-core's local layers stand for those of Transformer
    Engine. The local core attention of 0.19 takes neither context parallelism nor the two head sizes of latent
    attention; it has no parameters. The projections of latent experts are Transformer Engine's alone.
    """
    config = gpt_config(args)
    config.transformer.use_cpu_initialization, config.transformer.perform_initialization = True, False
    with Patches() as changes, torch.device("meta"):
        for owner, stream in _STREAMS:
            changes.replace(owner, stream, None)
        if not runnable:
            config.attention_backend = AttnBackend.auto
            changes.replace(LocalSpecProvider, "core_attention", lambda _provider: torch.nn.Identity)
            changes.replace(moe_layer, "HAVE_TE", True)
            changes.replace(moe_layer, "TELinear", _Linear)
        model = config.get_builder_cls()(config).build_model(groups, True, True)
    return model.bfloat16() if args.bf16 else model


class _Linear(torch.nn.Linear):
    """The parameters of Transformer Engine's linear layer."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: Any, **_settings: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)
