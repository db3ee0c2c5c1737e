"""Roles of parameters, by their modules and by their names: matrices inside the network or not."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

EMBEDDING = "embedding"
OUTPUT = "output layer"
"""Roles of weights that are not matrices inside the network."""

LINEAR = "linear"
CONVOLUTION = "convolution"
"""Roles of weights that are neither tables nor stacks, whatever their names."""

EMBEDDINGS = "*embed* emb *_emb wte wpe shared relative_attention_bias"
"""Names of modules, each one component, whose weights are tables of vectors."""

TABLES = "*bias* *_table *_log *_token *_tokens *_queries rel_pos* codebook*"
"""Names of 2D parameters that are not matrices: biases by head, tables by position, rates of a
Mamba, learned tokens and queries."""

OUTPUTS = """
    lm_head lm_heads head heads output output_layer output_projection to_logits logits
    fc fc_out proj_out classifier score qa_outputs seq_relationship unembed embed_out
    value_head v_head reward_head score_head classification_head
"""
"""Names of modules, outside numbered layers, that make a network's outputs."""

OUTPUT_WEIGHTS = (".generator.weight", ".generator.proj.weight")
"""Ends of output layers' names; a module called so may also be a whole network."""

_NO_VOCABULARY = ("pos", "wpe", "type")
"""Parts of names of embeddings whose rows are positions or types of tokens, not words."""


_LARGEST_KERNEL = 16
"""Largest side of a convolution's kernel; parameters with larger ones count as stacks."""


def why_not_muon(
    name: str,
    parameter: torch.Tensor,
    *,
    is_named: bool = False,
    role: str = "",
) -> str:
    """Why a parameter is not a matrix inside the network, or a stack of these; empty if it is.

    `is_named`: by `flatten=` or `stacks=`. `role`: that of its module, if known.
    """
    is_stack = parameter.ndim > 2 and "expert" in name
    if parameter.ndim != 2 and not is_stack and not is_named:
        return CONVOLUTION if role == CONVOLUTION else f"{parameter.ndim}D"
    if not parameter.numel():
        return "no elements"
    if is_named:  # a patch embedding too, which is a convolution and not a table
        return ""
    if role in (EMBEDDING, OUTPUT):
        return role
    if is_stack and 1 in parameter.shape[-2:]:
        return "vectors"
    components = name.lower().split(".")
    if _any_match(components[-1:], TABLES):
        return "table"
    if is_output(name):
        return OUTPUT
    if role != LINEAR and _any_match(components, EMBEDDINGS):
        return EMBEDDING
    return "vector" if not is_stack and 1 in parameter.shape else ""


def may_be_stack(name: str, shape: Sequence[int]) -> bool:
    """True if a parameter can be a stack of matrices.

    A convolution is recognized by its name, or by a small kernel with equal sides.
    """
    if len(shape) < 3 or "conv" in name.lower():
        return False
    rows, cols = shape[-2:]
    is_kernel = len(shape) > 3 and rows == cols <= _LARGEST_KERNEL
    return min(rows, cols) > 1 and not is_kernel


def may_be_wide_stack(name: str, shape: Sequence[int]) -> bool:
    """The same, if no kernel of a convolution is as large."""
    return may_be_stack(name, shape) and min(shape[-2:]) > _LARGEST_KERNEL


def _any_match(components: Sequence[str], patterns: str) -> bool:
    return any(fnmatch.filter(components, pattern) for pattern in patterns.split())


def is_output(name: str) -> bool:
    """True if a parameter belongs to an output layer, by its name."""
    if _is_numbered(name.split(".")):
        return False
    is_named = _any_match(name.lower().split("."), OUTPUTS)
    return is_named or f".{name}".endswith(OUTPUT_WEIGHTS)


def _is_numbered(components: Sequence[str]) -> bool:
    return any(part.isdigit() for part in components)


def role_of(module: object) -> str:
    """The role of a module's weight, by the names of its classes; empty if these say nothing."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return CONVOLUTION
    classes = [each.__name__ for each in type(module).__mro__]
    if any(name.endswith("Embedding") or name == "EmbeddingBag" for name in classes):
        return EMBEDDING
    return LINEAR if any(name.endswith("Linear") for name in classes) else ""


def roles_of(model: nn.Module) -> dict[str, str]:
    """The roles of a model's weights by name; a weight that is tied to an embedding is one."""
    roles: dict[torch.Tensor, str] = {}
    tied = set[int]()
    for module in model.modules():
        role = role_of(module)
        for p in _weights(module) if role else ():
            if {role, roles.get(p)} == {EMBEDDING, LINEAR}:
                tied.add(p.shape[0])
            if roles.get(p) != EMBEDDING:
                roles[p] = role
    for p in _returned(model, "get_input_embeddings"):
        if roles.get(p) != LINEAR:
            roles[p] = EMBEDDING
    for p in _returned(model, "get_output_embeddings"):
        if roles.get(p) != EMBEDDING:
            roles[p] = OUTPUT
    named = {name: roles[p] for name, p in model.named_parameters() if p in roles}
    named.update(dict.fromkeys(_outputs_by_width(model, named, tied), OUTPUT))
    return named


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """The parameters of a module itself that have two or more dimensions."""
    return [p for p in module._parameters.values() if p is not None and p.ndim > 1]


def _returned(model: nn.Module, method: str) -> Iterator[torch.Tensor]:
    """The matrices of the modules that a method of transformers' models returns."""
    for module in model.modules():
        try:
            found = getattr(module, method)()
        except (NotImplementedError, AttributeError):  # not every model has the method
            continue
        if isinstance(found, nn.Module):
            for each in found.modules():
                yield from (p for p in _weights(each) if p.ndim == 2)


def _outputs_by_width(
    model: nn.Module,
    roles: Mapping[str, str],
    known: set[int],
) -> set[str]:
    """Names of output layers after all numbered blocks: as wide as the labels, or a vocabulary.

    The vocabulary is that of a config, or the rows of an embedding for a layer of its shape. Its
    layer is the last one that fits, and is not looked for if one is `known`, by its width, or tied
    to an embedding. As many outputs as inputs say nothing.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if name in roles}
    behind = list[str]()
    tables = set[torch.Size]()
    for name, shape in shapes.items():
        if roles[name] == OUTPUT or is_output(name):
            known.add(shape[0])
        if roles[name] == EMBEDDING and not any(part in name for part in _NO_VOCABULARY):
            tables.add(shape)
        if roles[name] == LINEAR:
            if _is_numbered(name.split(".")[:-2]):
                behind.clear()
            else:
                behind.append(name)
    labels = set(_sizes(model, "num_labels"))
    words = set(_sizes(model, "vocab_size"))
    found = set[str]()
    for name in reversed(behind):
        rows, cols = shapes[name]
        if rows == cols:
            continue
        # The last layer of an `nn.Sequential` is numbered, too.
        is_apart = name == behind[-1] or not _is_numbered(name.split("."))
        is_wide = shapes[name] in tables or _fits(name, rows, words)
        if _fits(name, rows, labels):
            found.add(name)
        elif is_apart and is_wide and rows not in known:
            found.add(name)
            known.add(rows)
    return found


def _sizes(
    model: nn.Module,
    name: str,
) -> Iterator[tuple[str, int]]:
    """A number in the configs of a model and its parts, with the prefix of names in the part."""
    for path, module in model.named_modules():
        size = getattr(getattr(module, "config", None), name, None)
        if isinstance(size, int):
            yield f"{path}." if path else "", size


def _fits(name: str, rows: int, sizes: Iterable[tuple[str, int]]) -> bool:
    return any(size == rows and name.startswith(path) for path, size in sizes)
