"""Builds the model of a case with megatron-core, whole or this rank's part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.case import HYBRID, LATENT, QUERY_LATENT, SEQUENCE, STACKED, Case, initial_value


def global_name(name: str, first_expert: int) -> str:
    """A parameter's name without wrappers, its expert counted over all ranks."""
    name = name.replace("module.", "")
    return re.sub(
        r"local_experts\.(\d+)", lambda match: f"experts.{first_expert + int(match[1])}", name
    )


def cut_along(parameter: torch.Tensor) -> int | None:
    """The dimension along which tensor parallelism cuts a parameter."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def transformer_config(case: Case) -> Any:
    import torch.nn.functional as F
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    more: dict[str, Any] = _expert_settings(case) if case.experts else {}
    if case.latent:
        more |= LATENT | {
            "rope_type": "rope",
            "q_lora_rank": QUERY_LATENT if case.query_latent else None,
        }
        more |= {"add_bias_linear": False}
    if case.hybrid:
        more |= HYBRID | {"is_hybrid_model": True, "normalization": "RMSNorm"}
    more |= case.attention
    return (MLATransformerConfig if case.latent else TransformerConfig)(
        num_layers=len(case.hybrid) or case.layers,
        hidden_size=case.hidden,
        ffn_hidden_size=case.ffn,
        num_attention_heads=case.heads,
        num_query_groups=case.heads if case.latent else case.query_groups,
        attention_output_gate=case.output_gate,
        gated_linear_unit=case.swiglu,
        activation_func=F.silu if case.swiglu else F.gelu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        bf16=case.bf16,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        tensor_model_parallel_size=case.tensor,
        sequence_parallel=case.sequence,
        **more,
    )


def _expert_settings(case: Case) -> dict[str, Any]:
    return {
        "num_moe_experts": case.experts,
        "expert_model_parallel_size": case.expert_parallel,
        "expert_tensor_parallel_size": case.expert_tensor,
        "moe_ffn_hidden_size": case.ffn,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    }


class NoCoreAttention(torch.nn.Module):
    """Stands for the part of attention that has no parameters, in a model that is not run.

    It keeps logits as Transformer Engine's does, for a test that gives it some.
    """

    current_max_attn_logits: torch.Tensor | None = None

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        super().__init__()


def build_gpt(case: Case, config: Any) -> torch.nn.Module:
    from megatron.core.parallel_state import get_expert_model_parallel_rank

    model = _hybrid_model(case, config) if case.hybrid else _gpt_model(case, config)
    if case.stacked:
        config.num_moe_experts = case.stacked  # by which Megatron-FSDP makes groups for experts
    for layer in model.decoder.layers if case.stacked else ():
        layer.mlp.experts = torch.nn.ModuleDict(
            {name: torch.nn.Module() for name in STACKED},
        )
        for name, module in layer.mlp.experts.items():
            module.weight = torch.nn.Parameter(torch.empty(case.stacked, *STACKED[name]))
            module.weight.allreduce = False  # as megatron-core marks the weights of experts
    with torch.no_grad():
        first = get_expert_model_parallel_rank() * case.experts // case.expert_parallel
        for name, parameter in model.named_parameters():
            name = global_name(name, first)
            parameter.copy_(
                _own_part(parameter, lambda shape, name=name: initial_value(name, shape))
            )
            parameter.requires_grad_(case.trains(name))
    return model


def _gpt_model(case: Case, config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        num_experts=case.experts or None, moe_grouped_gemm=False, multi_latent_attention=case.latent
    )
    if case.latent:
        # The core attention of the local spec does not take two head sizes in 0.19. It has no
        # parameters, and only steps with given gradients are made with such a model.
        spec.submodules.self_attention.submodules.core_attention = NoCoreAttention
    if case.fused_down:  # --mla-down-proj-fusion, which the local spec passes over
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention

        attention = spec.submodules.self_attention
        attention.module = FusedMLASelfAttention
        attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
    return GPTModel(
        config,
        spec,
        vocab_size=case.vocabulary,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="learned_absolute",
    )


def _hybrid_model(case: Case, config: Any) -> Any:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_muon.patching import Patches
    from tests.support.hybrid import build_without_kernels, local_layers

    with Patches() as changes:
        build_without_kernels(changes)
        return HybridModel(
            config,
            local_layers(hybrid_stack_spec),
            vocab_size=case.vocabulary,
            max_sequence_length=SEQUENCE,
            hybrid_layer_pattern=case.hybrid,
        )


def _own_part(
    parameter: torch.Tensor, whole: Callable[[Sequence[int]], torch.Tensor]
) -> torch.Tensor:
    """This tensor-parallel rank's part of a whole parameter's values."""
    from megatron.core import parallel_state

    dim = cut_along(parameter)
    if dim is None:
        return whole(parameter.shape)
    dense = getattr(parameter, "allreduce", True)
    group = (
        parallel_state.get_tensor_model_parallel_group
        if dense
        else parallel_state.get_expert_tensor_parallel_group
    )()
    shape = list(parameter.shape)
    shape[dim] *= group.size()
    return whole(shape).chunk(group.size(), dim)[group.rank()]
