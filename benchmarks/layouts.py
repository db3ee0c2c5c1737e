"""The matrices that benchmarks step on: a GPT's or given ones, cut evenly over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_muon.core.layout import Layout, Matrix, RowSplit, Shard, Shards, whole

HEAD_SIZE = 64
SIDES = {
    "qkv": (3, 1),
    "proj": (1, 1),
    "fc1": (4, 1),
    "fc2": (1, 4),
}
"""Rows and columns of a GPT's matrices, in units of the hidden size."""


def gpt_layout(ranks: int, hidden_size: int, num_layers: int) -> Layout:
    """The matrices of GPT blocks, qkv split into q, k and v by heads of `HEAD_SIZE` if possible."""
    head_size = HEAD_SIZE if hidden_size % HEAD_SIZE == 0 else hidden_size
    qkv = RowSplit(hidden_size // head_size, (head_size, head_size, head_size))
    matrices = []
    for layer in range(num_layers):
        for name, (rows, cols) in SIDES.items():
            shape = rows * hidden_size, cols * hidden_size
            split = qkv if name == "qkv" else None
            matrices.append(_even(f"layers.{layer}.{name}", shape, ranks, split))
    return Layout(ranks, tuple(matrices))


def layout_of(ranks: int, matrices: Iterable[tuple[int, int, int]]) -> Layout:
    """Matrices of one block each, given as `(count, rows, cols)`."""
    shapes = [(rows, cols) for count, rows, cols in matrices for _ in range(count)]
    cut = (_even(f"matrices.{number}", shape, ranks) for number, shape in enumerate(shapes))
    return Layout(ranks, tuple(cut))


def _even(
    name: str,
    shape: tuple[int, int],
    ranks: int,
    split: RowSplit | None = None,
) -> Matrix:
    rows, rest = divmod(shape[0], ranks)
    shards = []
    start = 0
    for rank in range(ranks):
        count = rows + (rank < rest)
        if count:
            shards.append(Shard(rank, start, count, 0, shape[1]))
        start += count
    return Matrix(name, shape, Shards(shards), split or whole(shape[0]))
