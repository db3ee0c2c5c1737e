"""Layouts as JSON files: captured from a run, or written by hand, and read back for planning.

    {"world_size": 2,
     "matrices": [{"name": "w", "shape": [4, 8], "shards": [[0, 0, 3, 0, 8], [1, 3, 1, 0, 8]]}]}

A shard is `[rank, row_start, rows, col_start, cols]`; where further ranks hold the same rectangle, the list of them
follows. `ranks`, if given, has the global rank of each rank of the group, ascending, where they are not counted from 0.
`blocks`, `[groups, [part, ...]]`, says how the rows of a matrix make blocks (`RowSplit`).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_muon.core.layout import Layout, Matrix, RowSplit, Shard, whole
from megatron_muon.errors import UserError

_Index = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class _StoredShard(msgspec.Struct, array_like=True, forbid_unknown_fields=True, omit_defaults=True):
    rank: _Index
    row_start: _Index
    rows: _Index
    col_start: _Index
    cols: _Index
    replicas: tuple[_Index, ...] = ()


class _StoredMatrix(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    shape: tuple[_Size, _Size]
    shards: list[_StoredShard]
    blocks: tuple[_Size, Annotated[tuple[_Size, ...], msgspec.Meta(min_length=1)]] | None = None
    steps: _Index = 0


class _StoredLayout(msgspec.Struct, forbid_unknown_fields=True):
    world_size: _Size
    matrices: list[_StoredMatrix]
    ranks: tuple[_Index, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks and (len(self.ranks) != self.world_size or list(self.ranks) != sorted(set(self.ranks))):
            raise ValueError(f"`ranks` must be {self.world_size} different numbers, ascending")


def read_layout(path: str | Path) -> Layout:
    """The layout in a file, as `read_captured` reads it."""
    return read_captured(path)[0]


def read_captured(path: str | Path) -> tuple[Layout, tuple[int, ...]]:
    """The layout in a file, and the global ranks of its group, empty where they are counted from 0.

    Raises:
        UserError: the file cannot be read, is not of this form, or holds a layout that does not tile its matrices.
    """
    try:
        stored = msgspec.json.decode(Path(path).read_bytes(), type=_StoredLayout)
        return Layout(stored.world_size, tuple(_matrix(matrix) for matrix in stored.matrices)), stored.ranks
    except OSError as error:
        raise UserError(f"cannot read layout {str(path)!r}: {error.strerror}") from None
    except ValueError as error:  # msgspec's, with the place, or a LayoutError, with the matrix
        raise UserError(f"{path}: {error}") from None


def _matrix(stored: _StoredMatrix) -> Matrix:
    shards = []
    for shard in stored.shards:
        rank, *replicas = sorted([shard.rank, *shard.replicas])
        shards.append(Shard(rank, shard.row_start, shard.rows, shard.col_start, shard.cols, tuple(replicas)))
    shards.sort(key=lambda shard: (shard.rank, shard.row_start, shard.col_start))
    split = RowSplit(*stored.blocks) if stored.blocks else whole(stored.shape[0])
    return Matrix(stored.name, stored.shape, tuple(shards), split, stored.steps)


def write_layout(path: str | Path, layout: Layout, ranks: Sequence[int] = ()) -> None:
    """Write a layout, one matrix a line, and its global `ranks`; a UserError where the file cannot be written."""
    lines = []
    for matrix in layout.matrices:
        split = matrix.split
        shards = [_StoredShard(*dataclasses.astuple(shard)) for shard in matrix.shards]
        blocks = None if split == whole(split.rows) else (split.groups, split.parts)
        stored = _StoredMatrix(matrix.name, matrix.shape, shards, blocks, matrix.steps)
        lines.append(msgspec.json.encode(stored).decode())
    body = ",\n".join(lines)
    head = f'{{"world_size": {layout.world_size},\n' + (f'"ranks": {[*ranks]},\n' if ranks else "")
    try:
        Path(path).write_text(f'{head}"matrices": [\n{body}\n]}}\n', "utf-8")
    except OSError as error:
        raise UserError(f"cannot write layout {str(path)!r}: {error.strerror}") from None


def _dump_file(path: str | Path, *, is_expert: bool) -> Path:
    """Where a run writes a layout: `path` takes that of dense matrices, `NAME.experts.SUFFIX` that of experts."""
    path = Path(path)
    return path.with_name(f"{path.stem}.experts{path.suffix}") if is_expert else path


def dump_layout(path: str | Path, layout: Layout, ranks: Sequence[int], *, is_expert: bool) -> None:
    """Write the layout of a run for `--muon-dump-layout path`, and print a line that says so; for one rank to call."""
    file = _dump_file(path, is_expert=is_expert)
    write_layout(file, layout, () if list(ranks) == list(range(len(ranks))) else ranks)
    print(f"megatron-muon: note: {file}: a layout for megatron-muon plan --layout {file}", flush=True)


def check_dump_file(path: str | Path, *, has_experts: bool) -> None:
    """Refuse, by a UserError, a file in which a run will not be able to write its layouts; leaves files as they are."""
    for is_expert in (True, False) if has_experts and Path(path).name else (False,):
        file = _dump_file(path, is_expert=is_expert)
        try:
            with file.open("ab") if file.exists() else tempfile.TemporaryFile(dir=file.parent):
                pass
        except OSError as error:
            raise UserError(
                f"--muon-dump-layout {str(path)!r}: cannot write {str(file)!r} ({error.strerror}); name a file in a "
                "folder that is there and that this user may write"
            ) from None
