"""Which parameters Muon takes: 2D weights and stacks of experts, no embedding, no output layer, nothing excluded.

Nothing whose rows are fused in a way that is not known either: one update for several matrices would be wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_muon.core.layout import RowSplit
from megatron_muon.fsdp.patterns import matching, steps_of
from megatron_muon.fsdp.selection import why_not_muon
from megatron_muon.fsdp.table import Row, blocks, table
from megatron_muon.megatron.model.parameters import experts_in, fused_rows, matrix_shape

EMBEDDING, OUTPUT, VECTOR = "embedding", "output layer", "vector"
UNKNOWN = "fused in a way that is not known (docs/parameters.md)"
"""Why a 2D weight goes to the scalar optimizer, beside the reasons of `why_not_muon`."""

_FUSED = re.compile(
    r"in_proj|qkv|kqv|gate_up|up_gate|w1[23]|glu|c_attn|query_key|key_value|(?<![a-z])(x_proj|w?kv(?![a-z]))",
    re.I,
)
"""Names under which layers, megatron-core's and others, keep several matrices in one weight."""

_TABLES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)
_LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear)  # a projection of embeddings is a matrix
_ATTRIBUTES_LEFT_BEHIND = (
    "allreduce",
    "shared_embedding",
    "expert_tp",
    "grad_norm_group",
    "use_muon",
    "partition_sizes",
)


def restore_attributes(model_chunks: Sequence[Any]) -> None:
    """Give the optimizer's DTensor parameters the attributes that Megatron-FSDP leaves on the originals.

    Without `allreduce` an expert parameter reads as dense, is reduced over the wrong group and counted wrong in the
    gradient norm (ParamAndGradBuffer._init_optimizer_named_parameters of megatron-core 0.19 copies a fixed list).
    """
    for parameter in (parameter for chunk in model_chunks for parameter in chunk.parameters()):
        original = getattr(parameter, "orig_param", None)
        for name in _ATTRIBUTES_LEFT_BEHIND:
            if hasattr(original, name):
                setattr(parameter, name, getattr(original, name))


def tag_for_muon(
    model_chunks: Sequence[Any], *, exclude: Sequence[str] = (), steps_for: Mapping[str, int] | None = None
) -> None:
    """Mark trainable parameters: `use_muon`, `why_not_muon`, `ns_steps`, `expert_tp`, `fused_rows`, `expert_stack`.

    A `use_muon` that a script has set is kept. What the patterns `exclude` match (`--muon-exclude`) goes to the scalar
    optimizer; `steps_for` has Newton-Schulz steps by pattern, the last that matches holds (`--muon-ns-steps-for`).
    Raises a UserError for a pattern that matches none of Muon's matrices.

    Source: megatron.core.optimizer._get_megatron_emerging_optimizer, which does this for its own Muon.
    """
    for name, parameter, path in _trained(model_chunks):
        if "experts" in name and "shared" not in name:
            parameter.expert_tp = True
        # Every expert a matrix, in a model of one's own: 0.19 refuses --moe-single-grouped-weight under Megatron-FSDP.
        parameter.expert_stack = parameter.ndim == 3 and ".experts." in name
        if parameter.ndim == 2 or parameter.expert_stack:
            why = _fuse(name, parameter, path)
            why = (_outside(name, parameter, path[-1]) if parameter.ndim == 2 else "") or why
            if why and not hasattr(parameter, "use_muon"):
                parameter.use_muon, parameter.why_not_muon = False, why
    matrices = {name: parameter for parameter, name in muon_matrices(model_chunks).items()}
    others = [name for p, name in parameter_names(model_chunks).items() if p.requires_grad and name not in matrices]
    hint = " (--muon-log-params lists all)"
    for name in matching("--muon-exclude", exclude, matrices, others=others, hint=hint):
        parameter = matrices.pop(name)
        parameter.use_muon, parameter.why_not_muon = False, "--muon-exclude"
        others.append(name)
    steps = steps_of(matrices, steps_for or {}, others=others, hint=hint)
    for name, parameter in matrices.items():
        parameter.ns_steps = steps.get(name, 0)


def _trained(model_chunks: Sequence[Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """The trainable parameters with their names before and the modules around them behind, the outermost first."""
    for chunk in model_chunks:
        modules = dict(chunk.named_modules())
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                parts = name.split(".")[:-1]
                yield name, parameter, [modules[".".join(parts[:depth])] for depth in range(len(parts) + 1)]


def _outside(name: str, parameter: Any, module: Any) -> str:
    """Why a 2D weight is no matrix inside the network, by its module, megatron-core's mark, and its name."""
    if isinstance(module, _TABLES):
        return EMBEDDING
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        return OUTPUT
    why = why_not_muon(name.replace("module.", ""), parameter)
    if not why and 1 in parameter.shape:
        return VECTOR
    return "" if why == EMBEDDING and isinstance(module, _LINEAR) else why


def _fuse(name: str, parameter: Any, path: Sequence[Any]) -> str:
    """Tag a 2D parameter or a stack with `fused_rows`; `UNKNOWN` where its rows seem to be fused in another way."""
    stated = getattr(parameter, "partition_sizes", ())
    if not stated and name.endswith(".in_proj.weight"):
        stated = getattr(path[-2], "in_proj_split_sections", ())
    config = next(m.config for m in reversed(path) if isinstance(getattr(m, "config", None), TransformerConfig))
    fused = fused_rows(name, config, stated)
    fits = fused is None or fused.fits(matrix_shape(parameter)[0] // experts_in(parameter))
    parameter.fused_rows = fused if fits else None
    if parameter.ndim == 2 and re.search(r"\.experts\.weight[12]$", name):  # GroupedMLP before megatron-core 0.16
        return UNKNOWN
    return "" if fits and (fused or not _FUSED.search(".".join(name.split(".")[-2:]))) else UNKNOWN


def is_muon_matrix(parameter: torch.Tensor) -> bool:
    """Whether Muon takes this tagged parameter: a 2D weight or a stack of experts that nothing keeps from it."""
    embedding = getattr(parameter, "is_embedding_or_output_parameter", False)  # megatron-core's mark
    is_matrix = parameter.ndim == 2 or getattr(parameter, "expert_stack", False)
    return is_matrix and not embedding and getattr(parameter, "use_muon", True)


def muon_matrices(model_chunks: Sequence[Any]) -> dict[Any, str]:
    """The trainable parameters that Muon takes, with their names."""
    return {p: name for p, name in parameter_names(model_chunks).items() if p.requires_grad and is_muon_matrix(p)}


def parameter_names(model_chunks: Sequence[Any]) -> dict[Any, str]:
    """The name of each parameter, without the wrappers' `module.` prefixes, unique over the model chunks."""
    return {
        parameter: (f"chunk{index}." if len(model_chunks) > 1 else "") + name.replace("module.", "")
        for index, chunk in enumerate(model_chunks)
        for name, parameter in chunk.named_parameters()
    }


def parameter_table(
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[torch.Tensor, str],
    splits: Mapping[torch.Tensor, RowSplit],
    *,
    full: bool = False,
) -> str:
    """The table of both optimizers: what is split, and why Muon leaves a 2D weight.

    Counts are whole over data- and tensor-parallel ranks; of experts those of this expert-parallel rank. A group
    without `optimizer` belongs to Muon; `splits` has the blocks of its parameters.
    """
    rows = []
    for group in sorted(groups, key=lambda group: "optimizer" in group):
        for p in group["params"]:
            why = getattr(p, "why_not_muon", "use_muon=False") if p.ndim == 2 and "optimizer" in group else ""
            note = why or (blocks(splits[p]) if p in splits else "")
            rows.append(Row(group.get("optimizer", "muon"), names[p], _shape(p), note))
    return table(rows, full=full)


def count(groups: Sequence[Mapping[str, Any]], *, of_muon: bool) -> int:
    """How many parameters Muon takes, or the scalar optimizer, counted as in the table."""
    return sum(
        math.prod(_shape(p)) for group in groups if ("optimizer" not in group) is of_muon for p in group["params"]
    )


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    if parameter.ndim == 2:
        return matrix_shape(parameter)
    return tuple(getattr(parameter, "orig_param", parameter).shape)
