"""Which parameters Muon takes: 2D weights and stacks of experts, no embedding, no output layer, nothing excluded."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import nn

from megatron_muon.errors import UserError
from megatron_muon.fsdp.selection import matching, shares, steps_of
from megatron_muon.megatron.model.parameters import fused_rows, matrix_shape, rows_of_one

EMBEDDING, TIED, OUTPUT = "embedding", "tied to an embedding", "projection to the vocabulary"
"""Why a 2D weight goes to the scalar optimizer."""

_TABLES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)
_LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
_ATTRIBUTES_LEFT_BEHIND = ("allreduce", "shared_embedding", "expert_tp", "grad_norm_group", "use_muon")
_SHOWN = 3
"""Names shown of the weights that are left out for one reason, or that are like a pattern."""


def restore_attributes(model_chunks: Sequence[Any]) -> None:
    """Give the optimizer's DTensor parameters the attributes that Megatron-FSDP leaves on the originals.

    Without `allreduce` an expert parameter reads as dense, is reduced over the wrong group and counted wrong in the
    gradient norm. Needed by megatron-core 0.19 (ParamAndGradBuffer._init_optimizer_named_parameters copies a fixed
    list).
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

    A `use_muon` that a script has set on an embedding or output layer is kept. What the patterns `exclude` match
    (`--muon-exclude`) goes to the scalar optimizer; `steps_for` has the Newton-Schulz steps of what its patterns match,
    the last that does (`--muon-ns-steps-for`). Raises a UserError for a pattern that matches none of Muon's
    matrices, and for experts that cannot be told apart.

    Source: megatron.core.optimizer._get_megatron_emerging_optimizer, which does this for its own Muon.
    """
    for name, parameter, _ in _trained(model_chunks):
        if "experts" in name and "shared" not in name:
            parameter.expert_tp = True
        # Every expert a matrix, in a model of one's own: 0.19 refuses --moe-single-grouped-weight under Megatron-FSDP.
        parameter.expert_stack = parameter.ndim == 3 and ".experts." in name
    for parameter, why in vocabulary_weights(model_chunks).items():
        if not hasattr(parameter, "use_muon"):
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
    for name, parameter, config in _trained(model_chunks):
        if not is_muon_matrix(parameter):
            continue
        if parameter.ndim == 2 and re.search(r"\.experts\.weight[12]$", name):  # GroupedMLP before megatron-core 0.16
            raise UserError(
                f"{name}: experts fused into one 2D parameter are not supported with Muon; use TEGroupedMLP or "
                "SequentialMLP (Megatron's --moe-grouped-gemm on or off), keep them as (experts, rows, columns), or "
                "send them to the scalar optimizer with --muon-exclude experts.weight1 experts.weight2"
            )
        parameter.fused_rows, rows = fused_rows(name, config), rows_of_one(parameter)
        if parameter.fused_rows is not None and not parameter.fused_rows.fits(rows):
            warnings.warn(
                f"{name}: {rows} rows are no multiple of {parameter.fused_rows.unit}, the rows of what is fused in it, "
                "so Muon orthogonalises it as one matrix",
                stacklevel=3,
            )
            parameter.fused_rows = None


def _trained(model_chunks: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """The trainable parameters, their names before them and their chunk's config behind."""
    for chunk in model_chunks:
        yield from ((name, p, chunk.config) for name, p in chunk.named_parameters() if p.requires_grad)


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


def vocabulary_weights(model_chunks: Sequence[Any]) -> dict[Any, str]:
    """The 2D weights that Muon must not take, each with the reason.

    Embeddings are the weights of embedding modules, with whatever else holds the same parameter, and parameters with
    "embedding" in their names that no linear layer holds. In a model that megatron-core has not marked, the last
    linear layer with as many rows as the largest embedding is the projection to the vocabulary, unless a linear layer
    is tied to an embedding.
    """
    reasons: dict[Any, str] = {}
    linear: list[torch.Tensor] = []
    vocabulary, marked = 0, False
    modules = [item for chunk in model_chunks for item in chunk.named_modules()]
    for module, (name, parameter) in ((m, item) for path, m in modules for item in m.named_parameters(path, False)):
        if parameter.ndim != 2:
            continue
        if getattr(parameter, "is_embedding_or_output_parameter", False):
            marked = True
            reasons.setdefault(parameter, OUTPUT)
        if isinstance(module, _TABLES):
            vocabulary = max(vocabulary, parameter.shape[0])
            reasons[parameter] = EMBEDDING
        elif isinstance(module, _LINEAR):
            linear.append(parameter)
        elif "embedding" in name:
            reasons.setdefault(parameter, EMBEDDING)
    tied = [parameter for parameter in linear if reasons.get(parameter) == EMBEDDING]
    reasons.update(dict.fromkeys(tied, TIED))
    if not tied and not marked:
        to_vocabulary = [parameter for parameter in linear if parameter.shape[0] == vocabulary]
        reasons.update(dict.fromkeys(to_vocabulary[-1:], OUTPUT))
    return reasons


def parameter_table(
    groups: Sequence[Mapping[str, Any]], names: Mapping[torch.Tensor, str], *, full: bool = False
) -> str:
    """A short table: tensors, parameters and share for each optimizer, and the 2D weights that Muon does not take.

    With `full`, every parameter too. Counts are whole over data- and tensor-parallel ranks; of experts those of this
    expert-parallel rank. A group without `optimizer` belongs to Muon.
    """
    found, left_out = defaultdict(list), defaultdict(list)
    for group in sorted(groups, key=lambda group: "optimizer" in group):
        found[group.get("optimizer", "muon")].extend(group["params"])
    lines = shares({optimizer: [_numel(p) for p in parameters] for optimizer, parameters in found.items()})
    for optimizer, parameters in found.items():
        for p in parameters if optimizer != "muon" else ():
            if p.ndim == 2:
                left_out[getattr(p, "why_not_muon", "use_muon=False")].append(names[p])
    for why, left in left_out.items():
        more = f" and {len(left) - _SHOWN:,} more" if len(left) > _SHOWN else ""
        lines.append(f"not Muon's, {why}: {', '.join(left[:_SHOWN])}{more}")
    if full:
        lines.append("")
        for optimizer, parameters in found.items():
            lines += [f"{optimizer:<12}{' x '.join(map(str, _shape(p))):>16}  {names[p]}" for p in parameters]
    return "\n".join(lines)


def count(groups: Sequence[Mapping[str, Any]], *, of_muon: bool) -> int:
    """How many parameters Muon takes, or the scalar optimizer, counted as in the table."""
    return sum(_numel(p) for group in groups if ("optimizer" not in group) is of_muon for p in group["params"])


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    if parameter.ndim == 2:
        return matrix_shape(parameter)
    return tuple(getattr(parameter, "orig_param", parameter).shape)


def _numel(parameter: torch.Tensor) -> int:
    return math.prod(_shape(parameter))
