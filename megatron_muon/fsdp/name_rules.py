"""Names that mark parameters as embeddings, output layers, tables or stacks of experts."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

EMBEDDING = "embedding"
OUTPUT = "output layer"
"""Roles of weights that are not matrices inside the network."""

LINEAR = "linear"
CONVOLUTION = "convolution"
"""Roles of weights that are neither tables nor stacks, whatever their names."""

EMBEDDINGS = ("*embed*", "emb", "*_emb", "wte", "wpe", "shared", "relative_attention_bias")
"""Names of modules, each one component, whose weights are tables of vectors."""

TABLES = ("*bias*", "*_table", "*_log", "*_token", "*_tokens", "*_queries", "rel_pos*", "codebook*")
"""Names of 2D parameters that are not matrices: biases by head, tables by position, rates of a
Mamba, learned tokens and queries."""

EXPERTS = "*expert*"
"""Names of modules, or of parameters, whose 3D weights are stacks of matrices."""

OUTPUTS = (
    "lm_head",
    "lm_heads",
    "head",
    "heads",
    "output",
    "output_layer",
    "output_projection",
    "to_logits",
    "logits",
    "fc",
    "fc_out",
    "proj_out",
    "classifier",
    "score",
    "qa_outputs",
    "seq_relationship",
    "unembed",
    "embed_out",
    "value_head",
    "v_head",
    "reward_head",
    "score_head",
    "classification_head",
)
"""Names of modules, outside numbered layers, that make a network's outputs."""

OUTPUT_WEIGHTS = (".generator.weight", ".generator.proj.weight")
"""Ends of output layers' names; a module called so may also be a whole network."""


def is_numbered(name: str) -> bool:
    """True if a parameter is in a numbered layer."""
    return any(part.isdigit() for part in name.split("."))


def around(name: str) -> str:
    """The name of the module around the one that holds a parameter."""
    return ".".join(name.split(".")[:-2])


def is_output(name: str) -> bool:
    """True if a parameter belongs to an output layer, by its name."""
    is_named = any(part in OUTPUTS for part in name.lower().split("."))
    return (is_named or f".{name}".endswith(OUTPUT_WEIGHTS)) and not is_numbered(name)


def is_embedding(name: str) -> bool:
    """True if a parameter is a table of vectors, by its name."""
    return any(_matches_any(part, EMBEDDINGS) for part in name.lower().split("."))


def is_table(name: str) -> bool:
    """True if a 2D parameter is a table, by the last component of its name."""
    return _matches_any(name.lower().rpartition(".")[2], TABLES)


def is_of_experts(name: str) -> bool:
    """True if a parameter belongs to experts, by its name."""
    return any(fnmatchcase(part, EXPERTS) for part in name.lower().split("."))


def _matches_any(component: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(component, pattern) for pattern in patterns)
