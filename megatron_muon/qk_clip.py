"""QK-clip: after a step, shrinks rows that make queries and keys, to bound attention logits.

The largest logit S of a head, over the step's micro-batches and all ranks, gives the head the
factor gamma = min(1, threshold / S). Its query rows are scaled by gamma ** alpha and its key rows
by gamma ** (1 - alpha). Heads of a query group share keys, so they share the factor of the group's
largest logit. The rotary key of latent attention, which all heads share, stays: rotary queries are
scaled by gamma. Weights are scaled; momentum is left alone.

`HeadScaling` is the arithmetic, which `megatron/attention_logits.py` shares. `QKClip` is for models
of transformers, whose fused attention shows no logits: `largest_logits` computes them once more.

Sources: Kimi K2, arXiv 2507.20534, Algorithm 1; `clip_qk` of SelfAttention and MLASelfAttention in
megatron-core 0.19, which leave biases as they are. Here they are rows like others: without them
logits would not shrink by gamma.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron_muon.errors import UserError
from megatron_muon.ranges import check_number
from megatron_muon.shards import local_part

OTHER = 0
QUERY = 1
KEY = 2
ROTARY = 3
"""Kinds of rows, which choose the factor; that of `OTHER` is one."""

type Parts = Sequence[tuple[int, int]]
"""`(kind, rows)` of one query group, or latent head; a projection repeats them for each group."""

CHUNK = 128
"""Queries whose logits are in memory at a time."""


class HeadScaling:
    """Scales rows of query and key projections by the largest logit of each head.

    Heads, and query groups, are numbered through all layers.

    Args:
        layers: heads and query groups of each layer with attention.
        device: of the logits.

    Attributes:
        largest: the largest logit of each head, `(heads,)` in fp32; -inf if not measured.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        *,
        alpha: float,
        threshold: float,
        device: torch.device,
    ) -> None:
        self._alpha = alpha
        self._threshold = threshold
        self._groups = 0
        self._layers = list[tuple[int, int]]()  # the first group of each, and how many
        group_of = []
        for heads, groups in layers:
            group_of.append(self._groups + torch.arange(heads) * groups // heads)
            self._layers.append((self._groups, groups))
            self._groups += groups
        self._group_of = torch.cat(group_of).to(device)
        self._scaled: list[tuple[torch.Tensor, torch.Tensor]] = []  # with the factors of rows
        self.largest = torch.full(self._group_of.shape, -math.inf, device=device)

    def factors_of(self, layer: int, sections: Sequence[Parts]) -> torch.Tensor:
        """The index of its factor for each row of a whole projection.

        Sections follow one another; each has its parts for all groups of the layer.
        """
        first, count = self._layers[layer]
        groups = torch.arange(first, first + count)[:, None]
        indices = []
        for parts in sections:
            kinds = torch.cat([torch.full((rows,), kind) for kind, rows in parts])
            indices.append((kinds * self._groups + groups).flatten())
        return torch.cat(indices)

    def add(self, tensor: torch.Tensor, factors: torch.Tensor) -> None:
        """Scale this rank's rows of a weight or bias, which have these `factors`."""
        self._scaled.append((tensor, factors.to(self._group_of.device)))

    def factors(self) -> torch.Tensor:
        """`(4, groups)` factors of `OTHER`, `QUERY`, `KEY` and `ROTARY` rows.

        A group whose largest logit is not finite keeps its rows: a factor of zero would end it.
        """
        largest = self.largest.new_full((self._groups,), -math.inf)
        largest = largest.scatter_reduce(0, self._group_of, self.largest, "amax")
        is_clipped = (largest > self._threshold) & largest.isfinite()
        gamma = torch.where(is_clipped, self._threshold / largest, 1.0)
        queries = gamma**self._alpha
        keys = gamma ** (1.0 - self._alpha)
        return torch.stack([torch.ones_like(gamma), queries, keys, gamma])

    @torch.no_grad()
    def scale(self) -> None:
        """Scale the rows, in place."""
        factors = self.factors().flatten()
        for tensor, indices in self._scaled:
            rows = local_part(tensor)
            rows.mul_(factors[indices] if rows.ndim == 1 else factors[indices][:, None])


def largest_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    causal: bool,
) -> torch.Tensor:
    """The largest scaled and masked logit of each head, `(heads,)` in fp32, by chunks of queries.

    Args:
        query: `(batch, heads, queries, size)`.
        key: `(batch, groups, keys, size)`; heads of a group are consecutive.
        mask: bool (False hides) or to be added, and broadcast to `(batch, heads, queries, keys)`.
        scaling: factor of the products.
        causal: query i sees keys up to i; without a mask.
    """
    batch, heads, queries, size = query.shape
    groups, keys = key.shape[1:3]
    across = key.flatten(0, 1).mT
    found = []
    for start in range(0, queries, CHUNK):
        end = min(start + CHUNK, queries)
        seen = min(end, keys) if causal else keys
        rows = (query[:, :, start:end] * scaling).reshape(batch * groups, -1, size)
        scores = torch.bmm(rows, across[..., :seen]).view(batch, heads, end - start, seen)
        if causal:
            ahead = torch.ones(end - start, seen - start, dtype=torch.bool, device=query.device)
            scores[..., start:].masked_fill_(ahead.triu(1), -math.inf)
        elif mask is not None:
            part = mask.expand(batch, heads, queries, keys)[:, :, start:end]
            if part.dtype == torch.bool:
                scores.masked_fill_(~part, -math.inf)
            else:
                scores.add_(part)
        found.append(scores.flatten(2).amax(2).amax(0))
    return torch.stack(found).amax(0).float()


def watch_attention() -> None:
    """Have the SDPA attention of transformers record largest logits; idempotent.

    A module's `largest_attention_logits`, `(heads,)` in fp32, if it has the tensor, becomes the
    maximum of the logits and of its old value: layers that activation checkpointing runs twice
    count once. Forward passes in evaluation mode or without gradients do not count. Only here are
    queries and keys as attention sees them, after rotary embeddings; the registry in which this
    function takes SDPA's place is transformers' own, and other modules go through it unchanged.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(attend, "keeps_largest_logits", False):
        return

    @functools.wraps(attend)
    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
        kept = getattr(module, "largest_attention_logits", None)
        if kept is not None and module.training and torch.is_grad_enabled():
            if given.get("position_bias") is not None:
                raise UserError("QKClip does not support position biases; leave QKClip out")
            causal = given.get("is_causal")
            if causal is None:
                causal = getattr(module, "is_causal", True)
            causal = causal and mask is None and query.shape[2] > 1  # as SDPA is called
            scaling = given.get("scaling") or query.shape[-1] ** -0.5
            largest = largest_logits(query.detach(), key.detach(), mask, scaling, causal=causal)
            if len(largest) != len(kept):
                raise UserError("QKClip does not support tensor parallelism; leave QKClip out")
            torch.maximum(kept, largest, out=kept)
        return attend(module, query, key, value, mask, **given)

    watched.keeps_largest_logits = True  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", watched)


class QKClip:
    """Measures the attention logits of a transformers model in its training steps, and clips.

        clip = megatron_muon.QKClip(model, threshold=100.0)     # after the model is sharded
        ...
        optimizer.step()
        largest = clip.step()                                   # on every rank

    For softmax attention by SDPA, transformers' default, of the kinds of Llama (grouped or not),
    Phi3 (fused) and DeepSeek (latent), in one process, under DDP or FSDP2. Nothing is added to
    checkpoints.

    Args:
        model: of transformers, wrapped or not; on its device, sharded.
        threshold: the largest logit of a head above which its rows are scaled.
        alpha: queries take this share of a factor, keys the rest.
        interval: measure and clip at the first step and every so many; nothing is measured between.
        process_group: the ranks that have the same weights, or shards of them; None takes the
            weights' mesh, or all ranks if they are plain tensors.

    Raises:
        UserError: attention without known projections, or that normalizes queries and keys,
            projections that are frozen or sharded by another framework, another attention than
            SDPA, a number out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 100.0,
        *,
        alpha: float = 0.5,
        interval: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_number("qk_clip_threshold", threshold, setting="threshold")
        check_number("qk_clip_alpha", alpha, setting="alpha")
        check_number("log_interval", interval, setting="interval")
        self._layers = list(_attentions(model))
        if not self._layers:
            raise UserError(
                f"QKClip: {type(model).__name__} has no attention of transformers; leave QKClip out"
            )
        weight = next(self._layers[0].module.parameters())
        self._scaling = HeadScaling(
            [(layer.heads, layer.groups) for layer in self._layers],
            alpha=alpha,
            threshold=threshold,
            device=weight.device,
        )
        self._parameters: list[tuple[nn.Module, str, torch.Tensor]] = []
        for number, layer in enumerate(self._layers):
            for name, sections in layer.projections.items():
                factors = self._scaling.factors_of(number, sections)
                self._add(f"{layer.name}.{name}", layer.module.get_submodule(name), factors)
        self._reduced_over: Sequence[dist.ProcessGroup | None] = []
        if process_group is not None:
            self._reduced_over = [process_group]
        elif isinstance(weight, DTensor):
            self._reduced_over = weight.device_mesh.get_all_groups()
        elif dist.is_initialized():
            self._reduced_over = [None]
        self._interval = interval
        self._steps = 0
        watch_attention()
        self._measure_next()

    def _add(self, path: str, linear: Any, factors: torch.Tensor) -> None:
        """Add this rank's rows of a projection's weight and bias."""
        if not isinstance(linear, nn.Linear):
            raise UserError(
                f"QKClip: {path} is a {type(linear).__name__}, not a linear layer; leave QKClip out"
            )
        for kind in ("weight", "bias"):
            parameter = getattr(linear, kind)
            if parameter is None:
                continue
            if not parameter.requires_grad:
                raise UserError(
                    f"QKClip would scale {path}.{kind}, which is frozen; train it, or leave"
                    " QKClip out"
                )
            here = factors
            if isinstance(parameter, DTensor):
                (rows, *_), (first, *_) = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                here = factors[first : first + rows]
            self._scaling.add(parameter, here)
            self._parameters.append((linear, kind, parameter))

    def step(self) -> torch.Tensor | None:
        """Clip, after the optimizer's step. Collective.

        Returns the largest logit over all ranks, a scalar on the device, or None at steps that do
        not measure. Raises a UserError if the weights are no longer the model's, or if the forward
        passes before the first step showed no logits.
        """
        largest = self._clip() if self._steps % self._interval == 0 else None
        self._steps += 1
        self._measure_next()
        return largest

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        for linear, kind, parameter in self._parameters:
            now = getattr(linear, kind)
            is_gathered = isinstance(parameter, DTensor) and not isinstance(now, DTensor)
            if now is not parameter and not is_gathered:
                raise UserError(
                    "QKClip: the model has other weights now; make QKClip after fully_shard, or"
                    " prepare()"
                )
        largest = self._scaling.largest
        for group in self._reduced_over:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        if self._steps == 0 and bool((largest == -math.inf).any()):
            raise UserError(
                "QKClip: attention showed no logits before this step; train by the forward pass of"
                " this model, with model.train() and gradients"
            )
        self._scaling.scale()
        return largest.max()

    def _measure_next(self) -> None:
        """Have attention record its logits until the next step, if that one measures."""
        largest = self._scaling.largest.fill_(-math.inf)
        is_due = self._steps % self._interval == 0
        by_layer = largest.split([layer.heads for layer in self._layers])
        for layer, kept in zip(self._layers, by_layer, strict=True):
            layer.module.largest_attention_logits = kept if is_due else None


class _Attention(NamedTuple):
    """An attention module, with the sections of its projections (`HeadScaling.factors_of`)."""

    name: str
    module: Any
    heads: int
    groups: int
    projections: Mapping[str, Sequence[Parts]]


_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Norms before the projections that are scaled."""


def _attentions(model: nn.Module) -> Iterator[_Attention]:
    """The attention modules of a model; a UserError for one that cannot be clipped."""
    for name, module in model.named_modules():
        if "megatron_fsdp" in type(module).__module__:
            raise UserError(
                "QKClip does not know where Megatron-FSDP has its weights; use FSDP2, or --qk-clip"
                " of Megatron"
            )
        kind = type(module).__name__.removeprefix("FSDP")
        are_attention = [type(each).__name__.endswith("Attention") for each in module.modules()]
        if not are_attention[0] or any(are_attention[1:]):  # the first is the module itself
            continue
        config: Any = getattr(module, "config", None)
        projections = {} if config is None else _projections(module, kind)
        if not projections:
            raise UserError(
                f"QKClip: the query and key projections of {name} ({kind}) are not known; pass the"
                " part of the model that has others, or leave QKClip out"
            )
        norms = [child for child, _ in module.named_children() if "norm" in child]
        bounds = [each for each in norms if each not in _LATENT_NORMS]
        for each in ("attn_logit_softcapping", "clip_qkv"):
            if getattr(config, each, None) is not None:
                bounds.append(each)
        if bounds:
            raise UserError(
                f"QKClip: {name} ({kind}) has {' and '.join(bounds)}: its logits are bounded, and"
                " scaled rows would change nothing; leave QKClip out"
            )
        if config._attn_implementation != "sdpa":
            raise UserError(
                f"QKClip: {name} computes attention by {config._attn_implementation}; call"
                " model.set_attn_implementation('sdpa')"
            )
        heads = config.num_attention_heads
        groups = heads // getattr(module, "num_key_value_groups", 1)
        yield _Attention(name, module, heads, groups, projections)


def _projections(module: Any, kind: str) -> dict[str, Sequence[Parts]]:
    """The sections of the projections that make queries and keys; none if these are not known."""
    if hasattr(module, "kv_b_proj"):
        queries = "q_proj" if module.q_lora_rank is None else "q_b_proj"
        return {
            queries: [[(QUERY, module.qk_nope_head_dim), (ROTARY, module.qk_rope_head_dim)]],
            "kv_b_proj": [[(KEY, module.qk_nope_head_dim), (OTHER, module.v_head_dim)]],
        }
    if not hasattr(module, "head_dim"):
        return {}
    size = module.head_dim
    query: Parts = [(QUERY, getattr(module, "num_key_value_groups", 1) * size)]
    key: Parts = [(KEY, size)]
    if kind == "Phi3Attention":  # all queries, then all keys, then all values
        return {"qkv_proj": [query, key, [(OTHER, size)]]}
    if hasattr(module, "q_proj") and hasattr(module, "k_proj"):
        return {"q_proj": [query], "k_proj": [key]}
    return {}
