"""What benchmarks step on: a GPT's matrices or given ones, cut evenly over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_muon.core.layout import Layout, RowSplit, row_sharded

HEAD_SIZE = 64


def gpt_layout(ranks: int, hidden_size: int, num_layers: int) -> Layout:
    """The matrices of GPT blocks, qkv split into q, k and v over heads of `HEAD_SIZE`, if that divides.

    Their rows are cut evenly over the ranks.
    """
    heads, rest = divmod(hidden_size, HEAD_SIZE)
    head_size = hidden_size if rest else HEAD_SIZE
    qkv = RowSplit(1 if rest else heads, (head_size, head_size, head_size))
    shapes: dict[str, tuple[int, int]] = {
        "qkv": (3 * hidden_size, hidden_size),
        "proj": (hidden_size, hidden_size),
        "fc1": (4 * hidden_size, hidden_size),
        "fc2": (hidden_size, 4 * hidden_size),
    }
    matrices = []
    for layer in range(num_layers):
        for name, shape in shapes.items():
            split = qkv if name == "qkv" else None
            matrices.append(
                row_sharded(f"layers.{layer}.{name}", shape, even_rows(shape[0], ranks), split)
            )
    return Layout(ranks, tuple(matrices))


def layout_of(ranks: int, matrices: Iterable[tuple[int, int, int]]) -> Layout:
    """Matrices of one block each, given as `(count, rows, cols)`."""
    shapes = [(rows, cols) for count, rows, cols in matrices for _ in range(count)]
    cut = (
        row_sharded(f"matrices.{number}", shape, even_rows(shape[0], ranks))
        for number, shape in enumerate(shapes)
    )
    return Layout(ranks, tuple(cut))


def even_rows(rows: int, ranks: int) -> list[int]:
    """How many rows each rank has."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
