"""A store of records against a plain dict: random schedules, changed orders, small slots, disks
that fail.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_muon.core.layout import Shard
from megatron_muon.offload.codecs import CODECS
from megatron_muon.offload.disk import LOST_BYTE, PAGE, MomentumFile, in_pages
from megatron_muon.offload.store import DEVICE, DISK, HOST, RecordStore, first_failure

CPU = torch.device("cpu")


def same(values: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit; what is lost is NaN."""
    return torch.equal(values.isnan(), expected.isnan()) and torch.equal(
        values.nan_to_num(), expected.nan_to_num()
    )


class Bench:
    """A store over a file in `folder`, and beside it a dict that holds what it should hold."""

    def __init__(
        self, folder: Path, rows: list[int], places: list[str] | None = None, *, staging_pages: int
    ) -> None:
        names = [f"matrix{i}" for i in range(len(rows))]
        shards = [Shard(0, 0, count, 0, 256) for count in rows]
        self.places = places or [DISK] * len(rows)
        codec = CODECS["fp32"]
        sizes = [in_pages(codec.record_bytes(count, 256)) for count in rows]  # a row is 1 KiB
        self.file = MomentumFile(folder, sum(sizes))
        self.store = RecordStore(
            names,
            shards,
            self.places,
            codec,
            device=CPU,
            staging_bytes=staging_pages * PAGE,
            file=self.file,
        )
        self.offsets = self.store.disk._offsets
        self.expected = {i: torch.zeros(count, 256) for i, count in enumerate(rows)}

    def step(
        self,
        order: list[int],
        *,
        wave: int,
        chance: random.Random,
    ) -> None:
        """A step in this order, in waves of so many shards: every value is multiplied and
        added to.
        """
        for start in range(0, len(order), wave):
            shards = order[start : start + wave]
            for places, borrowed in self.store.borrow(shards):
                for place, values in zip(places, borrowed, strict=True):
                    index = shards[place]
                    assert same(values, self.expected[index]), f"shard {index} is not what it was"
                    change = chance.random()
                    self.expected[index].mul_(0.5).add_(change)
                    values.mul_(0.5).add_(change)
        self.store.end_step()

    def check(self) -> None:
        for index, values in self.expected.items():
            if values.numel():
                assert same(self.store.read(index), values)


@pytest.fixture
def benches(tmp_path: Path) -> Iterator[Any]:
    made: list[Bench] = []

    def make(*args: Any, **kwargs: Any) -> Bench:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Bench(folder, *args, **kwargs))
        return made[-1]

    yield make
    for bench in made:
        bench.store.close()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    places=st.lists(
        st.sampled_from([DISK, DISK, HOST, DEVICE]),
        min_size=12,
        max_size=12,
    ),
    staging_pages=st.integers(1, 40),
    waves=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_it_holds_what_a_dict_holds(
    benches: Any,
    rows: list[int],
    places: list[str],
    staging_pages: int,
    waves: list[int],
    seed: int,
) -> None:
    """Whatever the order, the waves and the slots' size; also after reads and writes between
    steps.
    """
    chance = random.Random(seed)
    bench = benches(rows, places[: len(rows)], staging_pages=staging_pages)
    order = [i for i, count in enumerate(rows) if count]
    for wave in waves:
        bench.step(order, wave=wave, chance=chance)
        if chance.random() < 0.5:
            chance.shuffle(order)
        if order and chance.random() < 0.3:
            index = chance.choice(order)
            bench.expected[index] = torch.full((rows[index], 256), chance.random())
            bench.store.write(index, bench.expected[index])
        if chance.random() < 0.3:
            bench.check()
    bench.check()
    assert bench.store.disk.failure is None
    bench.store.close()


def test_reads_do_not_wait_for_writes(benches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: beside a GPU a write waits for arithmetic; two of them took all threads, and the step
    stood still.
    """
    bench = benches([8] * 6, staging_pages=12)
    bench.step(list(range(6)), wave=6, chance=random.Random(0))
    go_on, gave_up, write = threading.Event(), [], os.pwritev

    def slow(*arguments: Any) -> int:
        if not go_on.wait(5):
            gave_up.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    for index in (5, 4, 3):  # another order, so none of these has been read ahead
        for _ in bench.store.borrow([index]):
            pass
    assert not gave_up
    go_on.set()
    bench.store.end_step()
    bench.check()


class Disk:
    """Makes this process's reads or writes at some offsets fail, as a disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        for name, failing in (("preadv", self.reads), ("pwritev", self.writes)):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name), failing))

    def _failing(self, move: Any, failing: set[int]) -> Any:
        def call(descriptor: int, buffers: Any, offset: int) -> int:
            if offset in failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return int(move(descriptor, buffers, offset))

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def bench(benches: Any) -> Bench:
    """After a step, with nothing read ahead."""
    bench: Bench = benches([8] * 4, staging_pages=24)
    bench.step(
        [0, 1, 2, 3],
        wave=4,
        chance=random.Random(0),
    )
    bench.store.read(0)  # what was read ahead is dropped
    return bench


@pytest.mark.parametrize("doing", ["read", "write"])
def test_a_record_that_a_disk_loses_is_nan_and_named(bench: Bench, disk: Disk, doing: str) -> None:
    """It is NaN from then on, whatever is written: zeros would be a momentum like any other."""
    failing = disk.reads if doing == "read" else disk.writes
    failing |= {bench.offsets[2], bench.offsets[3]}
    order = [0, 1, 2, 3]
    if doing == "write":
        bench.step(order, wave=4, chance=random.Random(1))
    bench.expected[2].fill_(torch.nan)
    bench.expected[3].fill_(torch.nan)
    bench.step(order, wave=4, chance=random.Random(2))
    failing.clear()
    bench.check()
    assert bench.store.disk.lost == {2, 3}
    place = f"cannot {doing} momentum in a file of {bench.file.directory} at offset "
    assert place in bench.store.disk.failure
    assert re.search(
        r"Input/output error; momentum of matrix[23] is lost on this rank; start again from a"
        r" checkpoint$",
        bench.store.disk.failure,
    )


@pytest.mark.parametrize("dtype", CODECS)
def test_a_lost_record_is_nan_in_every_format(dtype: str) -> None:
    codec = CODECS[dtype]
    record = torch.full((codec.record_bytes(3, 300),), LOST_BYTE, dtype=torch.uint8)
    assert codec.decode(record, 3, 300).isnan().all()


def test_a_read_ahead_that_failed_is_found_before_the_step(bench: Bench, disk: Disk) -> None:
    """Story: a step went on with zeros in the place of what could not be read, and nobody was
    told.
    """
    bench.store._read_ahead()
    bench.store.verify()
    assert first_failure([bench.store]) is None
    bench.store.read(0)  # what was read ahead is dropped
    disk.reads |= {bench.offsets[2], bench.offsets[3]}
    bench.store._read_ahead()
    bench.store.verify()
    assert bench.store.disk.lost == {2, 3}
    assert first_failure([bench.store]) == f"rank 0 {bench.store.disk.failure}"


def test_room_for_a_checkpoint_from_main_memory(
    benches: Any, monkeypatch: Any, capsys: Any
) -> None:
    """A full disk takes no checkpoint's momentum either; the checkpoint is saved all the same."""
    bench = benches([8], staging_pages=6)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    (room,) = bench.store.scratch([2048])
    assert (room.numel(), room.dtype) == (2048, torch.float32)
    assert (
        "has no 8,192 bytes for the momentum of a checkpoint (No space left on device)"
        in capsys.readouterr().out
    )
