"""The model that some flags describe, to validate settings and to plan: on the meta device, without ranks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.argument_utils import hybrid_config_from_args
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
    """The model that a run with these validated flags builds, in the dtype that it trains in.

    One that is not `runnable` is for its parameters alone: megatron-core's local layers stand for those of Transformer
    Engine, and what needs packages for GPUs (latent experts, Mamba, GatedDeltaNet) has stand-ins of the same
    parameters.
    """
    hybrid = args.hybrid_layer_pattern is not None
    config = hybrid_config_from_args(args) if hybrid else gpt_config(args)
    config.transformer.use_cpu_initialization, config.transformer.perform_initialization = True, False
    with Patches() as changes, torch.device("meta"):
        for owner, stream in _STREAMS:
            changes.replace(owner, stream, None)
        if not runnable:
            config.attention_backend = AttnBackend.auto
            changes.replace(LocalSpecProvider, "core_attention", lambda _provider: torch.nn.Identity)
            changes.replace(moe_layer, "HAVE_TE", True)
            changes.replace(moe_layer, "TELinear", _Linear)
        if hybrid:
            build_without_kernels(changes)
            changes.replace(mamba_mixer, "get_cuda_rng_tracker", _NoRandomNumbers)
            config.hybrid_stack_spec = local_layers(config.hybrid_stack_spec or hybrid_layer_specs.hybrid_stack_spec)
        model = config.get_builder_cls()(config).build_model(groups, True, True)
    return model.bfloat16() if args.bf16 else model


def build_without_kernels(changes: Patches) -> None:
    """Let the layers of hybrid models be built without mamba-ssm, flash-linear-attention and Transformer Engine."""
    changes.replace(mamba_mixer, "HAVE_MAMBA_SSM", True)
    changes.replace(mamba_mixer, "ExtendedRMSNorm", lambda size, **_settings: _Norm(None, size))
    changes.replace(common, "HAVE_FLA", True)
    changes.replace(gdn, "chunk_gated_delta_rule", common.torch_chunk_gated_delta_rule)
    changes.replace(multi_latent_attention, "TELinear", _Linear)
    changes.replace(absorbed_mla, "TELinear", _Linear)
    changes.replace(hybrid_block, "TENorm", _Norm)
    changes.replace(hybrid_block, "TELayerNormColumnParallelLinear", TELayerNormColumnParallelLinear)


def local_layers(spec: Any) -> Any:
    """A spec, or a part of one, with layers of the same parameters for those of Transformer Engine."""
    specs = hybrid_layer_specs
    for theirs, ours in (
        (specs.TEColumnParallelLinear, ColumnParallelLinear),
        (specs.TELayerNormColumnParallelLinear, TELayerNormColumnParallelLinear),
        (specs.TERowParallelLinear, RowParallelLinear),
        (specs.TELinear, _Linear),
        (specs.TENorm, _Norm),
        (specs.TEDotProductAttention, torch.nn.Identity),
        (specs.moe, get_moe_module_spec(use_te=False, num_experts=1, moe_grouped_gemm=False)),
    ):
        if spec is theirs:
            return ours
    if isinstance(spec, functools.partial):
        return functools.partial(spec.func, **{name: local_layers(part) for name, part in spec.keywords.items()})
    if isinstance(spec, list):
        return [local_layers(part) for part in spec]
    if isinstance(spec, ModuleSpec) or (dataclasses.is_dataclass(spec) and not isinstance(spec, type)):
        parts = {field.name: local_layers(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    return spec


class _NoRandomNumbers:
    """Stands for the tracker of random number generators."""

    def fork(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Norm(torch.nn.Module):
    """The parameters of a norm."""

    def __init__(self, config: Any, hidden_size: int, **_settings: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        if config is not None and config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """The parameters of Transformer Engine's class of this name, by which Megatron-FSDP knows what is cut."""

    def __init__(self, inputs: int, *sizes: int, config: Any, **settings: Any) -> None:
        super().__init__(inputs, *sizes, config=config, **settings)
        for name, parameter in _Norm(config, inputs).named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)


class _Linear(torch.nn.Linear):
    """The parameters of Transformer Engine's linear layer."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: Any, **_settings: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)
