"""Roles of parameters by their modules: embeddings, weights tied to them, output layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from megatron_muon.fsdp.name_rules import (
    CONVOLUTION,
    EMBEDDING,
    LINEAR,
    OUTPUT,
    around,
    is_numbered,
    is_output,
)

_NO_VOCABULARY = ("pos", "wpe", "type")
"""Parts of names of embeddings whose rows are positions or types of tokens, not words."""


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
    held = [(p, role_of(module)) for p, module in _held(model)]
    roles = {p: role for p, role in held if role}
    linear = {p for p, role in held if role == LINEAR}
    tables = {p for p, role in held if role == EMBEDDING}
    for p in _returned(model, "get_input_embeddings"):
        if roles.get(p) != LINEAR:
            tables.add(p)
    outputs = _returned(model, "get_output_embeddings")
    roles.update(dict.fromkeys(outputs, OUTPUT))
    roles.update(dict.fromkeys(tables, EMBEDDING))
    named = {name: roles[p] for name, p in model.named_parameters() if p in roles}
    tied = {p.shape[0] for p in tables & linear}
    named.update(dict.fromkeys(_outputs_by_width(model, named, tied), OUTPUT))
    return named


def _held(model: nn.Module) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    """Each parameter of two and more dimensions, with each module that holds it."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.ndim > 1:
                yield parameter, module


def _returned(model: nn.Module, method: str) -> set[torch.Tensor]:
    """The matrices of the modules that a method of transformers' models returns."""
    matrices = set[torch.Tensor]()
    for module in model.modules():
        if not callable(getattr(module, method, None)):
            continue
        try:
            found = getattr(module, method)()
        except (NotImplementedError, AttributeError):
            continue
        if isinstance(found, nn.Module):
            matrices.update(p for p, _ in _held(found) if p.ndim == 2)
    return matrices


def _outputs_by_width(
    model: nn.Module,
    roles: Mapping[str, str],
    tied: set[int],
) -> set[str]:
    """Names of output layers: linear layers as wide as the labels, and one as wide as a vocabulary.

    The vocabulary is that of a config, or the rows of an embedding for a layer of its shape. Its
    layer is the last one that fits after all numbered blocks, and is not looked for if one is known
    or tied to an embedding.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if name in roles}
    linear = [name for name in shapes if roles[name] == LINEAR]
    # The last layer of an `nn.Sequential` is numbered, too.
    outside = [name for name in linear if not is_numbered(around(name))]
    blocks = [place for place, name in enumerate(linear) if name not in outside]
    behind = []
    for place, name in enumerate(linear):
        is_possible = name in outside and (not is_numbered(name) or name == linear[-1])
        if is_possible and place > max(blocks, default=-1):
            behind.append(name)
    known = set(tied)
    for name, shape in shapes.items():
        if roles[name] == OUTPUT or is_output(name):
            known.add(shape[0])
    found = set[str]()
    for path, size in _sizes(model, "num_labels"):
        found.update(_as_wide(outside, shapes, size, path))
    for path, size in _sizes(model, "vocab_size"):
        if size not in known:
            found.update(_as_wide(behind, shapes, size, path)[-1:])
    for table in shapes:
        rows = shapes[table][0]
        is_vocabulary = not any(part in table for part in _NO_VOCABULARY)
        if roles[table] == EMBEDDING and is_vocabulary and rows not in known:
            of_its_shape = [name for name in behind if shapes[name] == shapes[table]]
            found.update(_as_wide(of_its_shape, shapes, rows)[-1:])
    return found


def _as_wide(
    names: Sequence[str],
    shapes: Mapping[str, torch.Size],
    size: int,
    path: str = "",
) -> list[str]:
    """The weights below `path` with so many outputs, and not as many inputs, which say nothing."""
    found = []
    for name in names:
        shape = shapes[name]
        if name.startswith(path) and shape[0] == size != shape[1]:
            found.append(name)
    return found


def _sizes(model: nn.Module, name: str) -> Iterator[tuple[str, int]]:
    """A number in the configs of a model and its parts, with the prefix of names in the part."""
    for path, module in model.named_modules():
        size = getattr(getattr(module, "config", None), name, None)
        if isinstance(size, int):
            yield f"{path}." if path else "", size
