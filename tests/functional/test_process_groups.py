"""Process groups that Muon makes: construction ends whatever groups ranks are in, and however many
a node has.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

from tests.support.pool import Pool


def on_nodes(rank: int, nodes: list[tuple[int, int]]) -> None:
    """In a worker: the variables of a launcher, the ranks of this rank's node and its place."""
    ranks, place = nodes[rank]
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ["LOCAL_RANK"] = str(place)


def stepped(
    rank: int,
    world_size: int,
    *,
    alone: int = 0,
    nodes: list[tuple[int, int]] | None = None,
    **settings: Any,
) -> tuple[str, list[tuple[int, ...]]]:
    """In a worker: a step under FSDP2, where rank 0 is in `alone` more groups; the plan and its
    teams.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import megatron_muon

    if nodes is not None:
        on_nodes(rank, nodes)
    for _ in range(alone):
        dist.new_group([0])
    torch.manual_seed(0)
    up = torch.nn.Linear(64, 256, bias=False)
    down = torch.nn.Linear(256, 64, bias=False)
    model = torch.nn.Sequential(up, down)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.02, matrices=["*"], **settings)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    if not alone:  # torch's own names of groups still agree
        dist.barrier(dist.new_group(list(range(world_size)), use_local_synchronization=True))
    return optimizer.digest, [team.ranks for team in optimizer.parts[0].waves.plan.teams]


def test_ranks_in_unequal_numbers_of_groups(ranks: Pool) -> None:
    """Both ranks waited for ever: torch names a group by how many groups each of its ranks is
    in.
    """
    first, second = ranks(2, stepped, alone=1, team_size="2")
    assert first == second
    assert first[1] == [(0, 1)] * 2


UNEVEN = [(2, 0), (2, 1), (1, 0)]
ONE_NODE = [(3, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize(
    ("nodes", "size"),
    [(UNEVEN, "auto"), (ONE_NODE, "2")],
)
def test_ranks_that_no_team_takes(ranks: Pool, nodes: Any, size: str) -> None:
    """Nodes of two ranks and of one: each rank divided by its own node's, and they waited for each
    other.
    """
    first, *others = ranks(3, stepped, nodes=nodes, team_size=size)
    assert others == [first] * 2
    if size == "2":
        assert set(first[1]) == {(0, 1)}


def refusal(rank: int, world_size: int, **how: Any) -> str:
    """In a worker: the error that construction ends in."""
    from megatron_muon.errors import UserError

    with pytest.raises(UserError) as error:
        stepped(rank, world_size, **how)
    return str(error.value)


def test_a_refused_team_size_names_one_that_works(ranks: Pool) -> None:
    """It named 1 where 2 works."""
    said = ranks(
        4,
        refusal,
        nodes=[(2, 0), (2, 1)] * 2,
        team_size="4",
    )
    message = "team_size 4 is more than the ranks of a node that share these matrices; use auto, "
    assert said == [message + "or 2"] * 4


def nodes_as_found(rank: int, world_size: int) -> list[list[int]]:
    """In a worker: the nodes of the world's ranks, as four launchers tell."""
    import socket

    import torch.distributed as dist

    from megatron_muon.ranks import nodes_of

    world: Any = dist.group.WORLD
    found = []
    for nodes in (UNEVEN, [(1, 0)] * 3, ONE_NODE):
        on_nodes(rank, nodes)
        found.append(nodes_of(world))
    del os.environ["LOCAL_WORLD_SIZE"]
    socket.gethostname = lambda: "even" if rank % 2 == 0 else "odd"
    return [*found, nodes_of(world)]


def test_nodes_as_launchers_tell(ranks: Pool) -> None:
    """Without torchrun's variables all ranks counted as one node; the host tells."""
    for found in ranks(3, nodes_as_found):
        uneven, alone, together, by_host = found
        assert uneven == [0, 0, 1]
        assert alone == [0, 1, 2]
        assert together == [0, 0, 0]
        assert by_host == [0, 1, 0]


def timeout_of(group: Any) -> Any:
    """How long the collectives of a gloo group wait."""
    import torch

    return group._get_backend(torch.device("cpu")).options._timeout


def sums_among(rank: int, world_size: int) -> list[float]:
    """In a worker: sums over groups that two halves of the world make at the same time, twice, in
    another order.
    """
    import torch
    import torch.distributed as dist

    from megatron_muon.ranks import group_among, new_group_of

    world: Any = dist.group.WORLD
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.new_group([2])
    half, found = halves[rank // 2], []
    world.bound_device_id = torch.device("cpu", 0)
    # torch 2.11 has the usual one alone
    has_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    for order in (
        [0, 1],
        [1, 0] if has_order else [0, 1],
    ) * 2:
        group = group_among(order, half)
        assert group.rank() == order.index(half.rank())
        assert timeout_of(group) == timeout_of(world) != timeout_of(half)
        # its communicator would be split from that of all ranks
        assert group.bound_device_id is None
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        found.append(total.item())
    assert world.bound_device_id == torch.device("cpu", 0)
    world.bound_device_id = None
    # torch gives NCCL's new groups 10 minutes
    assert timeout_of(new_group_of(rank % 2)) == timeout_of(world)
    return found


def test_parts_of_the_world_make_groups_at_the_same_time(ranks: Pool) -> None:
    first = [1.0] * 4
    second = [5.0] * 4
    assert ranks(4, sums_among) == [first, first, second, second]
