"""Layouts as JSON files: captured from a run, or written by hand, and read back for planning.

    {"world_size": 2,
     "matrices": [{"name": "w", "shape": [4, 8], "shards": [[0, 0, 3, 0, 8], [1, 3, 1, 0, 8]]}]}

A shard is `[rank, row_start, rows, col_start, cols]`; where further ranks hold the same rectangle, the list of them
follows. The optional key `blocks`, `[groups, [part, ...]]`, says how
the rows of a matrix make blocks. What does not tile is refused; nothing is repaired.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_muon.core.layout import BlockedLayout, Blocks, Layout, LayoutError, Matrix, Shard
from megatron_muon.errors import UserError


def read_layout(path: str | Path) -> BlockedLayout:
    """The layout in a file.

    Raises:
        UserError: the file cannot be read, is not of this form, or holds a layout that does not tile its matrices; the
            message names the file and the place.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read layout {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read layout {str(path)!r}: it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}, column {error.colno}") from None
    except RecursionError:
        raise UserError(f"{path}: not a layout: its lists are nested too deeply") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        raise UserError(f"{path}: not a layout: a number has thousands of digits") from None
    try:
        return _layout(document)
    except (_FormError, LayoutError) as error:
        raise UserError(f"{path}: {error}") from None


def write_layout(path: str | Path, layout: Layout, blocks: Sequence[Blocks | None] | None = None) -> None:
    """Write a layout, one matrix a line.

    Args:
        path: the file; replaced where it exists.
        layout: what to write.
        blocks: how the rows of each matrix make blocks, where known.

    Raises:
        UserError: the file cannot be written.
    """
    lines = []
    for matrix, split in zip(layout.matrices, blocks or [None] * len(layout.matrices), strict=True):
        record: dict[str, Any] = {
            "name": matrix.name,
            "shape": list(matrix.shape),
            "shards": [
                [s.rank, s.row_start, s.rows, s.col_start, s.cols, *([list(s.replicas)] if s.replicas else [])]
                for s in matrix.shards
            ],
        }
        if split is not None:
            record["blocks"] = [split[0], list(split[1])]
        lines.append(json.dumps(record, ensure_ascii=False))
    body = ",\n".join(lines)
    text = f'{{"world_size": {layout.world_size},\n"matrices": [\n{body}\n]}}\n'
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"cannot write layout {str(path)!r}: {error.strerror}") from None


def dump_file(path: str | Path, *, is_expert: bool) -> Path:
    """Where a run writes a layout: `path` takes that of dense matrices, `NAME.experts.SUFFIX` that of experts."""
    path = Path(path)
    return path.with_name(f"{path.stem}.experts{path.suffix}") if is_expert else path


def dump_layout(path: str | Path, blocked: BlockedLayout, *, is_expert: bool) -> None:
    """Write the layout of a run and print a line that says so; for one rank to call.

    Args:
        path: what `--muon-dump-layout` was given.
        blocked: the layout of this rank's group.
        is_expert: whether its matrices are those of experts.

    Raises:
        UserError: the file cannot be written.
    """
    file, layout = dump_file(path, is_expert=is_expert), blocked.layout
    write_layout(
        file,
        layout,
        [None if blocks is not None and blocks[0] == len(blocks[1]) == 1 else blocks for blocks in blocked.blocks],
    )
    print(
        f"megatron-muon: {file}: the layout of {len(layout.matrices)} {'expert' if is_expert else 'dense'} matrices "
        f"over {layout.world_size} rank{'s' * (layout.world_size != 1)}; for megatron-muon plan --layout {file}",
        flush=True,
    )


def check_dump_file(path: str | Path, *, has_experts: bool) -> None:
    """Check that a run will be able to write its layouts; leaves files as they are.

    Raises:
        UserError: names the file and the remedy.
    """
    for file in (dump_file(path, is_expert=True), Path(path)) if has_experts and Path(path).name else (Path(path),):
        flag = f"--muon-dump-layout {str(path)!r}"
        if file.is_dir():
            raise UserError(f"{flag}: {str(file)!r} is a folder; name a file, for instance {file / 'layout.json'}")
        if not file.parent.is_dir():
            raise UserError(f"{flag}: there is no folder {str(file.parent)!r}; type mkdir -p {file.parent}")
        try:
            if file.exists():
                with file.open("ab"):
                    pass
            else:
                with tempfile.TemporaryFile(dir=file.parent):
                    pass
        except OSError as error:
            raise UserError(
                f"{flag}: cannot write {str(file)!r} ({error.strerror}); choose a file that this user may write"
            ) from None


class _FormError(ValueError):
    """JSON that is not of the layout's form; the message names the place."""


def _layout(document: Any) -> BlockedLayout:
    top = _object(document, "the file", required=("world_size", "matrices"))
    world_size = _integer(top["world_size"], "world_size", least=1)
    matrices, blocks = [], []
    for index, item in enumerate(_list(top["matrices"], "matrices")):
        place = f"matrices[{index}]"
        record = _object(item, place, required=("name", "shape", "shards"), optional=("blocks",))
        if not isinstance(record["name"], str) or not record["name"]:
            raise _FormError(f"{place}.name must be a string that is not empty, found {_short(record['name'])}")
        place = f"{place} ({record['name']})"
        rows, cols = _integers(record["shape"], f"{place}.shape", names=("rows", "cols"), least=1)
        shards = [
            _shard(shard, f"{place}.shards[{number}]")
            for number, shard in enumerate(_list(record["shards"], f"{place}.shards"))
        ]
        shards.sort(key=lambda shard: (shard.rank, shard.row_start, shard.col_start))
        matrices.append(Matrix(name=record["name"], shape=(rows, cols), shards=tuple(shards)))
        blocks.append(_blocks(record["blocks"], f"{place}.blocks") if "blocks" in record else None)
    return BlockedLayout(Layout(world_size=world_size, matrices=tuple(matrices)), tuple(blocks))


def _shard(value: Any, place: str) -> Shard:
    fields = _list(value, place)
    rectangle = _integers(fields[:5], place, names=("rank", "row_start", "rows", "col_start", "cols"))
    if len(fields) > 6:
        raise _FormError(
            f"{place} must be [rank, row_start, rows, col_start, cols, [rank, ...]], found {_short(value)}"
        )
    others = _list(fields[5], f"{place}[5]") if len(fields) == 6 else []
    holders = sorted([rectangle[0], *(_integer(rank, f"{place}[5][{i}]") for i, rank in enumerate(others))])
    rank, row_start, rows, col_start, cols = holders[0], *rectangle[1:]
    return Shard(rank, row_start, rows, col_start, cols, replicas=tuple(holders[1:]))


def _blocks(value: Any, place: str) -> Blocks:
    pair = _list(value, place)
    if len(pair) != 2:
        raise _FormError(f"{place} must be [groups, [part, ...]], found {_short(value)}")
    parts = [_integer(part, f"{place}[1][{i}]", least=1) for i, part in enumerate(_list(pair[1], f"{place}[1]"))]
    return _integer(pair[0], f"{place}[0]", least=1), tuple(parts)


def _object(value: Any, place: str, *, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _FormError(f"{place} must be an object with {', '.join(required)}, found {_short(value)}")
    for key in required:
        if key not in value:
            raise _FormError(f"{place} has no {key!r}; it needs {', '.join(required)}")
    for key in value:
        if key not in required and key not in optional:
            raise _FormError(f"{place} has an unknown key {key!r}; known are {', '.join((*required, *optional))}")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise _FormError(f"{place} must be a list, found {_short(value)}")
    return value


def _integers(value: Any, place: str, *, names: Sequence[str], least: int | None = None) -> list[int]:
    values = _list(value, place)
    if len(values) != len(names):
        raise _FormError(f"{place} must be [{', '.join(names)}], found {_short(value)}")
    return [_integer(item, f"{place} {name}", least=least) for item, name in zip(values, names, strict=True)]


def _integer(value: Any, place: str, *, least: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _FormError(f"{place} must be a whole number, found {_short(value)}")
    if abs(value) >= 1 << 63:
        raise _FormError(f"{place} must fit 64 bits, found {_short(value)}")
    if least is not None and value < least:
        raise _FormError(f"{place} must be at least {least}, found {value}")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
