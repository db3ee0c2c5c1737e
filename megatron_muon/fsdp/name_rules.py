"""Names of parameters that say which are embeddings, output layers, tables and stacks of experts."""

from __future__ import annotations

from fnmatch import fnmatchcase

EMBEDDING, OUTPUT = "embedding", "output layer"
"""Roles of weights that are no matrices inside the network: tables of vectors, and a network's outputs."""

LINEAR, CONVOLUTION = "linear", "convolution"
"""Roles of weights that are no tables, and no stacks, whatever their names."""

EMBEDDINGS = ("*embed*", "emb", "*_emb", "wte", "wpe", "shared", "relative_attention_bias")
"""Names of modules, one part of a dotted name each, whose weights are tables of vectors."""

TABLES = ("*bias*", "*_table", "*_log", "*_token", "*_tokens", "*_queries", "rel_pos*", "codebook*")
"""Names of parameters of two dimensions that are no matrices: biases by head, tables by position, rates of a Mamba,
learned tokens and queries."""

EXPERTS = "*expert*"
"""Names of modules, or of parameters, whose 3D weights are stacks of matrices."""

OUTPUTS = (
    *(
        "lm_head",
        "head",
        "heads",
        "output",
        "output_layer",
        "to_logits",
        "fc",
        "fc_out",
        "proj_out",
    ),
    *(
        "classifier",
        "score",
        "qa_outputs",
        "seq_relationship",
        "unembed",
        "embed_out",
        "logits",
        "output_projection",
    ),
    *("lm_heads", "value_head", "v_head", "reward_head", "score_head", "classification_head"),
)
"""Names of modules that make a network's outputs, where they are in no numbered layer."""

OUTPUT_WEIGHTS = (".generator.weight", ".generator.proj.weight")
"""Ends of output layers' names; a module called so may also be a whole network."""


def is_numbered(name: str) -> bool:
    """Whether a parameter is in a numbered layer."""
    return any(part.isdigit() for part in name.split("."))


def around(name: str) -> str:
    """The name of the module around the one that holds a parameter."""
    return ".".join(name.split(".")[:-2])


def is_output(name: str) -> bool:
    """Whether a parameter is an output layer's, by its name."""
    is_named = any(part in OUTPUTS for part in name.lower().split("."))
    return (is_named or f".{name}".endswith(OUTPUT_WEIGHTS)) and not is_numbered(name)


def is_embedding(name: str) -> bool:
    """Whether a parameter is a table of vectors, by its name."""
    return any(
        fnmatchcase(part, pattern) for part in name.lower().split(".") for pattern in EMBEDDINGS
    )


def is_table(name: str) -> bool:
    """Whether a 2D parameter is no matrix, by its own name."""
    own = name.lower().rpartition(".")[2]
    return any(fnmatchcase(own, pattern) for pattern in TABLES)


def is_of_experts(name: str) -> bool:
    """Whether a parameter belongs to experts, by its name."""
    return any(fnmatchcase(part, EXPERTS) for part in name.lower().split("."))
