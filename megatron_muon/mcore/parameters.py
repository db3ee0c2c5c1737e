"""What Muon has to know of a Megatron model's parameters: names, attributes, blocks, and who holds which rows.

Megatron-FSDP hands the optimizer DTensors that lack several attributes of the parameters they stand for. This module
restores them and describes matrices as plain layouts. It chooses no optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes

from megatron_muon.optim.blocks import RowSplit, whole
from megatron_muon.optim.sharded_muon import local_rows
from megatron_muon.sharding import Layout, evenly_sharded, row_sharded

_ATTRIBUTES_LEFT_BEHIND = ("allreduce", "shared_embedding", "expert_tp", "grad_norm_group", "use_muon")


def restore_attributes(model_chunks: Sequence[Any]) -> None:
    """Give the optimizer's DTensor parameters the attributes that Megatron-FSDP leaves on the originals.

    Without `allreduce` an expert parameter reads as dense, is reduced over the wrong group and counted wrong in the
    gradient norm. Needed by megatron-core 0.19 (ParamAndGradBuffer._init_optimizer_named_parameters copies a fixed
    list).
    """
    for chunk in model_chunks:
        for parameter in chunk.parameters():
            original = getattr(parameter, "orig_param", None)
            for name in _ATTRIBUTES_LEFT_BEHIND:
                if original is not None and hasattr(original, name):
                    setattr(parameter, name, getattr(original, name))


def tag_for_muon(model_chunks: Sequence[Any]) -> None:
    """Mark trainable parameters by their names: `use_muon`, `is_qkv`, `qkv_split_shapes` and `expert_tp`.

    Source: megatron.core.optimizer._get_megatron_emerging_optimizer, which does this for its own Muon.
    """
    for chunk in model_chunks:
        config = chunk.config
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            if "embedding" in name:
                parameter.use_muon = False  # position embeddings too, which megatron-core marks under MuP only
            if "experts" in name and "shared" not in name:
                parameter.expert_tp = True
            if "linear_qkv.weight" in name and parameter.ndim == 2 and not config.multi_latent_attention:
                parts = _get_qkv_split_shapes(config)
                if parameter.shape[0] % sum(parts) == 0:
                    parameter.is_qkv = True
                    parameter.qkv_split_shapes = parts
                else:
                    warnings.warn(
                        f"{name}: {parameter.shape[0]} rows are no multiple of {sum(parts)} (query, key and value rows "
                        "of a group), so Muon orthogonalises it as one matrix",
                        stacklevel=2,
                    )


def is_muon_matrix(parameter: torch.Tensor) -> bool:
    """Whether Muon takes this parameter: a 2D weight that is neither an embedding nor the output layer.

    megatron-core marks word embeddings and the output layer with `is_embedding_or_output_parameter`; `tag_for_muon`
    sets `use_muon` to False on every embedding, position embeddings too.
    """
    embedding = getattr(parameter, "is_embedding_or_output_parameter", False)
    return parameter.ndim == 2 and not embedding and getattr(parameter, "use_muon", True)


def parameter_names(model_chunks: Sequence[Any]) -> dict[torch.Tensor, str]:
    """The name of each parameter, without the wrappers' `module.` prefixes, unique over the model chunks."""
    names: dict[torch.Tensor, str] = {}
    for index, chunk in enumerate(model_chunks):
        prefix = f"chunk{index}." if len(model_chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            names[parameter] = prefix + name.removeprefix("module.").replace("module.", "")
    return names


def matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Shape `(rows, cols)` of the matrix that the data-parallel group shares: this tensor-parallel rank's part."""
    original = getattr(parameter, "orig_param", parameter)
    return original.shape[0], original.shape[1]


def block_split(parameter: torch.Tensor, *, split_qkv: bool) -> RowSplit:
    """How the matrix of `parameter` splits into blocks, decided from its whole shape and never from local rows."""
    rows = matrix_shape(parameter)[0]
    if split_qkv and getattr(parameter, "is_qkv", False):
        parts: Sequence[int] = vars(parameter)["qkv_split_shapes"]
        if rows % sum(parts) == 0:
            return RowSplit(groups=rows // sum(parts), parts=tuple(parts))
    return whole(rows)


def row_layout(
    parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str], group: dist.ProcessGroup
) -> Layout:
    """The layout of row-sharded parameters over their data-parallel group.

    Megatron-FSDP cuts a bucket into consecutive pieces, rank by rank, so the rows of a rank follow those of the ranks
    before it. One collective on Python objects, at construction only.

    Args:
        parameters: the same list in the same order on every rank of `group`.
        names: the name of each parameter.
        group: the group over which the parameters are sharded.
    """
    mine: list[int] = [local_rows(parameter).shape[0] for parameter in parameters]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    matrices = tuple(
        row_sharded(names[parameter], matrix_shape(parameter), [rows[index] for rows in everyone])
        for index, parameter in enumerate(parameters)
    )
    return Layout(world_size=group.size(), matrices=matrices)


def replicated_layout(
    parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str], group: dist.ProcessGroup
) -> Layout:
    """A layout by which to plan the work of parameters that every rank of `group` holds whole."""
    matrices = (evenly_sharded(names[p], matrix_shape(p), group.size()) for p in parameters)
    return Layout(world_size=group.size(), matrices=tuple(matrices))
