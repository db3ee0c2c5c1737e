"""What Muon has to know of a Megatron model's parameters: names, attributes, blocks, and who holds which rows.

Megatron-FSDP hands the optimizer DTensors that lack several attributes of the parameters they stand for. This module
restores them and describes matrices as plain layouts. It chooses no optimizer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.layout import Layout, RowSplit, from_rectangles, replicated, whole
from megatron_muon.errors import UserError
from megatron_muon.megatron.model.fused import (
    BlockSettings,
    Fused,
    check_experts,
    fused_rows,
    is_expert_stack,
    stack_split,
)
from megatron_muon.megatron.model.names import matching
from megatron_muon.megatron.model.vocabulary import vocabulary_weights
from megatron_muon.megatron.ranks import of_all_ranks

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
    """Mark trainable parameters: `use_muon`, `why_not_muon`, `expert_tp`, `fused_rows` and `expert_stack`.

    A `use_muon` that a script has set on an embedding or output layer is kept.

    Source: megatron.core.optimizer._get_megatron_emerging_optimizer, which does this for its own Muon. What the
    patterns `exclude` match (`--muon-exclude`) goes to the scalar optimizer.

    Raises:
        UserError: a pattern that matches none of Muon's matrices, or experts that cannot be told apart.
    """
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            if "experts" in name and "shared" not in name:
                parameter.expert_tp = True
            parameter.expert_stack = is_expert_stack(name, parameter.ndim)
    for parameter, why in vocabulary_weights(model_chunks).items():
        if not hasattr(parameter, "use_muon"):
            parameter.use_muon, parameter.why_not_muon = False, why  # type: ignore[attr-defined]
    names = {p: name for p, name in parameter_names(model_chunks).items() if p.requires_grad}
    matrices = {name: parameter for parameter, name in names.items() if is_muon_matrix(parameter)}
    for name in matching(exclude, matrices, others=[name for name in names.values() if name not in matrices]):
        parameter = matrices.pop(name)
        parameter.use_muon, parameter.why_not_muon = False, "--muon-exclude"  # type: ignore[attr-defined]
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad or not is_muon_matrix(parameter):
                continue
            check_experts(name, parameter.ndim)
            fused, rows = fused_rows(name, chunk.config), _rows_of_one(parameter, over_tp=True)
            if fused is not None and not fused.fits(rows):
                warnings.warn(
                    f"{name}: {rows} rows are no multiple of {fused.unit}, the rows of what is fused in "
                    "it, so Muon orthogonalises it as one matrix",
                    stacklevel=3,
                )
                fused = None
            parameter.fused_rows = fused


def is_muon_matrix(parameter: torch.Tensor) -> bool:
    """Whether Muon takes this parameter: a 2D weight or a stack of experts, no embedding and not the output layer.

    megatron-core marks word embeddings and the output layer with `is_embedding_or_output_parameter`; `tag_for_muon`
    sets `use_muon` to False on every embedding and output layer, and on what `--muon-exclude` names.
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


def matrix_shape(parameter: torch.Tensor, *, over_tp: bool = True) -> tuple[int, int]:
    """Shape `(rows, cols)` of the matrix that Muon sees in a parameter; of a stack of experts `(experts * rows, cols)`.

    Whole over tensor-parallel ranks; without `over_tp` the part of this tensor-parallel rank counts as the matrix.
    """
    shape = (parameter if over_tp else getattr(parameter, "orig_param", parameter)).shape
    return math.prod(shape[:-1]), shape[-1]


def experts_in(parameter: torch.Tensor) -> int:
    """Experts stacked in a parameter; 1 for a matrix."""
    return int(parameter.shape[0]) if parameter.ndim == 3 else 1


def _rows_of_one(parameter: torch.Tensor, *, over_tp: bool) -> int:
    return matrix_shape(parameter, over_tp=over_tp)[0] // experts_in(parameter)


def matrix_group(data_parallel: dist.ProcessGroup, tensor_parallel: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks that together hold matrices which data and tensor parallelism cut.

    A collective over all ranks of the run, at construction only: where tensor parallelism has more than one rank, it
    makes process groups.
    """
    if tensor_parallel.size() == 1:
        return data_parallel
    peers = of_all_ranks(dist.get_process_group_ranks(data_parallel), tensor_parallel)
    return _new_groups({rank for ranks in peers for rank in ranks}, like=data_parallel)


def over_gloo(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for tensors in host memory. A collective over all ranks, at construction only."""
    return _new_groups(dist.get_process_group_ranks(group), like=group, backend="gloo")


def _new_groups(mine: Iterable[int], *, like: dist.ProcessGroup, backend: str | None = None) -> dist.ProcessGroup:
    """Make the group that each rank names; this rank's, whose collectives wait as long as those of `like`."""
    ranks = tuple(sorted(mine))
    device = torch.device("cuda" if dist.get_backend(like) == "nccl" else "cpu")
    timeout = like._get_backend(device).options._timeout  # --distributed-timeout-minutes
    made = {
        each: dist.new_group(list(each), backend=backend, timeout=timeout) for each in sorted(set(of_all_ranks(ranks)))
    }
    group: dist.ProcessGroup = made[ranks]
    return group


def block_split(parameter: torch.Tensor, settings: BlockSettings, *, over_tp: bool = True) -> RowSplit:
    """How the matrix of a tagged parameter splits into blocks, decided from its whole shape, never from local rows.

    `over_tp` as for `matrix_shape`.
    """
    rows = _rows_of_one(parameter, over_tp=over_tp)
    fused: Fused | None = getattr(parameter, "fused_rows", None)
    if fused is None or not fused.fits(rows):  # a tensor-parallel rank's part may have too few query groups
        each = whole(rows)
    else:
        tensor_parallel = rows // _rows_of_one(parameter, over_tp=False)
        each = fused.split(rows, settings, tensor_parallel=tensor_parallel)
    return stack_split(experts_in(parameter), each) if parameter.ndim == 3 else each


def local_rectangles(model_chunks: Sequence[Any]) -> dict[torch.Tensor, tuple[int, int, int, int]]:
    """What this rank holds of each sharded matrix or stack: `(row_start, rows, col_start, cols)` of the whole.

    Megatron-FSDP notes it on the tensors from which it makes the optimizer's parameters
    (update_uneven_dtensor_chunk_metadata), for its checkpoints.

    Raises:
        UserError: tensor parallelism cuts the experts of a stack.
    """
    rectangles = {}
    for chunk in model_chunks:
        buffer = chunk.param_and_grad_buffer
        for name, parameter in buffer.optimizer_named_parameters:
            if parameter.ndim not in (2, 3):
                continue
            noted = buffer.dist_main_weight[name]._local_tensor.__create_chunk_list__()[0]
            offsets, sizes = noted.offsets, noted.sizes
            if parameter.ndim == 3:  # whole experts, one below the other
                if getattr(parameter, "expert_stack", False) and sizes[1:] != tuple(parameter.shape[1:]):
                    raise UserError(
                        f"{name}: a stack of experts {tuple(parameter.shape)} that tensor parallelism cuts is not "
                        "supported with Muon; use --expert-tensor-parallel-size 1, or --muon-exclude"
                    )
                rows = sizes[1]
                offsets, sizes = (offsets[0] * rows, offsets[2]), (sizes[0] * rows, sizes[2])
            rectangles[parameter] = (offsets[0], sizes[0], offsets[1], sizes[1])
    return rectangles


def layout_of(
    parameters: Sequence[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    rectangles: Mapping[torch.Tensor, tuple[int, int, int, int]],
    group: dist.ProcessGroup,
    settings: BlockSettings,
    *,
    over_tp: bool = True,
) -> Layout:
    """The layout of sharded parameters over the ranks of `group`, as Megatron-FSDP cut them.

    Ranks that hold the same rectangle are replicas: instances of the distributed optimizer, or tensor-parallel ranks
    where a parameter is not cut by tensor parallelism. One collective on Python objects, at construction only.

    Args:
        parameters: DTensors, in the same order on every rank of `group`.
        names: of the parameters.
        rectangles: `local_rectangles`.
        group: the ranks that hold the parameters; with `over_tp` tensor-parallel ones too.
        settings: which fused parameters are split into blocks.
        over_tp: as for `matrix_shape`.
    """
    shapes, mine = [], []
    for parameter in parameters:
        shape = matrix_shape(parameter, over_tp=over_tp)
        row_start, rows, col_start, cols = rectangles[parameter]
        shapes.append(shape)
        # A part begins at a multiple of its size, so the remainder is the place within the part.
        mine.append((row_start % shape[0], rows, col_start % shape[1], cols))
    everyone = of_all_ranks(mine, group)
    matrices = (
        from_rectangles(names[parameter], shape, held, block_split(parameter, settings, over_tp=over_tp))
        for parameter, shape, *held in zip(parameters, shapes, *everyone, strict=True)
    )
    return Layout(group.size(), tuple(matrices))


def replicated_layout(
    parameters: Sequence[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    group: dist.ProcessGroup,
    settings: BlockSettings,
) -> Layout:
    """The layout of parameters that every rank of `group` holds whole."""
    ranks = group.size()
    matrices = (
        replicated(names[p], matrix_shape(p, over_tp=False), ranks, block_split(p, settings, over_tp=False))
        for p in parameters
    )
    return Layout(ranks, tuple(matrices))
