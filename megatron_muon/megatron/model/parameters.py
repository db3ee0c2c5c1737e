"""The matrices of a Megatron model's parameters: their shapes and blocks, and the ranks that share them.

Several of megatron-core's projections keep matrices of their own in one parameter: query, key and value; gate and up;
a latent and a rotary key; a layer's experts. What splits is decided from sizes of the model and of whole matrices,
never from the rows that a rank happens to hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes

from megatron_muon.core.layout import Matrix, RowSplit, whole
from megatron_muon.core.ranks import new_group_of, numbers_of_all_ranks
from megatron_muon.megatron.settings import MuonOptimizerConfig


@dataclass(frozen=True)
class Fused:
    """The rows of one parameter, as they repeat from its first row to its last."""

    parts: tuple[int, ...] = ()  # rows of each matrix in one repetition; none where it holds one matrix
    heads: tuple[int, ...] = ()  # rows of each head in one repetition of heads; none where it makes no heads
    gated: bool = False  # the rows are gate and up, half of them each
    interleave: int = 0  # rows of gate that alternate with as many of up; 0 where all of gate come first

    @property
    def unit(self) -> int:
        """Rows of one repetition: every matrix that is fused so has a multiple of them."""
        return 2 * max(self.interleave, 1) if self.gated else sum(self.parts or self.heads)

    def fits(self, rows: int) -> bool:
        """Whether rows are a whole number of repetitions."""
        return rows % self.unit == 0

    def split(self, rows: int, settings: MuonOptimizerConfig, *, tensor_parallel: int) -> RowSplit:
        """The blocks of a whole matrix of `rows` rows: one part after the other for each tensor-parallel rank."""
        if self.gated and settings.muon_split_gated_mlp:
            half = self.interleave or rows // (2 * tensor_parallel)
            return RowSplit(groups=rows // (2 * half), parts=(half, half))
        if self.heads and settings.muon_split_heads:
            return RowSplit(groups=1, parts=self.heads * (rows // sum(self.heads)))
        if self.parts and settings.muon_split_qkv:
            return RowSplit(groups=rows // sum(self.parts), parts=self.parts)
        return whole(rows)


def fused_rows(name: str, config: Any, stated: Sequence[int] = ()) -> Fused | None:
    """How the rows of a parameter are fused; None where nothing is known to be fused in it.

    `stated` are the rows of each part on a tensor-parallel rank, where the layer itself states them: `partition_sizes`
    of a weight, as Mamba's `in_proj` has them, or `in_proj_split_sections` of a GatedDeltaNet. `config` is the
    TransformerConfig of the parameter's layer.

    Sources, megatron-core 0.19: `_get_qkv_split_shapes` of its own Muon for QKV; get_query_key_value_tensors of
    SelfAttention (the gate lies between query and key), CrossAttention and MLASelfAttention; MLP.forward, where gate
    and up are the halves of the first projection. Its own Muon leaves all but QKV whole, latent attention too.
    """
    if stated:
        return Fused(parts=tuple(rows for rows in stated if rows))
    if config.multi_latent_attention:
        nope, rotary, value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        if ".linear_qkv_down_proj.weight" in name:
            return Fused(parts=(config.q_lora_rank, config.kv_lora_rank, rotary))
        if ".linear_kv_down_proj.weight" in name:
            return Fused(parts=(config.kv_lora_rank, rotary))
        if ".linear_kv_up_proj.weight" in name:
            return Fused(parts=(nope, value), heads=(nope, value))
        if re.search(r"\.linear_q(_up)?_proj\.weight", name):
            return Fused(heads=(nope + rotary,))
    if "linear_qkv.weight" in name:  # also beside latent attention, in a hybrid model
        return Fused(parts=tuple(_get_qkv_split_shapes(config)), heads=(config.kv_channels,))
    if ".linear_kv.weight" in name:
        return Fused(parts=(config.kv_channels,) * 2, heads=(config.kv_channels,))
    if config.gated_linear_unit and "linear_fc1.weight" in name:
        interleave = None
        if ".shared_experts." in name:
            interleave = getattr(config, "moe_shared_expert_glu_interleave_size", None)
        elif ".experts.linear_fc1." in name:  # not those of SequentialMLP, which never interleaves
            interleave = getattr(config, "moe_mlp_glu_interleave_size", None)
        return Fused(gated=True, interleave=interleave or 0)
    return None


def matrix_shape(parameter: torch.Tensor, *, over_tp: bool = True) -> tuple[int, int]:
    """Shape `(rows, cols)` of the matrix that Muon sees in a parameter; of a stack of experts `(experts * rows, cols)`.

    Whole over tensor-parallel ranks; without `over_tp` the part of this tensor-parallel rank counts as the matrix.
    """
    shape = (parameter if over_tp else getattr(parameter, "orig_param", parameter)).shape
    return math.prod(shape[:-1]), shape[-1]


def experts_in(parameter: torch.Tensor) -> int:
    """Experts stacked in a parameter; 1 for a matrix."""
    return int(parameter.shape[0]) if parameter.ndim == 3 else 1


def block_split(parameter: torch.Tensor, settings: MuonOptimizerConfig, *, over_tp: bool = True) -> RowSplit:
    """How the matrix of a tagged parameter splits into blocks; `over_tp` as for `matrix_shape`."""
    experts = experts_in(parameter)
    rows, part = (matrix_shape(parameter, over_tp=whole_rows)[0] // experts for whole_rows in (over_tp, False))
    fused: Fused | None = getattr(parameter, "fused_rows", None)
    if fused is None or not fused.fits(rows):  # a tensor-parallel rank's part may have too few query groups
        each = whole(rows)
    else:
        each = fused.split(rows, settings, tensor_parallel=rows // part)
    if parameter.ndim != 3:
        return each
    if each.groups > 1:
        raise ValueError(f"stacked experts need blocks of consecutive rows, got {each.groups} groups of {each.parts}")
    return RowSplit(1, each.parts * experts)


def matrix_of(name: str, parameter: torch.Tensor, settings: MuonOptimizerConfig, *, over_tp: bool = True) -> Matrix:
    """The matrix of a tagged parameter, still without shards; `over_tp` as for `matrix_shape`."""
    shape, split = matrix_shape(parameter, over_tp=over_tp), block_split(parameter, settings, over_tp=over_tp)
    return Matrix(name, shape, (), split, getattr(parameter, "ns_steps", 0))


def matrix_group(data_parallel: dist.ProcessGroup, tensor_parallel: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks that together hold matrices which data and tensor parallelism cut. Collective over all ranks."""
    if tensor_parallel.size() == 1:
        return data_parallel
    first = min(dist.get_process_group_ranks(data_parallel))
    label = min(numbers_of_all_ranks([first], tensor_parallel))[0]
    group = new_group_of(label)
    assert group.size() == data_parallel.size() * tensor_parallel.size(), "tensor-parallel peers share their groups"
    return group


def over_gloo(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for tensors in host memory. Collective over all ranks of the run."""
    return new_group_of(min(dist.get_process_group_ranks(group)), backend="gloo")
