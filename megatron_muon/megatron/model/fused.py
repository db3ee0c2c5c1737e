"""Which rows of a fused parameter belong together, by megatron-core's names and global sizes.

Several of megatron-core's projections keep matrices of their own in one parameter: query, key and value; gate and up;
a latent and a rotary key; a layer's experts. What splits is decided from sizes of the model and of whole matrices,
never from the rows that a rank happens to hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes

from megatron_muon.core.blocks import RowSplit, whole
from megatron_muon.errors import UserError
from megatron_muon.megatron.settings import MuonOptimizerConfig


@dataclass(frozen=True)
class Fused:
    """The rows of one parameter, as they repeat from its first row to its last.

    Attributes:
        parts: rows of each matrix in one repetition; none where it holds one matrix.
        heads: rows of each head in one repetition of heads; none where it makes no heads.
        gated: the rows are gate and up, half of them each.
        interleave: rows of gate that alternate with as many of up; 0 where all of gate come first.
    """

    parts: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    gated: bool = False
    interleave: int = 0

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


def fused_rows(name: str, config: Any) -> Fused | None:
    """How the rows of the parameter of this name are fused; None where it is one matrix whatever the settings.

    Sources, megatron-core 0.19: `_get_qkv_split_shapes` of its own Muon for QKV, with the gate of gated attention
    between query and key (SelfAttention.get_query_key_value_tensors); MLASelfAttention.get_query_key_value_tensors;
    MLP.forward, where gate and up are the halves of the first projection. Its own Muon leaves the projections of
    multi-latent attention whole ("TODO: support MLA"); here the fused ones are split with QKV: `linear_kv_down_proj`
    into latent and rotary key, `linear_qkv_down_proj` into query latent, latent and rotary key, `linear_kv_up_proj`
    into keys and values of all heads. `config` is a TransformerConfig.
    """
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
    elif "linear_qkv.weight" in name:
        return Fused(parts=tuple(_get_qkv_split_shapes(config)), heads=(config.kv_channels,))
    if config.gated_linear_unit and "linear_fc1.weight" in name:
        interleave = None
        if ".shared_experts." in name:
            interleave = getattr(config, "moe_shared_expert_glu_interleave_size", None)
        elif ".experts.linear_fc1." in name:  # not those of SequentialMLP, which never interleaves
            interleave = getattr(config, "moe_mlp_glu_interleave_size", None)
        return Fused(gated=True, interleave=interleave or 0)
    return None


def check_experts(name: str, ndim: int) -> None:
    """Refuse expert weights whose experts cannot be told apart.

    The GroupedMLP of megatron-core before 0.16 kept a layer's experts in 2D parameters `weight1` and `weight2`, fused
    along columns in one and along rows in the other: one matrix over all of them is not Muon.
    """
    if ndim == 2 and re.search(r"\.experts\.weight[12]$", name):
        raise UserError(
            f"{name}: experts fused into one 2D parameter are not supported with Muon; use TEGroupedMLP or "
            "SequentialMLP (Megatron's --moe-grouped-gemm on or off), keep them as (experts, rows, columns), or send "
            "them to the scalar optimizer with --muon-exclude experts.weight"
        )


def is_expert_stack(name: str, ndim: int) -> bool:
    """Whether a parameter is `(experts, rows, columns)`: every expert a matrix of its own.

    None of megatron-core 0.19's experts that train under Megatron-FSDP is of this form (it refuses
    --moe-single-grouped-weight there); a model of one's own may be. Told by name, as Megatron-FSDP tells experts.
    """
    return ndim == 3 and ".experts." in name
