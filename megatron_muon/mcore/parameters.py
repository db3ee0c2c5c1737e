"""What Muon has to know of a Megatron model's parameters: names, attributes, blocks, and who holds which rows.

Megatron-FSDP hands the optimizer DTensors that lack several attributes of the parameters they stand for. This module
restores them and describes matrices as plain layouts. It chooses no optimizer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.mcore.fused import BlockSettings, check_experts, fused_rows, is_expert_stack, stack_split
from megatron_muon.names import matching
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


def tag_for_muon(model_chunks: Sequence[Any], *, exclude: Sequence[str] = ()) -> None:
    """Mark trainable parameters by their names: `use_muon`, `expert_tp`, `fused_rows` and `expert_stack`.

    Source: megatron.core.optimizer._get_megatron_emerging_optimizer, which does this for its own Muon.

    Args:
        model_chunks: the model.
        exclude: patterns of `--muon-exclude`; what they match goes to the scalar optimizer.

    Raises:
        UserError: a pattern that matches none of Muon's matrices, or experts that cannot be told apart.
    """
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            if "embedding" in name:
                parameter.use_muon = False  # position embeddings too, which megatron-core marks under MuP only
            if "experts" in name and "shared" not in name:
                parameter.expert_tp = True
            parameter.expert_stack = is_expert_stack(name, parameter.ndim)
    names = {p: name for p, name in parameter_names(model_chunks).items() if p.requires_grad}
    matrices = {name: parameter for parameter, name in names.items() if is_muon_matrix(parameter)}
    for name in matching(exclude, matrices, others=[name for name in names.values() if name not in matrices]):
        matrices.pop(name).use_muon = False  # type: ignore[attr-defined]
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and is_muon_matrix(parameter):
                check_experts(name, parameter.ndim)
                _tag_fused_rows(name, parameter, chunk.config)


def _tag_fused_rows(name: str, parameter: torch.Tensor, config: Any) -> None:
    fused = fused_rows(name, config)
    rows = _rows_of_one(parameter)
    if fused is not None and not fused.fits(rows):
        warnings.warn(
            f"{name}: {rows} rows are no multiple of {fused.unit}, the rows of what is fused in "
            "it, so Muon orthogonalises it as one matrix",
            stacklevel=4,
        )
        fused = None
    parameter.fused_rows = fused  # type: ignore[attr-defined]


def is_muon_matrix(parameter: torch.Tensor) -> bool:
    """Whether Muon takes this parameter: a 2D weight or a stack of experts, no embedding and not the output layer.

    megatron-core marks word embeddings and the output layer with `is_embedding_or_output_parameter`; `tag_for_muon`
    sets `use_muon` to False on every embedding, position embeddings too, and on what `--muon-exclude` names.
    """
    embedding = getattr(parameter, "is_embedding_or_output_parameter", False)
    is_matrix = parameter.ndim == 2 or getattr(parameter, "expert_stack", False)
    return is_matrix and not embedding and getattr(parameter, "use_muon", True)


def parameter_names(model_chunks: Sequence[Any]) -> dict[torch.Tensor, str]:
    """The name of each parameter, without the wrappers' `module.` prefixes, unique over the model chunks."""
    names: dict[torch.Tensor, str] = {}
    for index, chunk in enumerate(model_chunks):
        prefix = f"chunk{index}." if len(model_chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            names[parameter] = prefix + name.removeprefix("module.").replace("module.", "")
    return names


def matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Shape `(rows, cols)` of the matrix that the data-parallel group shares: this tensor-parallel rank's part.

    A stack of experts `(experts, rows, cols)` counts as `(experts * rows, cols)`.
    """
    original = getattr(parameter, "orig_param", parameter)
    return math.prod(original.shape[:-1]), original.shape[-1]


def experts_in(parameter: torch.Tensor) -> int:
    """How many experts are stacked in `parameter`; 1 for a matrix."""
    return int(getattr(parameter, "orig_param", parameter).shape[0]) if parameter.ndim == 3 else 1


def _rows_of_one(parameter: torch.Tensor) -> int:
    return matrix_shape(parameter)[0] // experts_in(parameter)


def block_split(parameter: torch.Tensor, settings: BlockSettings, *, tensor_parallel: int = 1) -> RowSplit:
    """How the matrix of `parameter` splits into blocks, decided from its whole shape and never from local rows.

    Args:
        parameter: a matrix `(rows, cols)` or a stack of experts `(experts, rows, cols)`, after `tag_for_muon`.
        settings: which splits were asked for.
        tensor_parallel: ranks whose parts of the matrix lie one after the other in `matrix_shape`'s rows; 1 where that
            is one rank's part.
    """
    rows = _rows_of_one(parameter)
    fused = getattr(parameter, "fused_rows", None)
    each = whole(rows) if fused is None else fused.split(rows, settings, tensor_parallel=tensor_parallel)
    return stack_split(experts_in(parameter), each) if parameter.ndim == 3 else each


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
