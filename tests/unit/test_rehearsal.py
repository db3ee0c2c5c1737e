"""What `megatron-muon rehearse` compares: each check finds the fault that it is for, and nothing where all is well."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_muon import cpu
from megatron_muon.core.collectives import Works
from megatron_muon.core.exchange import Exchange
from megatron_muon.core.layout import Layout, from_rectangles, row_sharded
from megatron_muon.core.memory import Memory
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.plan import make_plan
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.patching import Patches
from megatron_muon.tools.plan.command import settings_of
from megatron_muon.tools.plan.estimate import HARDWARE, Group, Hardware, KindPlan, plan_kind
from megatron_muon.tools.plan.host import counts_of
from megatron_muon.tools.rehearse import playback
from megatron_muon.tools.rehearse.checks import Finding, Recorded, check, planned_bytes, received_bytes
from megatron_muon.tools.rehearse.process_groups import RecordingGroup
from megatron_muon.tools.rehearse.rank import Rehearsal, rehearse, rehearse_rank
from megatron_muon.tools.rehearse.trace import RankTrace

H100 = HARDWARE["h100-sxm"]
RANKS = 4
DENSE = Layout(
    RANKS,
    tuple(
        row_sharded(f"layer{k}.{name}", shape, rows)
        for k in range(3)
        for name, shape, rows in (
            ("qkv", (96, 64), [40, 24, 32, 0]),
            ("fc1", (256, 64), [64, 64, 64, 64]),
            ("fc2", (64, 128), [0, 0, 10, 54]),
            ("whole", (48, 48), [0, 48, 0, 0]),
        )
    ),
)
EXPERTS = Layout(2, tuple(row_sharded(f"expert{k}", (128, 64), [100, 28]) for k in range(4)))
REPLICATED = Layout(
    RANKS,
    tuple(from_rectangles(f"w{k}", (200, 160), [(0, 120, 0, 160), (120, 80, 0, 160)] * 2) for k in range(6)),
)
"""Two instances of two ranks each."""
COUNTS = {
    0: {"allocations": 32, "collectives": 4, "kernels": 172, "views": 32},
    1: {"allocations": 32, "collectives": 4, "kernels": 183, "views": 32},
    2: {"allocations": 32, "collectives": 4, "kernels": 178, "views": 32},
    3: {"allocations": 22, "collectives": 4, "kernels": 126, "views": 22},
}
BUFFER_MB = 0.4
"""So small that the dense matrices travel in several waves."""


def rehearsal(*groups: Group, **settings: Any) -> Rehearsal:
    config = MuonOptimizerConfig(
        **{"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1, "muon_exchange_buffer_mb": BUFFER_MB} | settings
    )
    return Rehearsal(config, groups or (Group("dense", DENSE),), RANKS, H100)


def planned(of: Rehearsal) -> list[KindPlan]:
    settings = settings_of(of.settings, of.hardware)
    return [plan_kind(group, settings, of.hardware, of.world_size) for group in of.groups]


def recorded(
    of: Rehearsal, ranks: Sequence[int] = range(RANKS), odd: tuple[int, Callable[[], RankTrace]] | None = None
) -> Recorded:
    """The traces of ranks, one of them as `odd` has it."""
    traces = {rank: rehearse_rank(rank, of) for rank in ranks if odd is None or rank != odd[0]}
    if odd is not None:
        traces[odd[0]] = odd[1]()
    return Recorded(traces, planned(of), of.world_size)


def found(findings: Sequence[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == name]


def in_first_wave(monkeypatch: pytest.MonkeyPatch, act: Callable[[Sequence[torch.Tensor]], Any]) -> None:
    """Every rank that is rehearsed from now on acts in `apply`."""
    apply = ShardedMuon.apply

    def changed(muon: ShardedMuon, chunk: Any) -> None:
        act([chunk.updates])
        apply(muon, chunk)

    monkeypatch.setattr(ShardedMuon, "apply", changed)


@pytest.fixture(scope="module", autouse=True)
def real_devices() -> None:
    """Another test may have left the CPU standing in for a GPU."""
    cpu.uninstall()


@pytest.fixture(scope="module")
def sound(real_devices: None) -> Recorded:
    return recorded(rehearsal())


def test_nothing_is_found_where_ranks_agree(sound: Recorded) -> None:
    assert check(sound) == []
    assert len(sound.plans[0].worst.plan.waves) > 1
    assert all(len(trace.steps) == 2 for trace in sound.traces.values())
    record = recorded(rehearsal(Group("dense", DENSE), Group("experts", EXPERTS, stride=2)))
    assert check(record) == []
    groups = {members.ranks for trace in record.traces.values() for members in trace.groups}
    assert groups == {(0, 1, 2, 3), (0, 2), (1, 3)}  # no plan has a team


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"optimizer": "adaptive_muon"}, marks=pytest.mark.wide),
        {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
        {"muon_fp32_matmul_prec": "highest", "muon_ns": "gram"},
        {"muon_hyperball": True, "weight_decay": 0.0},
        pytest.param({"muon_cautious_weight_decay": True}, marks=pytest.mark.wide),
        pytest.param({"muon_exchange_dtype": "fp32"}, marks=pytest.mark.wide),
        pytest.param({"muon_nesterov": False, "decoupled_weight_decay": False}, marks=pytest.mark.wide),
    ],
)
def test_other_settings_agree_too(settings: dict[str, Any]) -> None:
    assert [one for one in check(recorded(rehearsal(**settings))) if one.check != "memory"] == []


def test_plan_and_record_agree_on_bytes_products_and_launches(sound: Recorded) -> None:
    """Launches exactly as noted: a change that makes a step launch more has to be seen; the plan's within 10 %."""
    expected, (kind,) = planned_bytes(sound), sound.plans
    for rank, trace in sound.traces.items():
        plan, counted = kind.of(rank).plan, trace.steps[1].counts
        assert received_bytes(trace, 1) == expected[rank]
        assert trace.steps[1].flops == plan.loads[rank]
        assert counted == COUNTS[rank]
        by_plan = counts_of(plan, rank)
        assert by_plan.keys() == counted.keys()
        assert by_plan["collectives"] == counted["collectives"]
        assert by_plan["kernels"] == pytest.approx(counted["kernels"], rel=0.1)


@pytest.mark.parametrize("layout", [DENSE, REPLICATED], ids=["sharded", "replicas"])
def test_plan_and_record_agree_on_time(layout: Layout) -> None:
    """Plans took rows to come from every replica; an update goes to all of them, but rows come from one."""
    slow = {"bf16_tflops": 50.0, "node_ranks": 2, "node_gb_per_s": 40.0, "network_gb_per_s": 4.0}
    of = dataclasses.replace(rehearsal(Group("dense", layout)), hardware=dataclasses.replace(H100, **slow))
    played = playback.play(recorded(of).traces, -1, of.hardware)
    plan = planned(of)[0].worst
    assert max(rank.end_s for rank in played.values()) * 1e3 == pytest.approx(plan.step_ms, rel=0.1)
    assert plan.step_ms > 1.1 * plan.ns_ms


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [64, 1024])
def test_the_plan_counts_a_shipped_model(ranks: int, tmp_path: Path) -> None:
    """Rank 0's host is as busy there as the busiest, which the plan shows; in other models it is not."""
    command = (
        f"rehearse --config configs/llama3-8b.yaml --world-size {ranks} --ranks 0 --processes 1 --json {tmp_path}/out"
    )
    subprocess.run([sys.executable, "-m", "megatron_muon.cli", *command.split()], check=True, capture_output=True)
    found = json.loads((tmp_path / "out").read_text())
    assert found["planned"]["host_ms"] == pytest.approx(found["rehearsed"]["host_ms"], rel=0.1)


def test_a_rank_with_another_plan_is_found() -> None:
    usual = rehearsal()
    plan = make_plan(DENSE, [1.0 + index for index in range(len(DENSE.matrices))][::-1],
                     buffer_bytes=int(BUFFER_MB * 2**20), memory=Memory(2))  # fmt: skip
    other = dataclasses.replace(usual, plans={usual.plan_key(usual.groups[0], range(RANKS)): plan})
    findings = check(recorded(usual, odd=(2, lambda: rehearse_rank(2, other))))
    assert found(findings, "plan")[0].ranks == (0, 2)
    assert any(2 in finding.ranks and "expects" in finding.text for finding in found(findings, "bytes"))
    assert found(findings, "blocks")


def swap_waves(make: Any, exchange: Exchange, *args: Any, **kwargs: Any) -> None:
    make(exchange, *args, **kwargs)
    exchange._waves[:2] = exchange._waves[1::-1]


def reduce_first(run: Any, exchange: Exchange, *args: Any) -> None:
    dist.all_reduce(torch.zeros(1, device="cuda"), group=exchange.group)
    run(exchange, *args)


def orthogonalize_twice(orthogonalize: Any, exchange: Exchange, *args: Any) -> None:
    orthogonalize(exchange, *args)
    orthogonalize(exchange, *args)


def forget(send: Any, exchange: Exchange, *args: Any) -> Works:
    send(exchange, *args)
    return Works()


def fail(*_: Any) -> None:
    raise ValueError("no such size\nand more")


@pytest.mark.parametrize(
    ("method", "instead", "name", "text"),
    [
        ("__init__", swap_waves, "bytes", "which expects"),
        ("run", reduce_first, "order", "rank 0 starts all_to_all of bfloat16 in gather, rank 3 all_reduce of float32"),
        ("_orthogonalize", orthogonalize_twice, "blocks", "part 1 of 1 by rank 3, part 1 of 1 by rank 3"),
        ("_send", forget, "wait", "is never waited for: all_to_all of bfloat16 in gather"),
        ("_orthogonalize", fail, "step", "ValueError: no such size (megatron_muon/"),
    ],
)
def test_a_rank_that_does_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, method: str, instead: Any, name: str, text: str
) -> None:
    def odd() -> RankTrace:
        with Patches() as patches:
            patches.around(Exchange, method)(instead)
            return rehearse_rank(3, rehearsal())

    finding, *_ = found(check(recorded(rehearsal(), odd=(3, odd))), name)
    assert 3 in finding.ranks
    assert text in finding.text


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Each group has the same order on all of its ranks; one rank takes the groups in another order."""
    groups = Group("dense", DENSE), Group("experts", EXPERTS, stride=2)
    last_first = rehearsal(*groups[::-1])
    record = recorded(rehearsal(*groups), odd=(3, lambda: rehearse_rank(3, last_first)))
    assert found(check(record), "order") == []
    with pytest.raises(playback.StuckError, match="waits for collective 0 of their group, which rank") as stuck:
        playback.play(record.traces, -1, H100)
    assert 3 in stuck.value.ranks


KEPT: list[torch.Tensor] = []


@pytest.mark.parametrize(
    ("act", "name", "text"),
    [
        (lambda updates: updates[0].sum().item(), "host", "_local_scalar_dense"),
        (lambda updates: updates[0].cpu(), "host", "a copy to host memory"),
        (lambda updates: torch.cuda.synchronize(), "host", "torch.cuda.synchronize"),
        (lambda updates: torch.cuda.current_stream().synchronize(), "host", "synchronize of a stream"),
        (lambda updates: torch.cuda.Event().synchronize(), "host", "synchronize of a stream or an event"),
        (lambda updates: updates[0].add_(torch.ones(1).to("cuda")), "host", "a copy from host memory"),
        (lambda updates: KEPT.append(torch.zeros(1000, device="cuda")), "leak", "bytes more in use"),
        (lambda updates: torch.zeros(2**22, device="cuda").mul_(2), "memory", "bytes, and may take 419,430"),
    ],
)
def test_waits_of_the_host_and_memory_are_found(
    monkeypatch: pytest.MonkeyPatch, act: Any, name: str, text: str
) -> None:
    in_first_wave(monkeypatch, act)
    finding, *_ = check(recorded(rehearsal(), [2]))
    assert (finding.check, finding.ranks) == (name, (2,))
    assert text in finding.text
    KEPT.clear()


@pytest.mark.parametrize(
    ("settings", "has_memory"),
    [
        ({"optimizer": "adaptive_muon", "muon_exchange_buffer_mb": 1.0}, True),
        ({"muon_offload": "cpu"}, False),
        ({"muon_momentum_dtype": "int8"}, False),
    ],
)
def test_variants_and_staged_momentum_are_held_to_the_buffer_too(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], has_memory: bool
) -> None:
    """The check was off for adaptive Muon: a buffer 16 MiB too large went unseen."""
    in_first_wave(monkeypatch, lambda updates: torch.zeros(2**22, device="cuda").mul_(2))
    record = dataclasses.replace(recorded(rehearsal(**settings), [0]), has_memory=has_memory)
    assert {finding.check for finding in check(record)} == {"memory"}


def test_every_group_is_held_to_its_own_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest buffer of all groups stood for each of them."""
    both = rehearsal(Group("dense", DENSE), Group("experts", EXPERTS, stride=2))
    record = recorded(both, [0])
    dense, experts = record.plans
    larger = dataclasses.replace(experts.plans[0].plan, buffer_bytes=2**30)
    roomy = dataclasses.replace(experts, plans=(dataclasses.replace(experts.plans[0], plan=larger),))
    record.traces[0].steps[-1].peaks["dense"] += 2**24
    findings = found(check(dataclasses.replace(record, plans=[dense, roomy], has_memory=False)), "memory")
    assert [finding.text.split(" takes")[0] for finding in findings] == ["the step of the dense matrices"]


def test_processes_record_what_one_does(sound: Recorded) -> None:
    for processes in (1, 2):
        traces = rehearse(rehearsal(), range(RANKS), processes=processes)
        assert list(traces) == list(range(RANKS))
        for rank, trace in traces.items():
            assert trace.steps[1].extra_bytes == sound.traces[rank].steps[1].extra_bytes
            assert [str(event) for event in trace.steps[1].events] == [
                str(event) for event in sound.traces[rank].steps[1].events
            ]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"muon_momentum_dtype": "int8"}, marks=pytest.mark.wide),
        {"muon_offload": "cpu"},
        pytest.param(
            {"muon_offload": "cpu", "muon_momentum_dtype": "bf16", "muon_offload_fraction": 0.5,
             "muon_offload_buffer_mb": 0.05}, marks=pytest.mark.wide,
        ),
    ],
)  # fmt: skip
def test_momentum_elsewhere_is_rehearsed_and_counted(settings: dict[str, Any]) -> None:
    record = dataclasses.replace(recorded(rehearsal(**settings)), has_memory=False)
    assert check(record) == []
    elements = [sum(shard.numel for shard in DENSE.held(rank)) for rank in range(RANKS)]
    for rank, trace in record.traces.items():
        off = trace.state_bytes["host" if "muon_offload" in settings else "device"]
        each = {"fp32": 4, "bf16": 2, "int8": 1}[settings.get("muon_momentum_dtype", "fp32")]
        share = settings.get("muon_offload_fraction", 1.0)
        assert share * each * elements[rank] <= off <= 1.1 * each * elements[rank] + 4096


def test_every_group_of_an_exchange_is_connected_on_its_device_before_messages_of_some_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside gloo, NCCL's first call on a group was the messages of some of its ranks, which torch forbids.

    What ranks say at construction takes gloo then. Here the first call with a tensor of the GPU is an all-reduce.
    """
    first: dict[int, str] = {}
    start = RecordingGroup._start

    def noted(group: RecordingGroup, op: str, tensor: torch.Tensor, *more: Any, **details: Any) -> Any:
        if tensor.device.type == "cuda" and group.size() > 1:
            first.setdefault(group._index, op)
        return start(group, op, tensor, *more, **details)

    monkeypatch.setattr(RecordingGroup, "_start", noted)
    two_nodes = dataclasses.replace(H100, node_ranks=2)
    of = dataclasses.replace(rehearsal(muon_team_size="2"), hardware=two_nodes)
    trace = rehearse_rank(0, of)
    assert trace.failure == ""
    in_step = {call.group for step in trace.steps for call in step.calls if len(trace.groups[call.group].ranks) > 1}
    assert {trace.groups[group].ranks for group in in_step} == {(0, 1), (0, 1, 2, 3)}
    assert {first[group] for group in in_step} == {"all_reduce"}
    assert {trace.groups[group].ranks for group in first} == {(0, 1), (0, 1, 2, 3)}
    assert set(first.values()) == {"all_reduce"}


def in_teams(group: Group, world_size: int, hardware: Hardware, ranks: Sequence[int]) -> tuple[Rehearsal, Recorded]:
    """The record of ranks that own matrices in teams of two."""
    config = MuonOptimizerConfig(optimizer="muon", lr=0.01, weight_decay=0.1, muon_team_size="2")
    of = Rehearsal(config, [group], world_size, hardware)
    return of, recorded(of, ranks)


def experts(matrices: int, *, stride: int, together: int = 1) -> Group:
    layout = Layout(4, tuple(row_sharded(f"e{k}", (256, 128), [64] * 4) for k in range(matrices)))
    return Group("experts", layout, stride=stride, together=together)


def test_groups_that_lie_in_nodes_differently_have_plans_of_their_own() -> None:
    """Expert groups (0, 3, 6, 9), (1, 4, 7, 10) and (2, 5, 8, 11) in nodes of 4: rank 0's plan was handed to all."""
    of, record = in_teams(experts(2, stride=3), 12, dataclasses.replace(H100, node_ranks=4), range(12))
    (kind,) = record.plans
    assert [kind.of(rank).plan.teams[0].ranks for rank in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert check(record) == []
    assert len(of.plans) == len(kind.plans) == 3
    plans = {rank: record.traces[rank].plans for rank in range(12)}
    assert plans[1] == plans[4] != plans[0]


def test_a_group_over_tensor_parallel_ranks_lies_in_the_nodes_of_its_ranks() -> None:
    """Ranks 0, 1, 16 and 17 are in two nodes; the plan took each of them for a node of its own."""
    group = experts(6, stride=8, together=2)
    assert group.members(0, 32) == [0, 1, 16, 17]
    _, record = in_teams(group, 32, H100, [0, 1, 16, 17])
    assert {team.ranks for team in record.plans[0].worst.plan.teams} == {(0, 1), (2, 3)}
    assert check(record) == []
