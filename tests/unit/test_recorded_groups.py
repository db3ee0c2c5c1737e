"""The process groups of a rehearsal: torch.distributed as usual, recorded, with fake tensors on a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_muon import cpu
from megatron_muon.tools.plan.estimate import HARDWARE
from megatron_muon.tools.rehearse import machine, process_groups
from megatron_muon.tools.rehearse.recorder import Members, Recorder, Wait


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Rank 2 of 8, on a GPU that is not there."""
    cpu.uninstall()
    recorder = Recorder(2, machine.DEVICE)
    with process_groups.world(8, recorder), machine.on(HARDWARE["h100-sxm"], recorder):
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
    assert recorder.trace.groups == [Members(tuple(range(8)), 0), Members((0, 2, 5), 0), Members((0, 2, 5), 1)]
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
    assert [event.call for event in step.events if isinstance(event, Wait)] == [0, 2, 3, 1]


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
    cpu.uninstall()
    before = torch.cuda.synchronize, sys.excepthook, dist.all_gather_object
    recorder = Recorder(0, machine.DEVICE)
    with process_groups.world(2, recorder), machine.on(HARDWARE["a100-sxm"], recorder):
        assert torch.cuda.get_device_capability() == (8, 0)
        assert dist.get_world_size() == 2
    assert before == (torch.cuda.synchronize, sys.excepthook, dist.all_gather_object)
    assert not dist.is_initialized()
    assert torch.zeros(2).sum().item() == 0.0
