"""`benchmarks.rehearse` records and compares: each check finds its fault, and no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.rehearse.checks import Finding, KindPlan, Recorded, check
from benchmarks.rehearse.machine import RecordingGroup
from benchmarks.rehearse.rank import Rehearsal, rehearse_rank
from benchmarks.rehearse.recorder import RankTrace
from megatron_muon import cpu
from megatron_muon.core.engine import Engine
from megatron_muon.core.exchange import ToOwners, Works
from megatron_muon.core.fused import FusedPasses
from megatron_muon.core.layout import Layout
from megatron_muon.core.plan import make_plan
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.patching import Patches
from megatron_muon.tools.plan.estimate import HARDWARE, Group, Hardware, node_pattern
from megatron_muon.tools.plan.plan_command import settings_of
from tests.support.cut_matrices import row_sharded

H100 = HARDWARE["h100-sxm"]
RANKS = 4
MATRICES: list[tuple[tuple[int, int], list[int]]] = [
    ((96, 64), [40, 24, 32, 0]),
    ((256, 64), [64, 64, 64, 64]),
    ((64, 128), [0, 0, 10, 54]),
    ((48, 48), [0, 48, 0, 0]),
]


def layout(
    name: str,
    shards: list[tuple[tuple[int, int], list[int]]],
) -> Layout:
    """Matrices given by shape and by rows on each rank."""
    matrices = []
    for at, (shape, rows) in enumerate(shards):
        matrices.append(row_sharded(f"{name}{at}", shape, rows))
    return Layout(len(rows), tuple(matrices))


DENSE = layout("dense", MATRICES * 3)
EXPERTS = layout("expert", [((128, 64), [100, 28])] * 4)
BOTH = (Group("dense", DENSE), Group("experts", EXPERTS, stride=2))
LAUNCHES = {
    0: {"momentum": 2, "orthogonalize": 12, "products": 76, "send_back": 3, "apply": 2, "other": 3},
    1: {"momentum": 3, "orthogonalize": 11, "products": 76, "send_back": 2, "apply": 3, "other": 3},
    2: {"momentum": 2, "orthogonalize": 14, "products": 80, "send_back": 3, "apply": 2, "other": 3},
    3: {"momentum": 2, "orthogonalize": 9, "products": 52, "send_back": 2, "apply": 2, "other": 3},
}
"""Kernels of a step by pass and rank, a momentum and an apply for each wave and batch."""
MOVED = {
    0: {"orthogonalize": 241160, "products": 1592320, "send_back": 99328, "other": 228},
    1: {"orthogonalize": 207368, "products": 1592320, "send_back": 90112, "other": 294},
    2: {"orthogonalize": 247824, "products": 1657856, "send_back": 107520, "other": 294},
    3: {"orthogonalize": 205832, "products": 1753088, "send_back": 90112, "other": 228},
}
"""Bytes likewise."""
BUFFER_MB = 0.4
"""So small that the dense matrices travel in several waves."""


def rehearsal(*groups: Group, **settings: Any) -> Rehearsal:
    usual = {"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1}
    usual["muon_exchange_buffer_mb"] = BUFFER_MB
    config = MuonOptimizerConfig(**(usual | settings))
    return Rehearsal(config, groups or BOTH[:1], RANKS, H100)


def recorded(of: Rehearsal, ranks: Sequence[int] = range(RANKS)) -> Recorded:
    """The traces of ranks, and the plans."""
    traces = {rank: rehearse_rank(rank, of) for rank in ranks}
    settings = settings_of(of.settings, of.hardware)
    plans = [KindPlan(group, settings, of.hardware) for group in of.groups]
    return Recorded(traces, plans)


def replaced(record: Recorded, rank: int, trace: RankTrace) -> Recorded:
    """The recording with another trace of a rank."""
    return dataclasses.replace(record, traces={**record.traces, rank: trace})


def found(findings: Sequence[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == name]


@pytest.fixture(scope="module", autouse=True)
def real_devices() -> None:
    """Another test may have left the CPU standing in for a GPU."""
    cpu.uninstall()


@pytest.fixture(scope="module")
def sound(real_devices: None) -> Recorded:
    return recorded(rehearsal())


@pytest.fixture(scope="module")
def both(real_devices: None) -> Recorded:
    return recorded(rehearsal(*BOTH))


def test_nothing_is_found_if_ranks_agree(sound: Recorded, both: Recorded) -> None:
    assert check(sound) == check(both) == []
    assert len(sound.plans[0].of(0).plan.waves) > 1
    for rank, trace in sound.traces.items():
        expected = sound.planned(rank)
        second = trace.steps[1]
        assert trace.received_bytes == expected["received_bytes"]
        assert second.flops == expected["flops"]
        assert len(second.calls) == 4
    groups = set()
    for trace in both.traces.values():
        groups |= {members.ranks for members in trace.groups}
    assert groups == {(0, 1, 2, 3), (0, 2), (1, 3)}  # no plan has a team


def test_launches_and_traffic_of_a_step_are_as_noted(sound: Recorded) -> None:
    """A change that makes a step launch more, or move more memory, has to be seen.

    Gradient 4, momentum 4 + 4, wire 2 bytes an element; wire 2, weight 4 + 4.
    """
    for rank, trace in sound.traces.items():
        second = trace.steps[1]
        held = sum(shard.numel for shard in DENSE.held(rank))
        assert second.launches == LAUNCHES[rank]
        assert second.moved == MOVED[rank] | {"momentum": 14 * held, "apply": 10 * held}


@pytest.mark.parametrize("second", ["none", "adamuon", "normuon"])
def test_a_step_moves_the_bytes_that_the_plan_counts(second: str) -> None:
    """Not counted: tables, NorMuon's numbers that travel, updates that a drain would overwrite."""
    settings: dict[str, Any] = {}
    if second != "none":
        settings = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": second}
    record = recorded(rehearsal(**settings))
    planned = record.plans[0].of(0).moved
    for rank, trace in record.traces.items():
        moved = sum(trace.steps[1].moved.values()) - trace.steps[1].moved["products"]
        assert moved == pytest.approx(planned[rank], rel=0.08)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
        {"muon_fp32_matmul_prec": "highest", "muon_ns": "gram"},
        {"muon_hyperball": True, "weight_decay": 0.0},
    ],
)
def test_other_settings_agree_too(settings: dict[str, Any]) -> None:
    findings = check(recorded(rehearsal(**settings)))
    assert {finding.check for finding in findings} <= {"memory"}


def test_72_rows_over_16_ranks_are_shared_without_a_remainder_that_nobody_has() -> None:
    """prime-rl #3437: FSDP2 gives ranks five rows, two or none; equal shards did not fit."""
    held = [5] * 14 + [2, 0]
    matrices = layout(
        "dense",
        [((72, cols), held) for cols in (40, 72, 200, 40)],
    )
    of = rehearsal(Group("dense", matrices), muon_exchange_buffer_mb=0.25)
    record = recorded(dataclasses.replace(of, world_size=16), [0, 13, 14, 15])
    assert check(record) == []
    assert record.plans[0].of(0).plan.buffer_bytes == 2**18


def test_a_rank_with_another_plan_is_found(sound: Recorded) -> None:
    costs = [float(cost) for cost in range(len(DENSE.matrices), 0, -1)]
    sizes = settings_of(rehearsal().settings, H100).sizes
    plan = make_plan(DENSE, costs, buffer_bytes=int(BUFFER_MB * 2**20), sizes=sizes)
    plans = {("dense", node_pattern(range(RANKS), H100)): plan}
    odd = rehearse_rank(2, dataclasses.replace(rehearsal(), plans=plans))
    findings = check(replaced(sound, 2, odd))
    assert found(findings, "plan")[0].ranks == (2,)
    unlike = [one.text for one in found(findings, "bytes") if 2 in one.ranks]
    assert any("expects" in text for text in unlike)
    assert found(findings, "blocks")


def swap_waves(make: Any, engine: Engine, *args: Any) -> None:
    make(engine, *args)
    first, second, *others = engine.waves
    engine.waves = [second, first, *others]


def reduce_first(step: Any, engine: Engine) -> None:
    dist.all_reduce(torch.zeros(1, device="cuda"), group=engine.transport.group)
    step(engine)


def apply_twice(apply: Any, engine: Engine, *args: Any) -> None:
    apply(engine, *args)
    apply(engine, *args)


def forget(send: Any, transport: ToOwners, *args: Any) -> Works:
    send(transport, *args)
    return Works()


def fail(*_: Any) -> None:
    raise ValueError("no such size\nand more")


@pytest.mark.parametrize(
    ("owner", "method", "instead", "name", "text"),
    [
        (Engine, "__init__", swap_waves, "bytes", "which expects"),
        (
            Engine,
            "step",
            reduce_first,
            "order",
            "all_to_all of bfloat16, rank 3 all_reduce of float",
        ),
        (Engine, "_apply_method", apply_twice, "blocks", "by rank 3, part 1 of 1 by rank 3"),
        (ToOwners, "send_updates", forget, "wait", "is never waited for: all_to_all of bfloat16"),
        (Engine, "_apply_method", fail, "step", "ValueError: no such size (megatron_muon/"),
    ],
)
def test_a_rank_that_does_something_else_is_found(
    sound: Recorded, owner: type, method: str, instead: Any, name: str, text: str
) -> None:
    with Patches() as patches:
        patches.around(owner, method)(instead)
        odd = rehearse_rank(3, rehearsal())
    finding, *_ = found(check(replaced(sound, 3, odd)), name)
    assert 3 in finding.ranks
    assert text in finding.text


def test_ranks_that_wait_for_each_other_are_found(both: Recorded) -> None:
    """Each group has one order on all of its ranks; one rank takes the groups in another order."""
    odd = rehearse_rank(3, rehearsal(*BOTH[::-1]))
    stuck = found(check(replaced(both, 3, odd)), "order")
    text = "waits for collective 0 of their group, which"
    assert all(text in finding.text for finding in stuck)
    assert any(3 in finding.ranks for finding in stuck)


KEPT: list[torch.Tensor] = []
ACTS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "_local_scalar_dense": (lambda updates: updates.sum().item(), "host"),
    "torch.cuda.synchronize": (lambda _: torch.cuda.synchronize(), "host"),
    "a copy from host memory": (lambda updates: updates.add_(torch.ones(1).to("cuda")), "host"),
    "bytes more in use": (lambda _: KEPT.append(torch.zeros(1000, device="cuda")), "leak"),
    "may take 419,430": (
        lambda _: torch.zeros(2**22, device="cuda").mul_(2),
        "memory",
    ),
}


@pytest.mark.parametrize("text", ACTS)
def test_waits_of_the_host_and_memory_are_found(text: str) -> None:
    act, name = ACTS[text]
    with Patches() as patches:
        patches.around(FusedPasses, "descend")(
            lambda descend, passes, wave: (act(wave.lane), descend(passes, wave))[1]
        )
        finding, *_ = check(recorded(rehearsal(), [2]))
    assert (finding.check, finding.ranks) == (name, (2,))
    assert text in finding.text
    KEPT.clear()


def test_every_group_is_held_to_its_own_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest buffer of all groups stood for each of them."""
    record = recorded(rehearsal(*BOTH), [0])
    experts = record.plans[1].of(0)
    plan = dataclasses.replace(experts.plan, buffer_bytes=2**30)
    roomy = dataclasses.replace(experts, plan=plan)
    monkeypatch.setattr(record.plans[1], "of", lambda rank: roomy)
    record.traces[0].steps[-1].taken["dense"] += 2**24
    first, *_ = found(check(record), "memory")
    assert first.text.startswith("the step of the dense matrices takes")


def test_every_group_is_connected_on_its_device_before_messages_of_some_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's first call on a group was messages of some of its ranks, which torch forbids.

    Next to gloo, constructors exchange host values over that. The first call with a GPU's tensor is
    an all-reduce.
    """
    first: dict[int, str] = {}
    start = RecordingGroup._start

    def noted(group: RecordingGroup, op: str, tensor: torch.Tensor, **details: Any) -> Any:
        if tensor.device.type == "cuda" and group.size() > 1:
            first.setdefault(group._index, op)
        return start(group, op, tensor, **details)

    monkeypatch.setattr(RecordingGroup, "_start", noted)
    two_nodes = dataclasses.replace(H100, node_ranks=2)
    of = dataclasses.replace(rehearsal(muon_team_size="2"), hardware=two_nodes)
    trace = rehearse_rank(0, of)
    assert trace.failure == ""
    teams = {(0, 1), (0, 1, 2, 3)}
    assert {trace.groups[group].ranks for group in first} == teams
    assert set(first.values()) == {"all_reduce"}
    in_step = {trace.groups[call.group].ranks for call in trace.steps[1].calls}
    assert teams <= in_step


def in_teams(world_size: int, hardware: Hardware, *, matrices: int, **lie: int) -> Rehearsal:
    """Groups of four ranks that own experts' matrices in teams of two."""
    experts = layout("expert", [((256, 128), [64] * 4)] * matrices)
    group = Group("experts", experts, **lie)
    of = rehearsal(group, muon_team_size="2", muon_exchange_buffer_mb=None)
    return dataclasses.replace(of, world_size=world_size, hardware=hardware)


def test_groups_that_lie_in_nodes_differently_have_plans_of_their_own() -> None:
    """Groups (0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11) in nodes of 4: all were given one plan."""
    of = in_teams(12, dataclasses.replace(H100, node_ranks=4), matrices=2, stride=3)
    record = recorded(of, range(12))
    (kind,) = record.plans
    for rank in range(3):
        assert kind.of(rank).plan.teams[0].ranks == (rank, rank + 1)
    assert check(record) == []
    assert len(of.plans) == 3


def test_a_group_over_tensor_parallel_ranks_lies_in_the_nodes_of_its_ranks() -> None:
    """Ranks 0, 1, 16 and 17 are in two nodes; the plan took each of them for a node of its own."""
    of = in_teams(32, H100, matrices=6, stride=8, together=2)
    assert of.groups[0].members(0) == [0, 1, 16, 17]
    record = recorded(of, [0, 1, 16, 17])
    plan = record.plans[0].of(0).plan
    assert {team.ranks for team in plan.teams} == {(0, 1), (2, 3)}
    assert check(record) == []


def test_buffers_of_other_bytes_than_planned_are_found() -> None:
    record = recorded(rehearsal(), [1])
    record.traces[1].steps[-1].buffers["dense"] += 512
    (finding,) = check(record)
    assert finding.check == "memory"
    assert "the plan says" in finding.text
