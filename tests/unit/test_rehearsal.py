"""What `megatron-muon rehearse` records and compares: each check finds the fault that it is for,
and no other.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_muon import cpu
from megatron_muon.core.collectives import Works
from megatron_muon.core.exchange import Exchange
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.memory import Memory
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.plan import make_plan
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.patching import Patches
from megatron_muon.tools.plan.estimate import HARDWARE, Group, Hardware, KindPlan, node_pattern
from megatron_muon.tools.plan.plan_command import settings_of
from megatron_muon.tools.rehearse import machine
from megatron_muon.tools.rehearse.checks import Finding, Recorded, check
from megatron_muon.tools.rehearse.machine import RecordingGroup
from megatron_muon.tools.rehearse.rank import Rehearsal, rehearse_rank
from megatron_muon.tools.rehearse.recorder import Members, RankTrace, Recorder

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
OPERATIONS = {0: 139, 1: 150, 2: 145, 3: 102}
BUFFER_MB = 0.4
"""So small that the dense matrices travel in several waves."""


def rehearsal(*groups: Group, **settings: Any) -> Rehearsal:
    config = MuonOptimizerConfig(
        **{
            "optimizer": "muon",
            "lr": 0.01,
            "weight_decay": 0.1,
            "muon_exchange_buffer_mb": BUFFER_MB,
        }
        | settings
    )
    return Rehearsal(config, groups or (Group("dense", DENSE),), RANKS, H100)


def recorded(
    of: Rehearsal,
    ranks: Sequence[int] = range(RANKS),
    odd: tuple[int, Callable[[], RankTrace]] | None = None,
) -> Recorded:
    """The traces of ranks, one of them as `odd` has it."""
    traces = {rank: rehearse_rank(rank, of) for rank in ranks if odd is None or rank != odd[0]}
    if odd is not None:
        traces[odd[0]] = odd[1]()
    settings = settings_of(of.settings, of.hardware)
    return Recorded(traces, [KindPlan(group, settings, of.hardware) for group in of.groups])


def found(findings: Sequence[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == name]


@pytest.fixture(scope="module", autouse=True)
def real_devices() -> None:
    """Another test may have left the CPU standing in for a GPU."""
    cpu.uninstall()


@pytest.fixture(scope="module")
def sound(real_devices: None) -> Recorded:
    return recorded(rehearsal())


def test_nothing_is_found_where_ranks_agree(sound: Recorded) -> None:
    assert check(sound) == []
    assert len(sound.plans[0].of(0).plan.waves) > 1
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
        pytest.param(
            {"muon_nesterov": False, "decoupled_weight_decay": False}, marks=pytest.mark.wide
        ),
    ],
)
def test_other_settings_agree_too(settings: dict[str, Any]) -> None:
    assert [one for one in check(recorded(rehearsal(**settings))) if one.check != "memory"] == []


def test_72_rows_over_16_ranks_are_shared_without_a_remainder_that_nobody_has() -> None:
    """prime-rl #3437: FSDP2 gives 14 ranks five rows, one two and one none; buffers of equal shards
    did not fit.
    """
    held = [5] * 14 + [2, 0]
    layout = Layout(
        16,
        tuple(row_sharded(f"w{k}", (72, cols), held) for k, cols in enumerate((40, 72, 200, 40))),
    )
    config = MuonOptimizerConfig(optimizer="muon", lr=0.01, muon_exchange_buffer_mb=0.25)
    record = recorded(Rehearsal(config, (Group("dense", layout),), 16, H100), [0, 13, 14, 15])
    assert check(record) == []
    assert record.plans[0].of(0).plan.buffer_bytes == 2**18
    assert max(trace.steps[1].taken["dense"] for trace in record.traces.values()) <= 2**18


def test_plan_and_record_agree_on_bytes_and_products(sound: Recorded) -> None:
    """Operations exactly as noted: a change that makes a step launch more has to be seen."""
    for rank, trace in sound.traces.items():
        expected = sound.planned(rank)
        assert (trace.received_bytes, trace.steps[1].flops) == (
            expected["received_bytes"],
            expected["flops"],
        )
        assert (len(trace.steps[1].calls), trace.steps[1].operations) == (4, OPERATIONS[rank])


def test_a_rank_with_another_plan_is_found() -> None:
    usual = rehearsal()
    plan = make_plan(
        DENSE,
        [1.0 + index for index in range(len(DENSE.matrices))][::-1],
        buffer_bytes=int(BUFFER_MB * 2**20),
        memory=Memory(2),
    )
    other = dataclasses.replace(usual, plans={("dense", node_pattern(range(RANKS), H100)): plan})
    findings = check(recorded(usual, odd=(2, lambda: rehearse_rank(2, other))))
    assert found(findings, "plan")[0].ranks == (2,)
    assert any(
        2 in finding.ranks and "expects" in finding.text for finding in found(findings, "bytes")
    )
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
        (
            "run",
            reduce_first,
            "order",
            "rank 0 starts all_to_all of bfloat16, rank 3 all_reduce of float32",
        ),
        (
            "_orthogonalize",
            orthogonalize_twice,
            "blocks",
            "part 1 of 1 by rank 3, part 1 of 1 by rank 3",
        ),
        ("_send", forget, "wait", "is never waited for: all_to_all of bfloat16"),
        ("_orthogonalize", fail, "step", "ValueError: no such size (megatron_muon/"),
    ],
)
def test_a_rank_that_does_something_else_is_found(
    method: str, instead: Any, name: str, text: str
) -> None:
    def odd() -> RankTrace:
        with Patches() as patches:
            patches.around(Exchange, method)(instead)
            return rehearse_rank(3, rehearsal())

    finding, *_ = found(check(recorded(rehearsal(), odd=(3, odd))), name)
    assert 3 in finding.ranks
    assert text in finding.text


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Each group has the same order on all of its ranks; one rank takes the groups in another
    order.
    """
    groups = Group("dense", DENSE), Group("experts", EXPERTS, stride=2)
    last_first = rehearsal(*groups[::-1])
    record = recorded(rehearsal(*groups), odd=(3, lambda: rehearse_rank(3, last_first)))
    stuck = found(check(record), "order")
    assert all("waits for collective 0 of their group, which" in finding.text for finding in stuck)
    assert any(3 in finding.ranks for finding in stuck)


KEPT: list[torch.Tensor] = []


@pytest.mark.parametrize(
    ("act", "name", "text"),
    [
        (lambda updates: updates.sum().item(), "host", "_local_scalar_dense"),
        (lambda updates: updates.cpu(), "host", "a copy to host memory"),
        (lambda updates: torch.cuda.synchronize(), "host", "torch.cuda.synchronize"),
        (
            lambda updates: torch.cuda.current_stream().synchronize(),
            "host",
            "synchronize of a stream",
        ),
        (
            lambda updates: torch.cuda.Event().synchronize(),
            "host",
            "synchronize of a stream or an event",
        ),
        (lambda updates: updates.add_(torch.ones(1).to("cuda")), "host", "a copy from host memory"),
        (
            lambda updates: KEPT.append(torch.zeros(1000, device="cuda")),
            "leak",
            "bytes more in use",
        ),
        (
            lambda updates: torch.zeros(2**22, device="cuda").mul_(2),
            "memory",
            "bytes, and may take 419,430",
        ),
    ],
)
def test_waits_of_the_host_and_memory_are_found(act: Any, name: str, text: str) -> None:
    with Patches() as patches:
        patches.around(ShardedMuon, "apply")(
            lambda apply, muon, chunk: (act(chunk.updates), apply(muon, chunk))
        )
        finding, *_ = check(recorded(rehearsal(), [2]))
    assert (finding.check, finding.ranks) == (name, (2,))
    assert text in finding.text
    KEPT.clear()


def test_every_group_is_held_to_its_own_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest buffer of all groups stood for each of them."""
    both = rehearsal(Group("dense", DENSE), Group("experts", EXPERTS, stride=2))
    record = recorded(both, [0])
    experts = record.plans[1].of(0)
    roomy = dataclasses.replace(experts.plan, buffer_bytes=2**30)
    monkeypatch.setattr(
        record.plans[1], "of", lambda rank: dataclasses.replace(experts, plan=roomy)
    )
    record.traces[0].steps[-1].taken["dense"] += 2**24
    first, *_ = found(check(record), "memory")
    assert first.text.startswith("the step of the dense matrices takes")


def test_every_group_of_an_exchange_is_connected_on_its_device_before_messages_of_some_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside gloo, NCCL's first call on a group was the messages of some of its ranks, which torch
    forbids.

    What ranks say at construction takes gloo then. Here the first call with a tensor of the GPU is
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
    in_step = {
        call.group
        for step in trace.steps
        for call in step.calls
        if len(trace.groups[call.group].ranks) > 1
    }
    assert {trace.groups[group].ranks for group in in_step} == {(0, 1), (0, 1, 2, 3)}
    assert {first[group] for group in in_step} == {"all_reduce"}
    assert {trace.groups[group].ranks for group in first} == {(0, 1), (0, 1, 2, 3)}
    assert set(first.values()) == {"all_reduce"}


def in_teams(world_size: int, hardware: Hardware, *, matrices: int, **lie: int) -> Rehearsal:
    """Of groups of four ranks, which own experts' matrices in teams of two."""
    config = MuonOptimizerConfig(optimizer="muon", lr=0.01, weight_decay=0.1, muon_team_size="2")
    layout = Layout(4, tuple(row_sharded(f"e{k}", (256, 128), [64] * 4) for k in range(matrices)))
    return Rehearsal(config, [Group("experts", layout, **lie)], world_size, hardware)


def test_groups_that_lie_in_nodes_differently_have_plans_of_their_own() -> None:
    """Expert groups (0, 3, 6, 9), (1, 4, 7, 10) and (2, 5, 8, 11) in nodes of 4: rank 0's plan was
    handed to all.
    """
    of = in_teams(12, dataclasses.replace(H100, node_ranks=4), matrices=2, stride=3)
    record = recorded(of, range(12))
    (kind,) = record.plans
    assert [kind.of(rank).plan.teams[0].ranks for rank in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert check(record) == []
    assert len(of.plans) == 3
    digests = [record.traces[rank].digest for rank in range(12)]
    assert digests[1] == digests[4] != digests[0]


def test_a_group_over_tensor_parallel_ranks_lies_in_the_nodes_of_its_ranks() -> None:
    """Ranks 0, 1, 16 and 17 are in two nodes; the plan took each of them for a node of its own."""
    of = in_teams(32, H100, matrices=6, stride=8, together=2)
    assert of.groups[0].members(0) == [0, 1, 16, 17]
    record = recorded(of, [0, 1, 16, 17])
    assert {team.ranks for team in record.plans[0].of(0).plan.teams} == {(0, 1), (2, 3)}
    assert check(record) == []


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Rank 2 of 8, on a GPU that is not there."""
    recorder = Recorder(2, machine.DEVICE)
    with machine.world(8, recorder), machine.on(H100, recorder):
        yield recorder


def test_collectives_are_recorded_with_their_group(recorder: Recorder) -> None:
    group, again = dist.new_group([0, 2, 5]), dist.new_group([0, 2, 5])
    assert (group.rank(), group.size()) == (1, 3)
    values = torch.zeros(6, device="cuda")
    with recorder.step():
        dist.all_reduce(values, group=group)
        work = dist.all_reduce(values, group=again, async_op=True)
        dist.all_gather_into_tensor(torch.zeros(18, device="cuda"), values, group=group)
        dist.all_to_all_single(values, values.clone(), [1, 2, 3], [6, 0, 0], group=group)
        assert work is not None
        work.wait()
    (step,) = recorder.trace.steps
    assert recorder.trace.groups == [
        Members(tuple(range(8)), 0),
        Members((0, 2, 5), 0),
        Members((0, 2, 5), 1),
    ]
    assert [(call.group, *call.signature) for call in step.calls] == [
        (1, "all_reduce", "float32", 24),
        (2, "all_reduce", "float32", 24),
        (1, "all_gather", "float32", 24),
        (1, "all_to_all", "float32", 0),
    ]
    sent, received = step.calls[-1].sent, step.calls[-1].received
    assert sent is not None
    assert received is not None
    assert (sent.peers.tolist(), sent.sizes.tolist()) == ([0], [24])
    assert (received.peers.tolist(), received.sizes.tolist()) == ([0, 1, 2], [4, 8, 12])
    assert step.waits == [0, 2, 3, 1]


def test_what_the_host_tells_is_answered_as_if_all_had_said_it(recorder: Recorder) -> None:
    """Optimizers compare plans this way while they are made."""
    mine = torch.tensor([5, 7])
    everyone = mine.new_empty(16)
    dist.all_gather_into_tensor(everyone, mine)
    assert everyone.tolist() == [5, 7] * 8
    objects = [None] * 8
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}] * 8


def test_memory_is_counted_while_something_refers_to_it(recorder: Recorder) -> None:
    held = torch.zeros(1000, device="cuda")
    with recorder.step():
        with recorder.group("dense", kept_bytes=100):
            more = torch.zeros(500, device="cuda")
            view = more[10:].view(-1, 7)
        del more
        other = torch.ones(100, device="cuda")
        del view, other
        kept = held + 1
    (step,) = recorder.trace.steps
    assert (step.begin_bytes, step.end_bytes) == (4000, 4000 + 4 * kept.numel())
    assert step.extra_bytes == step.taken["dense"] == 100 + 2000
    torch.zeros(10**6)  # of the host
    assert recorder._live_bytes == step.end_bytes


def test_a_world_leaves_nothing_behind() -> None:
    before = torch.cuda.synchronize, sys.excepthook, dist.all_gather_object
    recorder = Recorder(0, machine.DEVICE)
    with machine.world(2, recorder), machine.on(HARDWARE["a100-sxm"], recorder):
        assert torch.cuda.get_device_capability() == (8, 0)
        assert dist.get_world_size() == 2
    assert before == (torch.cuda.synchronize, sys.excepthook, dist.all_gather_object)
    assert not dist.is_initialized()
    assert torch.zeros(2).sum().item() == 0.0
