"""2D weights that are no matrices of Muon's: embeddings, and the projection to the vocabulary.

megatron-core marks those of its own models. In a plain nn.Module the types of the modules tell them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import nn

EMBEDDING, TIED, OUTPUT = "embedding", "tied to an embedding", "projection to the vocabulary"
"""Why a 2D weight goes to the scalar optimizer."""

_TABLES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)
_LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear)


def vocabulary_weights(model_chunks: Sequence[Any]) -> dict[torch.Tensor, str]:
    """The 2D weights that Muon must not take, each with the reason.

    Embeddings are the weights of embedding modules, with whatever else holds the same parameter, and parameters with
    "embedding" in their names that no linear layer holds. In a model that megatron-core has not marked, the last
    linear layer with as many rows as the largest embedding is the projection to the vocabulary, unless a linear layer
    is tied to an embedding.
    """
    reasons: dict[torch.Tensor, str] = {}
    linear: list[torch.Tensor] = []
    vocabulary, marked = 0, False
    for name, module, parameter in _weights(model_chunks):
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


def _weights(model_chunks: Sequence[Any]) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """The 2D parameters of every module with their names, a shared one for each module that holds it."""
    for chunk in model_chunks:
        for path, module in chunk.named_modules():
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                if parameter.ndim == 2:
                    yield name, module, parameter
