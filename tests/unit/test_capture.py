"""What a CUDA graph needs of a step: the same operations on the same memory, and no value that the
host reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.rehearse import machine
from benchmarks.rehearse.recorder import Recorder
from megatron_muon.core import launches
from megatron_muon.core.layout import Layout
from megatron_muon.core.rules.held import Held
from megatron_muon.errors import UserError
from megatron_muon.fsdp.assembly import Beside
from megatron_muon.fsdp.muon import Muon
from megatron_muon.fsdp.part import view_parameters
from megatron_muon.fsdp.step import CapturedStep, put_on_device
from megatron_muon.matrices.views import Matrices, View
from megatron_muon.megatron.builder import make_muon
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.tools.plan.estimate import HARDWARE
from tests.support.cut_matrices import row_sharded

RANKS = 4
SHAPES = [(64, 32), (32, 64), (512, 256), (48, 16)]
SETTINGS: dict[str, Any] = {
    "optimizer": "muon",
    "lr": 0.1,
    "weight_decay": 0.1,
    "muon_exchange_buffer_mb": 2.0,
    "muon_team_size": "1",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cautious": {"muon_cautious_weight_decay": True},
    "coupled": {"decoupled_weight_decay": False},
    "adamuon": {"optimizer": "adaptive_muon"},
    "hyperball": {"muon_hyperball": True, "weight_decay": 0.0},
}


class Enqueued(TorchDispatchMode):
    """Every operation, with numbers and the memory that it works on: addresses of before the step,
    as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self._made: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "profiler":
            self.operations.append((func, *(self.seen(one) for one in tree_leaves((args, kwargs)))))
        if not func.is_view and all(value.alias_info is None for value in func._schema.returns):
            self._made |= {
                one.untyped_storage()._cdata for one in tree_leaves(result) if torch.is_tensor(one)
            }
        return result

    def seen(self, one: Any) -> Any:
        if not torch.is_tensor(one):
            return repr(one) if isinstance(one, float) else one  # NaN is unlike itself
        storage = one.untyped_storage()._cdata
        return (
            "made" if storage in self._made else storage,
            one.storage_offset(),
            one.shape,
            one.stride(),
            one.dtype,
        )


@contextlib.contextmanager
def on_fake_gpu(**settings: Any) -> Iterator[ShardedMuon]:
    """The Muon of rank 1 of four on fake tensors."""
    recorder = Recorder(1, machine.DEVICE)
    with machine.world(RANKS, recorder), machine.on(HARDWARE["h100-sxm"], recorder):
        matrices = []
        for number, shape in enumerate(SHAPES):
            held = [shape[0] // RANKS] * RANKS
            matrices.append(row_sharded(f"w{number}", shape, held))
        layout = Layout(RANKS, tuple(matrices))
        held = Held(
            layout,
            dist.new_group(range(RANKS)),
            machine.DEVICE,
            [shard.rectangle for shard in layout.held(1)],
        )
        parameters = [
            torch.nn.Parameter(
                torch.empty(r // 4, c, device=machine.DEVICE),
            )
            for r, c in SHAPES
        ]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        config = MuonOptimizerConfig(**{**SETTINGS, **settings}, muon_audit_interval=0)
        read = {}
        for number, parameter in enumerate(parameters):
            read[parameter] = Matrices(name=f"w{number}", view=View(tuple(parameter.shape)))
        viewed = view_parameters(read, held.rectangles)
        groups = [{"params": parameters}]
        yield make_muon(groups, viewed, held, config, Beside(), machine.DEVICE)


def enqueued(muon: ShardedMuon) -> list[tuple[Any, ...]]:
    seen = Enqueued()

    def launch(*args: Any, **kwargs: Any) -> None:
        found = (seen.seen(one) for one in tree_leaves((args, kwargs)))
        seen.operations.append(("launch", *found))

    with mock.patch.object(launches, "launch", launch), seen:
        muon.step()
    return seen.operations


def number(value: float) -> torch.Tensor:
    return torch.full((), value, device=machine.DEVICE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_enqueue_the_same_operations_on_the_same_memory(variant: str) -> None:
    """With another learning rate in between, as a scheduler fills it in. A fake tensor has no value
    to read.
    """
    with on_fake_gpu(**VARIANTS[variant]) as muon:
        group = muon.param_groups[0]
        group["lr"] = number(0.1).view(1)  # of any shape
        if group["weight_decay"]:
            group["weight_decay"] = number(0.1)
        enqueued(muon)
        second = enqueued(muon)
        group["lr"].fill_(0.05)
        third = enqueued(muon)
    assert len(second) > 50
    assert second == third


def test_a_number_of_the_host_would_be_captured() -> None:
    """The negative control: a float is copied to the device when it changes."""
    with on_fake_gpu() as muon:
        enqueued(muon)
        second = enqueued(muon)
        muon.param_groups[0]["lr"] = 0.05
        third = enqueued(muon)
    assert second != third


class RecordedGraph(TorchDispatchMode):
    """Stands for a CUDA graph: has the operations of a step, on the tensors that they had, to be
    run again.

    Capturing changes no weight. An operation that makes a tensor gives its values to the tensor
    that it made at first.
    """

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self._values, self._before = values, [value.detach().clone() for value in values]
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for value, before in zip(self._values, self._before, strict=True):
            value.copy_(before)

    def replay(self) -> None:
        for func, args, kwargs, made in self._operations:
            again = func(*args, **kwargs)
            for one, other in zip(tree_leaves(again), tree_leaves(made), strict=True):
                if torch.is_tensor(one) and not func.is_view and one.data_ptr() != other.data_ptr():
                    other.copy_(one)


class Captured:
    """A Muon of one process whose step of matrices is captured by a `RecordedGraph`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.weights = {name: torch.nn.Parameter(torch.randn(8, 4)) for name in "ab"}
        self.muon = Muon(
            [{"params": list(self.weights.items()), "optimizer": "muon"}],
            **arguments,
        )
        self.graphs: list[RecordedGraph] = []
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self._graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
        self.step(0)

    def capture(self) -> None:
        groups = self.muon.param_groups
        put_on_device(groups, torch.device("cpu"))
        for part in self.muon.parts:
            part.captured = CapturedStep(
                part.engine.step, part.engine.passes.look, list(part.viewed), groups
            )

    def _graph(self) -> RecordedGraph:
        weights = list(self.weights.values())
        state = [self.muon.state[p]["momentum_buffer"] for p in weights]
        gradients = [p.grad for p in weights]
        self.graphs.append(RecordedGraph([*weights, *state, *gradients]))
        return self.graphs[-1]

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        for weight in self.weights.values():
            gradient = torch.randn_like(weight)
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad.copy_(gradient)
        self.muon.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "weight_decay": 0.1},
        {"lr": 0.0, "weight_decay": 0.1},
        {"lr": 0.1, "weight_decay": 0.0, "hyperball": True},
    ],
)
def test_replayed_steps_are_those_that_run(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Captured once, at the third step, also where a rate begins at zero; with rates that a
    scheduler changes. MuonHyperball took the address of the rate's tensor for the rate.
    """
    plain, captured = Captured(monkeypatch, **settings), Captured(monkeypatch, **settings)
    captured.capture()
    for number in range(1, 6):
        plain.muon.param_groups[0]["lr"] = 0.1 / number
        captured.muon.param_groups[0]["lr"].fill_(0.1 / number)
        plain.step(number)
        captured.step(number)
        assert len(captured.graphs) == (number >= 3)
        torch.testing.assert_close(captured.weights, plain.weights, rtol=1e-6, atol=1e-7)


def test_a_load_has_the_step_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state and its rates are in other tensors."""
    captured = Captured(monkeypatch)
    captured.capture()
    monkeypatch.setattr(Muon, "_capture", lambda muon: captured.capture())
    for number in range(1, 4):
        captured.step(number)
    captured.muon.load_state_dict(captured.muon.state_dict())
    for number in range(4, 7):
        captured.step(number)
        assert len(captured.graphs) == 1 + (number == 6)


@pytest.mark.parametrize("moved", ["gradient", "missing", "lr", "lr in fp64", "momentum"])
def test_what_a_captured_step_reads_may_not_move(
    monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    """A schedule of momentum, as OneCycleLR's, had no effect."""
    captured = Captured(monkeypatch)
    captured.capture()
    for number in range(1, 4):
        captured.step(number)
    weight, group = captured.weights["a"], captured.muon.param_groups[0]
    if moved == "gradient":
        weight.grad = torch.zeros_like(weight)
    elif moved == "missing":
        weight.grad = None
    elif moved == "lr in fp64":
        group["lr"] = torch.tensor(0.5, dtype=torch.float64)
    else:
        group[moved] = 0.5
    before = weight.detach().clone()
    with pytest.raises(
        UserError, match=r"cuda_graph=True needs gradients, lr and weight_decay in the same tensors"
    ):
        captured.muon.step()
    assert torch.equal(weight, before)
