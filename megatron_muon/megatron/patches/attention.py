"""The attention logits that local attention of megatron-core 0.19 does not keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_muon.errors import UserError
from megatron_muon.patching import versions


def record_max_logits(attention: DotProductAttention) -> None:
    """Have local attention keep each head's largest logit, as Transformer Engine's does; twice is once.

    `current_max_attn_logits` has the largest scaled and masked logit of each head of this tensor-parallel rank, over
    the forward passes since it was None, without evaluation. Raises a UserError where a fused kernel hides the scores,
    and a RuntimeError where the softmax is not as expected.
    """
    if hasattr(attention, "current_max_attn_logits"):
        return
    softmax = attention.scale_mask_softmax
    mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = getattr(softmax, "mask_func", None)
    if mask is None or len(inspect.signature(mask).parameters) != 2:
        raise RuntimeError(f"the softmax of DotProductAttention has no mask_func of scores and mask in {versions()}")
    if softmax.scaled_masked_softmax_fusion and softmax.input_in_float16:
        raise UserError(
            "the fused softmax of local attention does not show its logits; use --no-masked-softmax-fusion, or "
            "--transformer-impl transformer_engine, or leave --qk-clip and --log-max-attention-logit out"
        )
    attention.current_max_attn_logits = None

    def note(scores: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        masked = mask(scores, where)  # (batch, heads, queries, keys)
        if softmax.training:
            found, before = masked.detach().amax(dim=(0, 2, 3)), attention.current_max_attn_logits
            attention.current_max_attn_logits = found if before is None else torch.maximum(before, found)
        return masked

    softmax.mask_func = note
