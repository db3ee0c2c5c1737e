"""Attention logits in Megatron: measured in each step, and clipped by main weights (`qk_clip`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.errors import UserError
from megatron_muon.matrices.cuts import noted_part
from megatron_muon.megatron.flags.refusals import logits_flag
from megatron_muon.megatron.model.matrices import fused_rows
from megatron_muon.megatron.upstream import DotProductAttention, MLASelfAttention, SelfAttention
from megatron_muon.qk_clip import KEY, OTHER, QUERY, ROTARY, HeadScaling, Parts


def projections(config: Any) -> dict[str, Parts]:
    """The projections that make queries and keys, with the rows of a query group or latent head."""
    if config.multi_latent_attention:
        queries = "linear_q_proj" if config.q_lora_rank is None else "linear_q_up_proj"
        return {
            queries: [(QUERY, config.qk_head_dim), (ROTARY, config.qk_pos_emb_head_dim)],
            "linear_kv_up_proj": [(KEY, config.qk_head_dim), (OTHER, config.v_head_dim)],
        }
    fused = fused_rows("linear_qkv.weight", config)
    assert fused is not None
    query, *gate, key, value = fused.parts
    others = [(OTHER, rows) for rows in gate]
    return {"linear_qkv": [(QUERY, query), *others, (KEY, key), (OTHER, value)]}


class AttentionLogits:
    """Measures the attention logits of a model's steps and, with --qk-clip, clips.

    Every rank has all layers; `tensor_parallel` ranks share the heads of one. `largest` is the
    largest logit of the last step, a scalar on the device.

    Raises:
        UserError: attention that shows no logits, layers of different heads, or frozen weights that
            would be scaled.
    """

    def __init__(self, model_chunks: Sequence[Any], tensor_parallel: dist.ProcessGroup) -> None:
        self._config = config = model_chunks[0].config
        flag = str(logits_flag(config))
        attentions = [found for chunk in model_chunks for found in _attentions(chunk, flag)]
        if not attentions:
            raise UserError(f"{flag}: the model has no attention; leave {flag} out")
        self._cores = [attention.core_attention for _, _, attention in attentions]
        heads = config.num_attention_heads
        groups = heads if config.multi_latent_attention else config.num_query_groups
        self._scaling = HeadScaling(
            [(heads, groups)] * len(attentions),
            alpha=config.qk_clip_alpha,
            threshold=config.qk_clip_threshold,
            device=next(model_chunks[0].parameters()).device,
        )
        rank = tensor_parallel.rank()
        here = heads // tensor_parallel.size()
        by_layer = self._scaling.largest.view(-1, heads)
        self._mine = by_layer[:, rank * here : (rank + 1) * here]
        self.largest = self._scaling.largest.max()
        if not config.qk_clip:
            return
        for layer, (chunk, path, _) in enumerate(attentions):
            for name, parts in projections(config).items():
                factors = self._scaling.factors_of(layer, [parts])
                for parameter, rows in _shards(chunk, f"{path}.{name}.", rank):
                    self._scaling.add(parameter, factors[rows])

    def forget(self) -> None:
        """Drop the logits of forward passes without a step, such as those of an evaluation."""
        for core in self._cores:
            core.current_max_attn_logits = None

    def measure(self) -> None:
        """Take the logits of the forward passes since the last step, over all ranks. Collective."""
        found = [core.current_max_attn_logits for core in self._cores]
        self.forget()
        if any(logits is None for logits in found):
            raise RuntimeError(
                f"{logits_flag(self._config)}: a layer's attention kept no logits before the"
                " optimizer's step, as in a CUDA graph, in FP8 and with --attention-backend flash;"
                " leave one of the two out. Local attention needs --no-masked-softmax-fusion"
            )
        largest = self._scaling.largest.fill_(-math.inf)
        self._mine.copy_(torch.cat(found).view_as(self._mine))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self.largest = largest.max()

    def clip(self) -> None:
        """Scale this rank's rows of the main weights by the logits that were measured last."""
        self._scaling.scale()


def _attentions(chunk: Any, flag: str) -> Iterator[tuple[Any, str, Any]]:
    """The attention modules of a chunk, with paths; a UserError if one shows no logits."""
    for path, module in chunk.named_modules():
        if (core := getattr(module, "core_attention", None)) is None:
            continue
        if isinstance(core, DotProductAttention):
            record_max_logits(core)
        name = path.replace("module.", "")
        if not isinstance(module, (SelfAttention, MLASelfAttention)) or not hasattr(
            core, "current_max_attn_logits"
        ):
            raise UserError(
                f"{flag}: {name} is a {type(module).__name__} with {type(core).__name__}, which"
                " keeps no logits; use megatron-core's self-attention, local or Transformer"
                f" Engine's, or leave {flag} out"
            )
        yield chunk, name, module


def _shards(
    chunk: Any, prefix: str, tensor_parallel_rank: int
) -> Iterator[tuple[torch.Tensor, slice]]:
    """A projection's weight and bias, with this rank's rows of the whole, if it holds any."""
    buffer = chunk.param_and_grad_buffer
    for name, parameter in buffer.optimizer_named_parameters:
        if name.replace("module.", "") not in (f"{prefix}weight", f"{prefix}bias"):
            continue
        if not parameter.requires_grad:
            raise UserError(
                f"--qk-clip would scale rows of {prefix}weight, which is frozen; train it, or leave"
                " it out"
            )
        rows = len(parameter._local_tensor)
        if rows:
            start = noted_part(buffer, name)[0][0]
            # all of a tensor-parallel rank's part
            if chunk.ddp_config.data_parallel_sharding_strategy == "no_shard":
                start = tensor_parallel_rank * rows
            yield parameter, slice(start, start + rows)


def record_max_logits(attention: DotProductAttention) -> None:
    """Have local attention keep each head's largest logit, as Transformer Engine does; idempotent.

    `current_max_attn_logits` has the largest scaled and masked logit of each head of this
    tensor-parallel rank, over the forward passes since it was None, without evaluation. It stays
    None where a fused kernel hides the scores.
    """
    if hasattr(attention, "current_max_attn_logits"):
        return
    softmax = attention.scale_mask_softmax
    mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = softmax.mask_func
    attention.current_max_attn_logits = None

    def note(scores: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        masked = mask(scores, where)  # (batch, heads, queries, keys)
        if softmax.training:
            found = masked.detach().amax(dim=(0, 2, 3))
            before = attention.current_max_attn_logits
            if before is not None:
                found = torch.maximum(before, found)
            attention.current_max_attn_logits = found
        return masked

    softmax.mask_func = note
