"""Preparation beside a GPU's products, with its streams on paper: what waits for what, and what
does not.

It shows the order that the program asks for. How fast a GPU is with it was not measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_muon.core.cost import Iteration
from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.plan import make_plan
from megatron_muon.core.rows import InOrder
from megatron_muon.offload.codecs import CODECS
from megatron_muon.offload.disk import PAGE, MomentumFile
from megatron_muon.offload.store import DISK, HOST, RecordStore
from tests.support.buffers import sizes_of
from tests.support.cut_matrices import row_sharded
from tests.support.one_rank import muon_of, waves_of
from tests.support.streams import Event, Gpu, Stream

SHAPES = [(16, 32)] * 12 + [(1, 48)] * 2  # the last two lie whole on rank 0
STEPS = 3


class Network:
    """A collective on a stream of its own, as NCCL's; what others would send is zero."""

    def __init__(self, gpu: Gpu) -> None:
        self.stream = Stream(gpu, "network")

    def all_to_all_single(
        self, receive: torch.Tensor, send: torch.Tensor, *_: Any, **__: Any
    ) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            send.clone()
            receive.zero_()
        return Work(self.stream.record_event())


class Work:
    def __init__(self, done: Event) -> None:
        self.wait = lambda: torch.cuda.current_stream().wait_event(done)


class Trial:
    """Rank 0 of two trains: real store, optimizer and engine."""

    def __init__(
        self, gpu: Gpu, folder: Path, *, place: str, nesterov: bool = True, staging_pages: int = 3
    ) -> None:
        self.gpu = gpu
        # whether a record's copy back lies behind the products that were enqueued last
        self.behind: list[bool] = []
        self.order: list[str] = []
        self._last_products = 0
        cuts = [[rows - rows // 2, rows // 2] for rows, _ in SHAPES]
        matrices = [row_sharded(f"w{i}", s, cuts[i]) for i, s in enumerate(SHAPES)]
        layout = Layout(2, tuple(matrices))
        sizes = sizes_of(4, Iteration(precision="highest", steps=1))
        costs = [float(r * c) for r, c in SHAPES]
        plan = make_plan(layout, costs, buffer_bytes=32 << 10, sizes=sizes)
        assert len(plan.waves) >= 3
        orthogonalizer = replace(sizes.method)
        plan = replace(plan, sizes=replace(sizes, method=orthogonalizer))

        orthogonalize = orthogonalizer.run

        def noted(*stack: Any, **options: Any) -> None:
            orthogonalize(*stack, **options)
            self._last_products = gpu.products.clock["products"]
            self.order.append("products")

        orthogonalizer.run = noted  # type: ignore[method-assign]
        held = layout.held(0)
        generator = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(shard.rows, shard.cols, generator=generator) for shard in held]
        self.muon = muon_of(
            waves_of(plan, 0, is_apart=True),
            [torch.nn.Parameter(weight) for weight in self.weights],
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
            store=self._store(held, folder, place, PAGE * staging_pages),
            nesterov=nesterov,
        )
        self.store = self.muon.store
        assert self.store is not None
        self.store._leave = self._noting(self.store._leave)  # type: ignore[method-assign]

    def _store(self, held: Any, folder: Path, place: str, staging_bytes: int) -> RecordStore:
        return RecordStore(
            [f"w{i}" for i in range(len(held))],
            held,
            [place] * len(held),
            CODECS["fp32"],
            device=torch.device("cuda", 0),
            staging_bytes=staging_bytes,  # three pages: a record a slot
            file=MomentumFile(folder, PAGE * len(held)) if place == DISK else None,
        )

    def _noting(self, leave: Callable[..., None]) -> Callable[..., None]:
        def noted(slot: Any) -> None:
            self.order.append("rows")
            if self._last_products:
                self.behind.append(
                    torch.cuda.current_stream().clock.get("products", 0) >= self._last_products
                )
            leave(slot)

        return noted

    def train(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        for _ in range(STEPS):
            for parameter in self.muon.param_groups[0]["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            self._last_products = 0
            self.order.append("step")
            self.muon.step()
        return self.weights

    def close(self) -> None:
        assert self.store is not None
        self.store.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    zeros = torch.zeros
    monkeypatch.setattr(
        torch,
        "zeros",
        lambda *sizes, device=None, **how: zeros(*sizes, **how),
    )
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(dist, "all_to_all_single", Network(gpu).all_to_all_single)
    with gpu:
        yield gpu


@pytest.fixture
def trial(gpu: Gpu, tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    made: list[Trial] = []

    def make(**settings: Any) -> Trial:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Trial(gpu, folder, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert gpu.driver.registered == {}, "memory that is still locked"


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("place", [HOST, DISK])
def test_rows_are_prepared_beside_products(
    trial: Callable[..., Trial], place: str, nesterov: bool
) -> None:
    """No access is out of order, no copy back lies behind the products enqueued last, and no bit
    differs.
    """
    beside = trial(place=place, nesterov=nesterov)
    weights = beside.train()
    assert beside.behind
    assert not any(beside.behind)
    assert beside.gpu.driver.registered

    one_stream = trial(place=place, nesterov=nesterov)
    one_stream.muon.part.rows.beside = InOrder()
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            weights,
            one_stream.train(),
            strict=True,
        )
    )
    assert all(one_stream.behind), (
        "as it was: copies back lie behind products, and with no slot free so does the host"
    )
    assert beside.order == one_stream.order
    assert one_stream.order.index("products") < len(one_stream.order) - one_stream.order[
        ::-1
    ].index("rows")


def test_locked_memory_is_given_back_without_a_close(gpu: Gpu) -> None:
    """A script of one's own drops its optimizer."""
    gpu_0, shard = torch.device("cuda", 0), Shard(0, 0, 8, 0, 32)
    kept: Any = RecordStore(
        ["w"], [shard], [HOST], CODECS["fp32"], device=gpu_0, staging_bytes=PAGE
    )
    assert gpu.driver.registered
    del kept
    gc.collect()
    assert gpu.driver.registered == {}


WAITS = [
    "rows",
    "readers of a buffer",
    "gradients",
    "copies in",
    "copies out",
    "copies out, on the host",
    "writes",
    "a slot too many",
]


@pytest.mark.parametrize("place", [HOST, DISK])
@pytest.mark.parametrize("missing", WAITS)
def test_the_paper_shows_a_missing_wait(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch, missing: str, place: str
) -> None:
    """Negative control: without one of the waits, or with one slot in the memory of another."""
    one = trial(place=place)
    assert one.store is not None
    prepare = one.store.beside._stream  # type: ignore[attr-defined]
    first, *_, last = one.store._slots
    bring = one.store._bring
    if missing == "a slot too many":
        last.host, last.device = first.host, first.device

    victim, name, instead = {
        "rows": (one.gpu.products, "wait_stream", lambda other: None),
        "readers of a buffer": (one.gpu.products, "record_event", lambda: Event(one.gpu, {})),
        "gradients": (prepare, "wait_stream", lambda other: None),
        "copies in": (prepare, "wait_event", lambda event: None),
        "copies out": (one.store._streams[1], "wait_event", lambda event: None),
        "copies out, on the host": (Event, "synchronize", lambda event: None),
        "writes": (one.store, "_bring", lambda records, before: bring(records, None)),
        "a slot too many": (one.store, "on_return", None),
    }[missing]
    monkeypatch.setattr(victim, name, instead)
    with pytest.raises(AssertionError, match="does not wait for"):
        one.train()
