"""Ranks work out the same layout, each by itself: what happens where they do not, or a framework
cuts otherwise.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_muon
from tests.support import frameworks, model
from tests.support.case import Case
from tests.support.cases import CLIP, HSDP, LAYOUTS, TP, but
from tests.support.pool import Pool

ALIKE = (
    "give all ranks the same parameters in the same order, with the same matrices=, exclude=,"
    " flatten=, stacks=, transposed=, split= and ns_steps_for="
)
SETTINGS = "give every rank the same settings"
OTHERS: dict[str, tuple[Any, Any]] = {
    "lr": (0.001, 0.03),
    "exchange": ("owner", "allgather"),
    "moment2_method": (None, "normuon"),
    "offload": ("none", "cpu"),
    "split": (None, {"layers.*.0.weight": (19, 19)}),
    "exclude": ((), ["narrow"]),
}
"""Defaults of settings, and other values."""

DIFFERENT: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "matrix 0 is layers.0.0.weight (38, 23), RowSplit(groups=1, parts=(38,)), steps 0, cut 0 on"
    " rank 0 and back.weight (23, 2), RowSplit(groups=1, parts=(23,)), steps 0, cut 0 on rank 2;"
    f" {ALIKE}": (reversed, {}),
    "matrix 4 is narrow.weight (2, 23), RowSplit(groups=1, parts=(2,)), steps 0, cut 2 on rank 0"
    " and back.weight (23, 2), RowSplit(groups=1, parts=(23,)), steps 0, cut 2 on rank 2;"
    f" {ALIKE}": (lambda named: [pair for pair in named if pair[0] != "narrow.weight"], {}),
    **{
        f"{name} is {default!r} on rank 0 and {other!r} on rank 2; {SETTINGS}": (
            list,
            {name: other},
        )
        for name, (default, other) in OTHERS.items()
    },
}
"""What Muon says, by what the last rank gives instead: parameters, settings."""


def refusals(rank: int, world_size: int) -> list[str]:
    """In a worker: what Muon says where the last rank gives something else than the others."""
    from megatron_muon.errors import UserError

    net = frameworks.Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    named, last = list(net.named_parameters()), rank == world_size - 1
    said = []
    for parameters, options in DIFFERENT.values():
        with pytest.raises(UserError) as caught:
            megatron_muon.Muon(parameters(named) if last else named, **(options if last else {}))
        said.append(str(caught.value))
    megatron_muon.Muon(named)  # another try works
    return said


def test_ranks_that_give_other_matrices_or_settings_are_named(ranks: Pool) -> None:
    """By every rank alike. Story: some passed silently, one aborted in gloo, the others waited for
    ever.
    """
    assert ranks(3, refusals) == [list(DIFFERENT)] * 3


def refused(
    rank: int,
    world_size: int,
    *,
    cases: list[tuple[Case, Case]],
) -> list[str]:
    """In a worker: what Muon under Megatron-FSDP says to the cases; the last rank has the second of
    each.
    """
    from megatron_muon.errors import UserError

    said = []
    for pair in cases:
        with pytest.raises(UserError) as caught:
            model.Trainer(pair[rank == world_size - 1])
        said.append(str(caught.value))
    return said


def test_settings_of_megatron_that_differ_between_ranks_are_named_on_all(ranks: Pool) -> None:
    """As where nodes read different files: ranks then took other rates without a word, or waited
    for ever.
    """
    settings: dict[str, tuple[Any, Any]] = {
        "lr": (0.02, 0.01),
        "muon_num_ns_steps": (5, 4),
        "muon_offload": ("none", "cpu"),
    }
    cases = [
        tuple(Case(optimizer={name: value}) for value in both) for name, both in settings.items()
    ]
    first, *others = ranks(3, refused, cases=cases)
    assert all(other == first for other in others)
    assert first == [
        f"{name} is {a!r} on rank 0 and {b!r} on rank 2; {SETTINGS}"
        for name, (a, b) in settings.items()
    ]


REFUSED = [
    (
        TP.but(query_groups=1, strategy="no_shard"),
        "--num-query-groups 1 is less than --tensor-model-parallel-size",
    ),
    (
        TP.but(query_groups=1, optimizer={"muon_tp_mode": "blockwise"}),
        "no rank's part of the QKV matrix",
    ),
    (
        HSDP.but(strategy="no_shard"),
        (
            "--num-distributed-optimizer-instances does not work with"
            " --data-parallel-sharding-strategy no_shard"
        ),
    ),
    (
        Case(layers=1, attention=CLIP, frozen=("linear_qkv",)),
        (
            "--qk-clip would scale rows of decoder.layers.0.self_attention.linear_qkv.weight, which"
            " is frozen"
        ),
    ),
    (Case(layers=1, trainable=()), "no trainable parameter"),
    # In megatron-core's `FusedMLASelfAttention` each rank has rows of both latents, which blocks
    # would mix.
    *(
        (
            but(TP.but(latent=True, query_latent=True, fused_down=True), muon_tp_mode=mode),
            "--mla-down-proj-fusion with tensor parallelism",
        )
        for mode in ("duplicated", "blockwise")
    ),
]


def test_what_a_layout_cannot_do_is_refused(ranks: Pool) -> None:
    for said in ranks(2, refused, cases=[(case, case) for case, _ in REFUSED]):
        for found, (_, message) in zip(said, REFUSED, strict=True):
            assert message in found


def cut_otherwise(rank: int, world_size: int) -> str:
    """In a worker: what the optimizer says where Megatron-FSDP has noted other rows on rank 1."""
    from megatron_muon.errors import UserError
    from megatron_muon.matrices import cuts

    noted_part = cuts.noted_part

    def shifted(buffer: Any, name: str) -> Any:
        (first, *others), sizes = noted_part(buffer, name)
        return (max(first - rank, 0), *others), sizes

    cuts.noted_part = shifted  # this process ends with the task
    with pytest.raises(UserError) as caught:
        model.Trainer(LAYOUTS["cp2"][1].but(context=1, strategy="optim"))
    return str(caught.value)


def test_a_framework_that_cuts_otherwise_is_refused(ranks: Pool) -> None:
    """Rows that are taken for others would train to a worse loss, silently."""
    first, second = ranks(2, cut_otherwise)
    assert first == second
    wrong = r"shards have a gap, or overlap, from row \d+"
    assert re.match(rf"decoder\S+: {wrong}, .* shard it evenly", first)


def refuse_objects() -> None:
    """Make every collective of Python objects that this package calls an error, until the process
    ends.

    Megatron-FSDP's own construction has one for each parameter, and megatron-core's one for each
    parameter group.
    """

    def refusing(collective: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            assert not caller.startswith("megatron_muon"), f"{caller} sends Python objects"
            return collective(*args, **kwargs)

        return called

    for name in (
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
    ):
        setattr(dist, name, refusing(getattr(dist, name)))


def built_without_objects(rank: int, world_size: int, *, name: str) -> bool:
    """In a worker: build a layout's optimizer without collectives of Python objects, which are
    refused.
    """
    from megatron_muon.ranks import of_all_ranks

    refuse_objects()
    with pytest.raises(AssertionError, match=r"megatron_muon\.ranks sends Python objects"):
        of_all_ranks(rank)
    trainer = model.Trainer(LAYOUTS[name][1])
    return all(member.optimizer.state for member in trainer.optimizer.chained_optimizers)


@pytest.mark.parametrize("name", ["hsdp tp2", "expert tp2"])
def test_construction_sends_no_python_objects(ranks: Pool, name: str) -> None:
    """The rectangles of 25,000 matrices from each of 4,096 ranks would be 10 GB on every rank."""
    assert all(ranks(LAYOUTS[name][0], built_without_objects, name=name))


def holders_on_two_axes(rank: int, world_size: int) -> set[int]:
    """In a worker: how many ranks hold each shard of a model on a mesh of two instances that share
    their state.

    Muon itself checks that each rank holds what the layout says.
    """
    mesh = init_device_mesh("cpu", (2, world_size // 2, 1), mesh_dim_names=("outer", "dp", "tp"))
    layers = [nn.Linear(16, 16, bias=False) for _ in range(3)]
    net = importlib.import_module(frameworks.MEGATRON_FSDP).fully_shard_model(
        nn.Sequential(nn.Sequential(*layers)),
        device_mesh=mesh,
        dp_shard_dim="dp",
        dp_outer_dim="outer",
        tp_dim="tp",
        hybrid_fsdp_group=dist.group.WORLD,
        fsdp_unit_modules=[nn.Sequential],
        outer_dp_sharding_strategy="optim",
    )
    net._replace_param_with_distributed_if_needed()
    layout = megatron_muon.Muon(net.named_parameters()).parts[0].waves.transport.layout
    assert any(len(matrix.shards) > 1 for matrix in layout.matrices)
    return {len(shard.holders) for matrix in layout.matrices for shard in matrix.shards}


def test_instances_of_the_library_share_their_state(ranks: Pool) -> None:
    assert ranks(4, holders_on_two_axes) == [{1}] * 4


def on_its_half(rank: int, world_size: int) -> list[int]:
    """In a worker: FSDP2 on a mesh of two dimensions that has half of the ranks; those of the
    optimizer's group.
    """
    mesh = init_device_mesh(
        "cpu", (2, 1, world_size // 2), mesh_dim_names=("half", "replicate", "shard")
    )
    net = frameworks.Net()
    fully_shard(net, mesh=mesh["replicate", "shard"])
    refuse_objects()
    optimizer = megatron_muon.Muon(net.named_parameters())
    net(frameworks.tokens(1)[0]).backward()
    optimizer.step()
    return dist.get_process_group_ranks(optimizer.group)


def test_a_mesh_of_some_ranks_gets_a_group(ranks: Pool) -> None:
    assert ranks(4, on_its_half) == [[0, 1]] * 2 + [[2, 3]] * 2
