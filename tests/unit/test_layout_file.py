"""Layout files: what is written is read back, and what is wrong is refused with the file and the place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.layout import Layout, Matrix, RowSplit, Shard, row_sharded, whole
from megatron_muon.errors import UserError
from megatron_muon.megatron.layout_file import read_layout, write_layout


def document() -> dict[str, Any]:
    return {
        "world_size": 2,
        "matrices": [
            {"name": "qkv", "shape": [6, 4], "shards": [[0, 0, 4, 0, 4], [1, 4, 2, 0, 4]]},
            {"name": "fc", "shape": [3, 4], "shards": [[1, 0, 3, 0, 4]]},
        ],
    }


def stored(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
    return path


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), max_size=5), st.booleans())
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], in_blocks: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.json"
    splits = (RowSplit(1, (1,) * sum(each)) if in_blocks else whole(sum(each)) for each in rows)
    cut = enumerate(zip(rows, splits, strict=True))
    layout = Layout(3, tuple(row_sharded(f"w.{i}", (sum(each), 4), each, split) for i, (each, split) in cut))
    write_layout(path, layout)
    assert read_layout(path) == layout


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    layout = read_layout(stored(tmp_path, document()))
    assert layout.world_size == 2
    assert layout.matrices[0] == Matrix("qkv", (6, 4), (Shard(0, 0, 4, 0, 4), Shard(1, 4, 2, 0, 4)))


def test_columns_may_be_cut(tmp_path: Path) -> None:
    halves = document()
    halves["matrices"] = [{"name": "proj", "shape": [4, 6], "shards": [[1, 0, 4, 3, 3], [0, 0, 4, 0, 3]]}]
    assert [shard.rank for shard in read_layout(stored(tmp_path, halves)).matrices[0].shards] == [0, 1]


def _with(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = document()
    place: Any = made
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return made


SHARDS = ("matrices", 0, "shards")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (_with(SHARDS, [[0, 0, 4, 0, 4]]), "qkv: no rank holds rows 4 to 5, columns 0 to 3"),
        (_with((*SHARDS, 1), [1, 3, 3, 0, 4]), "qkv: several ranks hold rows 3 to 3, columns 0 to 3"),
        (_with((*SHARDS, 1), [2, 4, 2, 0, 4]), "qkv: rank 2 is not in a group of 2"),
        (_with((*SHARDS, 1), [0, 4, 2, 0, 4]), "qkv: rank 0 holds two shards"),
        (_with(("matrices", 1, "name"), "qkv"), "qkv: this name stands for two matrices"),
        (_with(("matrices", 0, "blocks"), [2, [2, 2]]), "qkv: blocks of 2 x [2, 2] rows do not make its 6 rows"),
        (_with(("world_size",), ...), "Object missing required field `world_size`"),
        (_with(("matrices", 0, "shard"), []), "Object contains unknown field `shard` - at `$.matrices[0]`"),
        (_with(("world_size",), 0), "Expected `int` >= 1 - at `$.world_size`"),
        (_with(("matrices", 1), 7), "Expected `object`, got `int` - at `$.matrices[1]`"),
        (_with(("matrices", 1, "name"), ""), "Expected `str` of length >= 1 - at `$.matrices[1].name`"),
        (_with(("matrices", 1, "shape"), [3, 0]), "Expected `int` >= 1 - at `$.matrices[1].shape[1]`"),
        (_with(("matrices", 1, "shards", 0), [1, 0, 3]), "length 5, got 3 - at `$.matrices[1].shards[0]`"),
        (_with(("matrices", 1, "shards", 0, 2), 1.5), "Expected `int`, got `float` - at `$.matrices[1].shards[0][2]`"),
        (_with(("matrices", 1, "shards", 0, 1), -1), "Expected `int` >= 0 - at `$.matrices[1].shards[0][1]`"),
        (_with(("matrices", 0, "blocks"), [2, []]), "`array` of length >= 1 - at `$.matrices[0].blocks[1]`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, wrong: Any, message: str) -> None:
    path = stored(tmp_path, wrong)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_layout(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"world_size": 1000000000000, "matrices": []}', "1,000,000,000,000 ranks are too many; at most 1,048,576"),
        (f'{{"world_size": {10**30}, "matrices": []}}', "Expected `int` <= 9223372036854775807 - at `$.world_size`"),
        (f'{{"world_size": {"9" * 5000}, "matrices": []}}', "Integer value out of range - at `$.world_size`"),
        ("[" * 200_000, "Expected `object`, got `array`"),
        ('{"world_size": 1, "matrices": [' + '{"name":' * 200_000, "Expected `str`, got `object`"),
        (
            json.dumps({"world_size": 1, "matrices": [{"name": "w", "shape": [1 << 40, 2], "shards": []}]}),
            "w: 2,199,023,255,552 elements are too many",
        ),
    ],
)
def test_what_no_machine_has_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Each ended in a MemoryError, an OverflowError or a RecursionError with its traceback."""
    file = tmp_path / "layout.json"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_layout(file)


def test_a_missing_file_and_what_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"layout.json: JSON is malformed: "):
        read_layout(stored(tmp_path, '{"world_size": 2,\n"matrices": [}'))
    with pytest.raises(UserError, match=r"cannot read layout .*No such file"):
        read_layout(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b'{"\xff": 1}')
    with pytest.raises(UserError, match="codec can't decode byte 0xff"):
        read_layout(tmp_path / "binary")
    with pytest.raises(UserError, match="cannot write layout"):
        write_layout(tmp_path / "no" / "where.json", Layout(1, ()))
