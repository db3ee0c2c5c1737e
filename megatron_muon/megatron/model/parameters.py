"""The matrices of a Megatron model's parameters: their shapes and blocks, and which rank holds which part of them.

Megatron-FSDP hands the optimizer DTensors; here they become plain layouts over a process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.blocks import RowSplit, repeated, whole
from megatron_muon.core.layout import Layout, from_rectangles
from megatron_muon.errors import UserError
from megatron_muon.megatron.model.fused import Fused
from megatron_muon.megatron.ranks import of_all_ranks
from megatron_muon.megatron.settings import MuonOptimizerConfig

Rectangle = tuple[int, int, int, int]
"""`(row_start, rows, col_start, cols)` of a whole matrix."""


def matrix_shape(parameter: torch.Tensor, *, over_tp: bool = True) -> tuple[int, int]:
    """Shape `(rows, cols)` of the matrix that Muon sees in a parameter; of a stack of experts `(experts * rows, cols)`.

    Whole over tensor-parallel ranks; without `over_tp` the part of this tensor-parallel rank counts as the matrix.
    """
    shape = (parameter if over_tp else getattr(parameter, "orig_param", parameter)).shape
    return math.prod(shape[:-1]), shape[-1]


def experts_in(parameter: torch.Tensor) -> int:
    """Experts stacked in a parameter; 1 for a matrix."""
    return int(parameter.shape[0]) if parameter.ndim == 3 else 1


def rows_of_one(parameter: torch.Tensor, *, over_tp: bool = True) -> int:
    """Rows of the matrix, or of each one of a stack."""
    return matrix_shape(parameter, over_tp=over_tp)[0] // experts_in(parameter)


def block_split(parameter: torch.Tensor, settings: MuonOptimizerConfig, *, over_tp: bool = True) -> RowSplit:
    """How the matrix of a tagged parameter splits into blocks, decided from its whole shape, never from local rows.

    `over_tp` as for `matrix_shape`. Raises a ValueError for stacked experts whose blocks are not of consecutive rows.
    """
    rows = rows_of_one(parameter, over_tp=over_tp)
    fused: Fused | None = getattr(parameter, "fused_rows", None)
    if fused is None or not fused.fits(rows):  # a tensor-parallel rank's part may have too few query groups
        each = whole(rows)
    else:
        each = fused.split(rows, settings, tensor_parallel=rows // rows_of_one(parameter, over_tp=False))
    if parameter.ndim == 3 and each.groups > 1:
        raise ValueError(f"stacked experts need blocks of consecutive rows, got {each.groups} groups of {each.parts}")
    return repeated(each, experts_in(parameter)) if parameter.ndim == 3 else each


def matrix_group(data_parallel: dist.ProcessGroup, tensor_parallel: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks that together hold matrices which data and tensor parallelism cut.

    Where tensor parallelism has several ranks this makes process groups: a collective over all ranks of the run.
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


def local_rectangles(model_chunks: Sequence[Any]) -> dict[torch.Tensor, Rectangle]:
    """What this rank holds of each sharded matrix or stack.

    Megatron-FSDP notes it on the tensors from which it makes the optimizer's parameters
    (update_uneven_dtensor_chunk_metadata), for its checkpoints. Raises a UserError where tensor parallelism cuts the
    experts of a stack.
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
    rectangles: Mapping[torch.Tensor, Rectangle],
    group: dist.ProcessGroup,
    *,
    over_tp: bool,
) -> Layout:
    """The layout of sharded parameters over the ranks of `group`, as Megatron-FSDP cut them into `rectangles`.

    Ranks that hold the same rectangle are replicas: instances of the distributed optimizer, or tensor-parallel ranks
    where a parameter is not cut by tensor parallelism. `parameters` have the same order on every rank; `over_tp` is as
    for `matrix_shape`. One collective on Python objects, at construction only.
    """
    shapes = [matrix_shape(parameter, over_tp=over_tp) for parameter in parameters]
    # A part begins at a multiple of its size, so the remainder is the place within the part.
    mine = [
        (row_start % shape[0], rows, col_start % shape[1], cols)
        for shape, (row_start, rows, col_start, cols) in zip(
            shapes, map(rectangles.__getitem__, parameters), strict=True
        )
    ]
    everyone = of_all_ranks(mine, group)
    matrices = (
        from_rectangles(names[parameter], shape, held)
        for parameter, shape, *held in zip(parameters, shapes, *everyone, strict=True)
    )
    return Layout(group.size(), tuple(matrices))
