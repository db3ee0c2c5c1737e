"""Roles of parameters that a model's modules tell, where names may not: embeddings, ties to them, output layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
"""Parts of names of embeddings whose rows are not words, but positions or types of tokens."""


def role_of(module: object) -> str:
    """The role of a weight that this module holds, by the names of its classes; empty where they do not say it."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return CONVOLUTION
    classes = [each.__name__ for each in type(module).__mro__]
    if any(name.endswith("Embedding") or name == "EmbeddingBag" for name in classes):
        return EMBEDDING
    return LINEAR if any(name.endswith("Linear") for name in classes) else ""


def roles_of(model: nn.Module) -> dict[str, str]:
    """The roles of a model's weights, by the names of `named_parameters()`; what is tied to an embedding is one."""
    held = [(p, role_of(module)) for p, module in _held(model)]
    roles = {p: role for p, role in held if role}
    linear = {p for p, role in held if role == LINEAR}
    tables = {p for p, role in held if role == EMBEDDING}
    tables |= {p for p in _returned(model, "get_input_embeddings") if roles.get(p) != LINEAR}
    roles.update(dict.fromkeys(_returned(model, "get_output_embeddings"), OUTPUT))
    roles.update(dict.fromkeys(tables, EMBEDDING))
    named = {name: roles[p] for name, p in model.named_parameters() if p in roles}
    tied = {p.shape[0] for p in tables & linear}
    named.update(dict.fromkeys(_outputs_by_width(model, named, tied), OUTPUT))
    return named


def _held(model: nn.Module) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    """Each parameter of two and more dimensions, with each module that holds it."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not nn.parameter.is_lazy(parameter) and parameter.ndim > 1:
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


def _outputs_by_width(model: nn.Module, roles: Mapping[str, str], tied: set[int]) -> set[str]:
    """Names of output layers: linear layers as wide as the labels, and the last one as wide as the vocabulary.

    The vocabulary is that of a config, or the rows of an embedding for a layer of its shape; its
    layer follows all numbered blocks, and is not looked for where one is known or tied to an
    embedding. Layers of a numbered block are no outputs; the last layer of an `nn.Sequential` is
    numbered, too.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if name in roles}
    linear = [name for name in shapes if roles[name] == LINEAR]
    outside = [name for name in linear if not is_numbered(around(name))]
    possible = [name for name in outside if not is_numbered(name) or name == linear[-1]]
    blocks = [place for place, name in enumerate(linear) if name not in outside]
    behind = [name for name in possible if not blocks or linear.index(name) > blocks[-1]]
    known = tied | {shapes[name][0] for name in shapes if roles[name] == OUTPUT or is_output(name)}
    found = set[str]()
    for path, size in _sizes(model, "num_labels"):
        found.update(
            name for name in outside if name.startswith(path) and _is_as_wide(shapes[name], size)
        )
    for path, size in _sizes(model, "vocab_size"):
        fitting = [
            name for name in behind if name.startswith(path) and _is_as_wide(shapes[name], size)
        ]
        found.update(fitting[-1:] if size not in known else [])
    for table in (name for name in shapes if roles[name] == EMBEDDING):
        is_vocabulary = shapes[table][0] not in known and not any(
            part in table for part in _NO_VOCABULARY
        )
        alike = [name for name in behind if shapes[name] == shapes[table]]
        fitting = [name for name in alike if _is_as_wide(shapes[name], shapes[table][0])]
        found.update(fitting[-1:] if is_vocabulary else [])
    return found


def _is_as_wide(shape: torch.Size, rows: int) -> bool:
    """Whether a weight has so many outputs; where it has as many inputs, that says nothing."""
    return shape[0] == rows != shape[1]


def _sizes(model: nn.Module, name: str) -> Iterator[tuple[str, int]]:
    """A number in the configs of a model and its parts, with the start of the names below the part."""
    for path, module in model.named_modules():
        size = getattr(getattr(module, "config", None), name, None)
        if isinstance(size, int):
            yield f"{path}." if path else "", size
