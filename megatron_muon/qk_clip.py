"""QK-clip: after a step, the rows that make queries and keys shrink until attention logits are under a threshold again.

The largest logit S of a head, over the step's micro-batches and all ranks, gives the head the
factor gamma = min(1, threshold / S). Its query rows are scaled by gamma ** alpha and its key rows
by gamma ** (1 - alpha). Heads of a query group share keys, so they share the factor of the group's
largest logit. The rotary key of latent attention, which all heads share, stays: rotary queries are
scaled by gamma. Weights are scaled; momentum is left alone.

`factors`, `places` and `Scaling` are the arithmetic, which `megatron/qk_clip.py` shares; `QKClip`
is for models of transformers, whose fused attention shows no logits: `largest_logits` computes them
once more, a chunk at a time.

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

from megatron_muon.core.errors import UserError
from megatron_muon.core.numbers import check_number
from megatron_muon.core.rows import local_rows

OTHER, QUERY, KEY, ROTARY = range(4)
"""What a row makes, by which its factor is chosen; that of `OTHER` is one."""

type Parts = Sequence[tuple[int, int]]
"""The `(kind, rows)` of one query group, or latent head; a projection has them once for each group."""

CHUNK = 128
"""Queries whose logits are in memory at a time."""


def factors(
    largest: torch.Tensor, group_of: torch.Tensor, *, groups: int, alpha: float, threshold: float
) -> torch.Tensor:
    """`(4, groups)` factors of `OTHER`, `QUERY`, `KEY` and `ROTARY` rows; queries take the share `alpha` of a factor.

    `largest` and `group_of`, `(heads,)`, have the largest logit of each head and its group. A group
    whose largest logit is not finite keeps its rows: a factor of zero would end it.
    """
    of_groups = largest.new_full((groups,), -math.inf).scatter_reduce(0, group_of, largest, "amax")
    gamma = torch.where((of_groups > threshold) & of_groups.isfinite(), threshold / of_groups, 1.0)
    return torch.stack([torch.ones_like(gamma), gamma**alpha, gamma ** (1.0 - alpha), gamma])


def places(sections: Sequence[Parts], first: int, count: int, *, groups: int) -> torch.Tensor:
    """For each row of a projection, whole, the place of its factor in the flat table of `factors`.

    Args:
        sections: lie one behind the other; each has its parts for all groups of the layer.
        first: the layer's first group.
        count: the layer's groups.
        groups: those of all layers.
    """
    of_layer = torch.arange(first, first + count)[:, None]
    kinds = [torch.cat([torch.full((rows,), kind) for kind, rows in parts]) for parts in sections]
    return torch.cat([(each * groups + of_layer).flatten() for each in kinds])


class Scaled(NamedTuple):
    """A weight or bias, for each of its rows on this rank the place of the factor, and which dimension rows are."""

    tensor: torch.Tensor
    places: torch.Tensor
    dim: int = 0


class Scaling:
    """Scales this rank's rows of projections by the largest logits, `(heads,)`, of the heads that they make.

    Args:
        scaled: the projections of all layers.
        group_of: the group of each head, `(heads,)`, on the device of the logits.
    """

    def __init__(
        self,
        scaled: Sequence[Scaled],
        group_of: torch.Tensor,
        *,
        groups: int,
        alpha: float,
        threshold: float,
    ) -> None:
        self._scaled, self._sizes = scaled, [len(each.places) for each in scaled]
        self._places = torch.cat(
            [torch.empty(0, dtype=torch.int64), *(each.places for each in scaled)]
        )
        self._places = self._places.to(group_of.device)
        self._factors = functools.partial(
            factors, group_of=group_of, groups=groups, alpha=alpha, threshold=threshold
        )

    @torch.no_grad()
    def __call__(self, largest: torch.Tensor) -> None:
        """Scale, in place."""
        by_row = self._factors(largest).flatten()[self._places].split(self._sizes)
        for each, factor in zip(self._scaled, by_row, strict=True):
            rows = local_rows(each.tensor)
            rows.mul_(factor if each.dim == rows.ndim - 1 else factor[:, None])


def largest_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    causal: bool,
) -> torch.Tensor:
    """The largest scaled and masked logit of each head, `(heads,)` in fp32, by chunks of `CHUNK` queries.

    Args:
        query: `(batch, heads, queries, size)`.
        key: `(batch, groups, keys, size)`; heads of a group lie one behind the other.
        mask: bool (False hides) or to be added, and broadcast to `(batch, heads, queries, keys)`.
        scaling: what products are multiplied by.
        causal: query i sees keys up to i; without a mask.
    """
    batch, heads, queries, size = query.shape
    groups, keys = key.shape[1:3]
    across, found = key.flatten(0, 1).mT, []
    for start in range(0, queries, CHUNK):
        end = min(start + CHUNK, queries)
        seen = min(end, keys) if causal else keys
        rows = (query[:, :, start:end] * scaling).reshape(batch * groups, -1, size)
        scores = torch.bmm(rows, across[..., :seen]).view(batch, heads, end - start, seen)
        if causal:
            ahead = torch.ones(
                end - start, seen - start, dtype=torch.bool, device=query.device
            ).triu(1)
            scores[..., start:].masked_fill_(ahead, -math.inf)
        elif mask is not None:
            part = mask.expand(batch, heads, queries, keys)[:, :, start:end]
            scores = (
                scores.masked_fill_(~part, -math.inf)
                if part.dtype == torch.bool
                else scores.add_(part)
            )
        found.append(scores.flatten(2).amax(2).amax(0))
    return torch.stack(found).amax(0).float()


def watch_attention() -> None:
    """Have the SDPA attention of transformers keep the largest logits of modules with a tensor for them; twice is once.

    A module's `largest_attention_logits`, `(heads,)` in fp32, becomes the maximum of the logits and
    of what it was: layers that activation checkpointing runs twice count once. Forward passes in
    evaluation mode or without gradients do not count. Only here are queries and keys as attention
    sees them, after rotary embeddings; the registry in which this function takes SDPA's place is
    transformers' own, and other modules go through it unchanged.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(attend, "keeps_largest_logits", False):
        return

    @functools.wraps(attend)
    def watched(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **given: Any,
    ) -> Any:
        kept = getattr(module, "largest_attention_logits", None)
        if kept is not None and module.training and torch.is_grad_enabled():
            _keep(kept, module, query.detach(), key.detach(), attention_mask, given)
        return attend(module, query, key, value, attention_mask, **given)

    watched.keeps_largest_logits = True  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", watched)


def _keep(
    kept: torch.Tensor, module: Any, query: torch.Tensor, key: torch.Tensor, mask: Any, given: Any
) -> None:
    kind, heads = type(module).__name__, query.shape[1]
    if given.get("position_bias") is not None:
        raise UserError(
            f"QKClip: {kind} adds a position bias to its logits, which is not supported; leave"
            " QKClip out"
        )
    if heads != len(kept):
        raise UserError(
            f"QKClip: {kind} has {heads} of {len(kept)} heads here; tensor parallelism is not"
            " supported"
        )
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = causal and mask is None and query.shape[2] > 1  # as SDPA is called
    scaling = given.get("scaling") or query.shape[-1] ** -0.5
    torch.maximum(kept, largest_logits(query, key, mask, scaling, causal=causal), out=kept)


class QKClip:
    """Measures the attention logits of a transformers model in its training steps, and clips.

        clip = megatron_muon.QKClip(model, threshold=100.0)     # after the model is sharded
        ...
        optimizer.step()
        largest = clip.step()                                   # on every rank

    For softmax attention by SDPA, transformers' default, of the kinds of Llama (grouped or not),
    GPT-2, Phi3 (fused) and DeepSeek (latent), in one process, under DDP or FSDP2. Nothing is added
    to checkpoints.

    Args:
        model: of transformers, wrapped or not; on its device, sharded.
        threshold: of a head's largest logit, above which its rows are scaled.
        alpha: queries take this share of a factor, keys the rest.
        interval: measure and clip at the first step and every so many; between, nothing is
            measured.
        process_group: of ranks that have the same weights, or shards of them; None takes the
            weights' mesh, or all ranks where they are plain tensors.

    Raises:
        UserError: attention without known projections, or that normalises queries and keys,
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
        for name, number in (("threshold", threshold), ("alpha", alpha)):
            check_number(f"qk_clip_{name}", number, flag=name)
        check_number("log_interval", interval, flag="interval")
        self._layers = list(_layers(model))
        if not self._layers:
            raise UserError(
                f"QKClip: {type(model).__name__} has no attention of transformers; leave QKClip out"
            )
        self._scaled: list[Scaled] = []
        self._found_at: list[tuple[nn.Module, str]] = []
        groups, first, of_heads = (
            sum(layer.groups for layer in self._layers),
            0,
            list[torch.Tensor](),
        )
        for layer in self._layers:
            of_heads.append(first + torch.arange(layer.heads) * layer.groups // layer.heads)
            for name, sections in layer.projections.items():
                of_rows = places(sections, first, layer.groups, groups=groups)
                self._add(f"{layer.name}.{name}", layer.module.get_submodule(name), of_rows)
            first += layer.groups
        weight = self._scaled[0].tensor
        self._reduced_over = _groups_of(weight, process_group)
        group_of = torch.cat(of_heads).to(weight.device)
        self._scale = Scaling(
            self._scaled, group_of, groups=groups, alpha=alpha, threshold=threshold
        )
        self._of_heads = torch.zeros_like(group_of, dtype=torch.float32)
        self._of_layers = self._of_heads.split([layer.heads for layer in self._layers])
        self._interval, self._steps = interval, 0
        watch_attention()
        self._measure_next()

    def _add(self, path: str, linear: Any, of_rows: torch.Tensor) -> None:
        """Add this rank's rows of a projection's weight and bias."""
        from transformers.pytorch_utils import Conv1D

        if not isinstance(linear, (nn.Linear, Conv1D)):
            raise UserError(
                f"QKClip: {path} is a {type(linear).__name__}, not a linear layer; leave QKClip out"
            )
        for kind in ("weight", "bias"):
            if (parameter := getattr(linear, kind)) is None:
                continue
            if not parameter.requires_grad:
                raise UserError(
                    f"QKClip would scale {path}.{kind}, which is frozen; train it, or leave"
                    " QKClip out"
                )
            dim = int(isinstance(linear, Conv1D) and kind == "weight")  # (inputs, outputs)
            if (rows := parameter.shape[dim]) != len(of_rows):
                raise UserError(
                    f"QKClip: {path}.{kind} has {rows} rows, where its heads need {len(of_rows)};"
                    " leave QKClip out"
                )
            self._scaled.append(Scaled(parameter, of_rows[_rows_here(parameter, dim)], dim))
            self._found_at.append((linear, kind))

    def step(self) -> torch.Tensor | None:
        """Clip, after the optimizer's step; the largest logit over all ranks, a scalar on the device. Collective.

        None at steps that do not measure. Raises a UserError where the weights are no longer the
        model's, or where the forward passes before the first step showed no logits.
        """
        largest = self._clip() if self._steps % self._interval == 0 else None
        self._steps += 1
        self._measure_next()
        return largest

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        for (linear, kind), (parameter, _, _) in zip(self._found_at, self._scaled, strict=True):
            now = getattr(linear, kind)  # FSDP2's plain one where it is gathered
            if now is not parameter and (
                isinstance(now, DTensor) or not isinstance(parameter, DTensor)
            ):
                raise UserError(
                    "QKClip: the model has other weights now; make QKClip after fully_shard, or"
                    " prepare()"
                )
        for group in self._reduced_over:
            dist.all_reduce(self._of_heads, op=dist.ReduceOp.MAX, group=group)
        if self._steps == 0 and bool((self._of_heads == -math.inf).any()):
            raise UserError(
                "QKClip: attention showed no logits before this step; train by the forward pass of"
                " this model, with model.train() and gradients"
            )
        self._scale(self._of_heads)
        return self._of_heads.max()

    def _measure_next(self) -> None:
        """Have attention keep its logits until the next step, if that one measures."""
        self._of_heads.fill_(-math.inf)
        is_due = self._steps % self._interval == 0
        for layer, of_layer in zip(self._layers, self._of_layers, strict=True):
            layer.module.largest_attention_logits = of_layer if is_due else None


class _Layer(NamedTuple):
    """An attention module, its name, heads and query groups, and its projections with their sections (`places`)."""

    name: str
    module: Any
    heads: int
    groups: int
    projections: Mapping[str, Sequence[Parts]]


_OF_LATENTS = ("q_a_layernorm", "kv_a_layernorm")
"""Norms before the projections that are scaled."""

_FUSED = {"GPT2Attention": "c_attn", "Phi3Attention": "qkv_proj"}
"""The projection that makes all queries, then all keys, then all values."""


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """The attention modules of a model; a UserError for one that cannot be clipped."""
    for name, module in model.named_modules():
        if "megatron_fsdp" in type(module).__module__:
            raise UserError(
                "QKClip does not know where Megatron-FSDP has its weights; use FSDP2, or --qk-clip"
                " of Megatron"
            )
        kind = type(module).__name__.removeprefix("FSDP")
        inner = [type(each).__name__ for each in module.modules() if each is not module]
        if not kind.endswith("Attention") or any(each.endswith("Attention") for each in inner):
            continue
        if (config := getattr(module, "config", None)) is None or not (
            projections := _projections(module, kind)
        ):
            raise UserError(
                f"QKClip: the query and key projections of {name} ({kind}) are not known; pass the"
                " part of the model that has others, or leave QKClip out"
            )
        changes = [
            child
            for child, _ in module.named_children()
            if "norm" in child and child not in _OF_LATENTS
        ]
        changes += [
            each
            for each in ("attn_logit_softcapping", "clip_qkv")
            if getattr(config, each, None) is not None
        ]
        if changes:
            raise UserError(
                f"QKClip: {name} ({kind}) has {' and '.join(changes)}: its logits are bounded, and"
                " scaled rows would change nothing; leave QKClip out"
            )
        if (found := config._attn_implementation) != "sdpa":
            raise UserError(
                f"QKClip: {name} computes attention by {found}; call"
                " model.set_attn_implementation('sdpa')"
            )
        heads = config.num_attention_heads
        yield _Layer(
            name, module, heads, heads // getattr(module, "num_key_value_groups", 1), projections
        )


def _projections(module: Any, kind: str) -> dict[str, Sequence[Parts]]:
    """The sections (`places`) of the projections that make queries and keys; none where these are not known."""
    if hasattr(module, "kv_b_proj"):
        queries = "q_proj" if module.q_lora_rank is None else "q_b_proj"
        return {
            queries: [[(QUERY, module.qk_nope_head_dim), (ROTARY, module.qk_rope_head_dim)]],
            "kv_b_proj": [[(KEY, module.qk_nope_head_dim), (OTHER, module.v_head_dim)]],
        }
    if not hasattr(module, "head_dim"):
        return {}
    query: Parts = [(QUERY, getattr(module, "num_key_value_groups", 1) * module.head_dim)]
    key, value = [(KEY, module.head_dim)], [(OTHER, module.head_dim)]
    if kind in _FUSED:
        return {_FUSED[kind]: [query, key, value]}
    return (
        {"q_proj": [query], "k_proj": [key]}
        if hasattr(module, "q_proj") and hasattr(module, "k_proj")
        else {}
    )


def _rows_here(parameter: torch.Tensor, dim: int) -> slice:
    """Which rows of a parameter this rank holds."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return slice(offsets[dim], offsets[dim] + sizes[dim])


def _groups_of(
    weight: torch.Tensor, group: dist.ProcessGroup | None
) -> Sequence[dist.ProcessGroup | None]:
    """The groups over which maxima are taken, one after the other."""
    if group is not None:
        return [group]
    if isinstance(weight, DTensor):
        return weight.device_mesh.get_all_groups()
    return [None] if dist.is_initialized() else []
