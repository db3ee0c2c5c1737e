"""Roles of parameters that a model's modules tell, where names may not: embeddings, ties to them, output layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megatron_muon.fsdp.names import EMBEDDING, LINEAR, OUTPUT, is_numbered, is_output


def role_of(module: object) -> str:
    """`EMBEDDING` or `LINEAR`, the role of a weight that this module holds, or nothing; by the names of its classes."""
    classes = [each.__name__ for each in type(module).__mro__]
    if any(name.endswith("Embedding") or name == "EmbeddingBag" for name in classes):
        return EMBEDDING
    return LINEAR if any(name.endswith("Linear") for name in classes) else ""


def roles_of(model: nn.Module) -> dict[str, str]:
    """The roles of 2D weights, by the names of `named_parameters()`: `EMBEDDING`, `OUTPUT` or `LINEAR`.

    What is tied to an embedding is one.
    """
    held = [(p, role_of(module)) for p, module in _held(model) if not nn.parameter.is_lazy(p) and p.ndim == 2]
    tables = {p for p, role in held if role == EMBEDDING} | _input_embeddings(model)
    linear = {p for p, role in held if role == LINEAR}
    roles = dict.fromkeys(linear, LINEAR)
    roles.update(dict.fromkeys(_outputs(model, tables, linear), OUTPUT))
    roles.update(dict.fromkeys(tables, EMBEDDING))
    return {name: roles[p] for name, p in model.named_parameters() if p in roles}


def _held(model: nn.Module) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    """Each parameter with each module that holds it."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter, module


def _input_embeddings(model: nn.Module) -> set[torch.Tensor]:
    """Tables of modules that a model of transformers calls its input embeddings, whatever their class."""
    returned = [module for module in _returned(model, "get_input_embeddings") if role_of(module) != LINEAR]
    return {p for module in returned for p in module._parameters.values() if p is not None and p.ndim == 2}


def _outputs(model: nn.Module, tables: set[torch.Tensor], linear: set[torch.Tensor]) -> set[torch.Tensor]:
    """Weights of output layers.

    These are known by name or by `get_output_embeddings()`; else the last linear layer that is as wide as the
    vocabulary or the labels, or has an embedding's shape, is one. It may be numbered if none follows.
    """
    named = {name: p for name, p in model.named_parameters() if p in linear}
    outputs = {p for name, p in named.items() if is_output(name)}
    for module in _returned(model, "get_output_embeddings"):
        outputs.update(p for p in module.parameters() if p.ndim == 2)
    candidates = [p for name, p in named.items() if not is_numbered(name) or name == list(named)[-1]]
    tied = tables & linear
    sizes = {(width, 0) for width in _widths(model)} | {(table.shape[0], table.shape[1]) for table in tables}
    for rows, cols in sizes - {(p.shape[0], each) for p in outputs | tied for each in (0, p.shape[1])}:
        fitting = [p for p in candidates if p.shape[0] == rows != p.shape[1] and cols in (0, p.shape[1])]
        outputs.update(fitting[-1:])
    return outputs


def _returned(model: nn.Module, method: str) -> Iterator[nn.Module]:
    """The modules that a method of transformers' models returns."""
    for module in model.modules():
        if not callable(getattr(module, method, None)):
            continue
        try:
            found = getattr(module, method)()
        except (NotImplementedError, AttributeError):
            continue
        if isinstance(found, nn.Module):
            yield found


def _widths(model: nn.Module) -> set[int]:
    """Sizes of vocabularies and numbers of labels in the configs of a model and its parts."""
    widths = set[int]()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        for name in ("vocab_size", "num_labels"):
            size = getattr(config, name, None)
            if isinstance(size, int):
                widths.add(size)
    return widths
