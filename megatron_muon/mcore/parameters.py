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
from megatron_muon.sharding import Layout, evenly_sharded, from_rectangles

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


def matrix_shape(parameter: torch.Tensor, *, over_tp: bool = True) -> tuple[int, int]:
    """Shape `(rows, cols)` of the matrix that Muon sees in a 2D parameter.

    Args:
        parameter: a DTensor of Megatron-FSDP, or the parameter that it stands for.
        over_tp: whole over tensor-parallel ranks; False stands for the part of this tensor-parallel rank.
    """
    shape = (parameter if over_tp else getattr(parameter, "orig_param", parameter)).shape
    return shape[0], shape[1]


def matrix_group(data_parallel: dist.ProcessGroup, tensor_parallel: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks that together hold matrices which data and tensor parallelism cut.

    A collective over all ranks of the run, at construction only: where tensor parallelism has more than one rank, it
    makes process groups.
    """
    if tensor_parallel.size() == 1:
        return data_parallel
    peers: list[Any] = [None] * tensor_parallel.size()
    dist.all_gather_object(peers, dist.get_process_group_ranks(data_parallel), group=tensor_parallel)
    mine = tuple(sorted({rank for ranks in peers for rank in ranks}))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(everyone))}
    group: dist.ProcessGroup = made[mine]
    return group


def block_split(parameter: torch.Tensor, *, split_qkv: bool, over_tp: bool = True) -> RowSplit:
    """How the matrix of `parameter` splits into blocks, decided from its whole shape and never from local rows.

    Args:
        parameter: a 2D parameter that `tag_for_muon` has seen.
        split_qkv: split query, key and value.
        over_tp: as for `matrix_shape`.
    """
    rows = matrix_shape(parameter, over_tp=over_tp)[0]
    if split_qkv and getattr(parameter, "is_qkv", False):
        parts: Sequence[int] = vars(parameter)["qkv_split_shapes"]
        if rows % sum(parts) == 0:
            return RowSplit(groups=rows // sum(parts), parts=tuple(parts))
    return whole(rows)


def local_rectangles(model_chunks: Sequence[Any]) -> dict[torch.Tensor, tuple[int, int, int, int]]:
    """What this rank holds of each sharded 2D parameter: `(row_start, rows, col_start, cols)` of the whole.

    Megatron-FSDP notes it on the tensors from which it makes the optimizer's parameters
    (update_uneven_dtensor_chunk_metadata), for its checkpoints.
    """
    rectangles = {}
    for chunk in model_chunks:
        buffer = chunk.param_and_grad_buffer
        for name, parameter in buffer.optimizer_named_parameters:
            if parameter.ndim == 2:
                noted = local_rows(buffer.dist_main_weight[name]).__create_chunk_list__()[0]  # type: ignore[attr-defined]
                (row_start, col_start), (rows, cols) = noted.offsets, noted.sizes
                rectangles[parameter] = (row_start, rows, col_start, cols)
    return rectangles


def layout_of(
    parameters: Sequence[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    rectangles: Mapping[torch.Tensor, tuple[int, int, int, int]],
    group: dist.ProcessGroup,
    *,
    over_tp: bool = True,
) -> Layout:
    """The layout of sharded parameters over the ranks of `group`, as Megatron-FSDP cut them.

    Ranks that hold the same rectangle are replicas: instances of the distributed optimizer, or tensor-parallel ranks
    where a parameter is not cut by tensor parallelism. One collective on Python objects, at construction only.

    Args:
        parameters: DTensors, the same list in the same order on every rank of `group`.
        names: the name of each parameter.
        rectangles: `local_rectangles`.
        group: the ranks that hold the parameters.
        over_tp: matrices are whole over tensor-parallel ranks, which `group` includes. False where the part of one
            tensor-parallel rank counts as the matrix and `group` has data-parallel ranks only.
    """
    shapes, mine = [], []
    for parameter in parameters:
        shape = matrix_shape(parameter, over_tp=over_tp)
        row_start, rows, col_start, cols = rectangles[parameter]
        shapes.append(shape)
        # A part begins at a multiple of its size, so the remainder is the place within the part.
        mine.append((row_start % shape[0], rows, col_start % shape[1], cols))
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return Layout(
        world_size=group.size(),
        matrices=tuple(
            from_rectangles(names[parameter], shape, [held[index] for held in everyone])
            for index, (parameter, shape) in enumerate(zip(parameters, shapes, strict=True))
        ),
    )


def replicated_layout(
    parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str], group: dist.ProcessGroup
) -> Layout:
    """A layout by which to plan the work of parameters that every rank of `group` holds whole."""
    matrices = (evenly_sharded(names[p], matrix_shape(p, over_tp=False), group.size()) for p in parameters)
    return Layout(world_size=group.size(), matrices=tuple(matrices))
