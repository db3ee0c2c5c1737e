"""Layers of hybrid models with stand-ins of the same parameters for what needs packages for GPUs;
they never run.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_muon.patching import Patches


def build_without_kernels(changes: Patches) -> None:
    """Let the layers of hybrid models be built without mamba-ssm, flash-linear-attention and
    Transformer Engine.
    """
    changes.replace(mamba_mixer, "HAVE_MAMBA_SSM", True)
    changes.replace(mamba_mixer, "ExtendedRMSNorm", lambda size, **_settings: _Norm(None, size))
    changes.replace(common, "HAVE_FLA", True)
    changes.replace(gdn, "chunk_gated_delta_rule", common.torch_chunk_gated_delta_rule)
    changes.replace(multi_latent_attention, "TELinear", _Linear)
    changes.replace(absorbed_mla, "TELinear", _Linear)
    changes.replace(hybrid_block, "TENorm", _Norm)
    changes.replace(
        hybrid_block, "TELayerNormColumnParallelLinear", TELayerNormColumnParallelLinear
    )


def local_layers(spec: Any) -> Any:
    """A spec, or a part of one, with layers of the same parameters for those of Transformer
    Engine.
    """
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
        return functools.partial(
            spec.func, **{name: local_layers(part) for name, part in spec.keywords.items()}
        )
    if isinstance(spec, list):
        return [local_layers(part) for part in spec]
    if isinstance(spec, ModuleSpec) or (
        dataclasses.is_dataclass(spec) and not isinstance(spec, type)
    ):
        parts = {
            field.name: local_layers(getattr(spec, field.name))
            for field in dataclasses.fields(spec)
        }
        return dataclasses.replace(spec, **parts)
    return spec


class _Norm(torch.nn.Module):
    """The parameters of a norm."""

    def __init__(self, config: Any, hidden_size: int, **_settings: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        if config is not None and config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """The parameters of Transformer Engine's class of this name, by which Megatron-FSDP knows what
    is cut.
    """

    def __init__(self, inputs: int, *sizes: int, config: Any, **settings: Any) -> None:
        super().__init__(inputs, *sizes, config=config, **settings)
        for name, parameter in _Norm(config, inputs).named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)


class _Linear(torch.nn.Linear):
    """The parameters of Transformer Engine's linear layer."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, config: Any, **_settings: Any
    ) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)
