"""Layouts on paper: as small examples cut by hand, and as megatron-core's own functions place and group parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.core.layout import BlockedLayout, Shard
from megatron_muon.errors import UserError
from megatron_muon.planning.model_layout import (
    ModelSizes,
    ParallelSizes,
    Parameter,
    buckets,
    chunk_factor,
    cut_bucket,
    model_layouts,
    model_parameters,
    place,
)

TINY = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 2,
    "swiglu": True,
}
MOE = TINY | {
    "num_experts": 4,
    "moe_layers": (False, True),
    "moe_ffn_hidden_size": 4,
    "moe_grouped_gemm": True,
    "moe_shared_expert_intermediate_size": 6,
}


def rows(blocked: BlockedLayout | None, name: str) -> list[tuple[int, int, int]]:
    """`(rank, first row, rows)` of each shard."""
    assert blocked is not None
    matrix = next(matrix for matrix in blocked.layout.matrices if matrix.name.endswith(name))
    return [(shard.rank, shard.row_start, shard.rows) for shard in matrix.shards]


def shapes(blocked: BlockedLayout | None) -> dict[str, tuple[int, int]]:
    assert blocked is not None
    return {matrix.name: matrix.shape for matrix in blocked.layout.matrices}


def test_a_dense_layer_cut_by_hand() -> None:
    """A layer on 2 ranks: fc2 first for its long rows, then by module order, vectors last.

    fc2 8 x 16 at 0, proj 8 x 8 at 128, qkv 16 x 8 at 192, fc1 32 x 8 at 320, two norms of 8 at 576: 592 elements,
    padded to 2 x 16: 592 = 18.5 x 32, so 19 x 32 = 608 and a piece is 304.
    """
    dense, experts = model_layouts(ModelSizes(**TINY), ParallelSizes(world_size=2))
    assert experts is None
    assert len(dense.layout.matrices) == 8
    assert rows(dense, "layers.0.mlp.linear_fc2.weight") == [(0, 0, 8)]
    assert rows(dense, "layers.0.self_attention.linear_proj.weight") == [(0, 0, 8)]
    assert rows(dense, "layers.0.self_attention.linear_qkv.weight") == [(0, 0, 14), (1, 14, 2)]
    assert rows(dense, "layers.0.mlp.linear_fc1.weight") == [(1, 0, 32)]
    assert rows(dense, "layers.1.mlp.linear_fc1.weight") == [(1, 0, 32)]
    index = next(i for i, m in enumerate(dense.layout.matrices) if "qkv" in m.name)
    assert dense.blocks[index] == (2, (4, 2, 2))
    assert dense.block_shapes(index) == [(8, 8), (4, 8), (4, 8)]


def test_experts_cut_by_hand() -> None:
    """4 experts, EP 2, 4 ranks: two experts over two ranks; fc1 8 x 8 twice, then fc2 8 x 4 twice: 192, a piece 96."""
    dense, experts = model_layouts(ModelSizes(**MOE), ParallelSizes(world_size=4, expert=2))
    assert experts is not None
    assert (dense.layout.world_size, experts.layout.world_size) == (4, 2)
    assert shapes(experts) == {
        "decoder.layers.1.mlp.experts.linear_fc1.weight0": (8, 8),
        "decoder.layers.1.mlp.experts.linear_fc1.weight1": (8, 8),
        "decoder.layers.1.mlp.experts.linear_fc2.weight0": (8, 4),
        "decoder.layers.1.mlp.experts.linear_fc2.weight1": (8, 4),
    }
    assert rows(experts, "linear_fc1.weight0") == [(0, 0, 8)]
    assert rows(experts, "linear_fc1.weight1") == [(0, 0, 4), (1, 4, 4)]
    assert rows(experts, "linear_fc2.weight0") == [(1, 0, 8)]
    assert shapes(dense)["decoder.layers.1.mlp.router.weight"] == (4, 8)
    assert shapes(dense)["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"] == (12, 8)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in shapes(dense)


def blocks(blocked: BlockedLayout | None, name: str) -> Any:
    assert blocked is not None
    index = next(i for i, matrix in enumerate(blocked.layout.matrices) if matrix.name.endswith(name))
    return blocked.blocks[index]


def test_blocks_that_a_run_would_have() -> None:
    model = ModelSizes(**MOE, split_gated_mlp=True, split_heads=True)
    dense, experts = model_layouts(model, ParallelSizes(world_size=4, expert=2))
    assert blocks(dense, "layers.0.self_attention.linear_qkv.weight") == (1, (2,) * 8)
    assert blocks(dense, "layers.0.mlp.linear_fc1.weight") == (1, (16, 16))
    assert blocks(dense, "layers.0.mlp.linear_fc2.weight") is None
    assert blocks(dense, "shared_experts.linear_fc1.weight") == (1, (6, 6))
    assert blocks(experts, "linear_fc1.weight1") == (1, (4, 4))
    one_by_one = ModelSizes(**MOE | {"moe_grouped_gemm": False}, split_gated_mlp=True)
    _, experts = model_layouts(one_by_one, ParallelSizes(world_size=4, expert=2))
    assert blocks(experts, "local_experts.1.linear_fc1.weight") == (1, (4, 4))
    plain, _ = model_layouts(ModelSizes(**TINY | {"swiglu": False}, split_gated_mlp=True), ParallelSizes(world_size=2))
    assert blocks(plain, "layers.0.mlp.linear_fc1.weight") is None


def test_excluded_matrices_still_take_room_in_their_bucket() -> None:
    everything, _ = model_layouts(ModelSizes(**TINY), ParallelSizes(world_size=2))
    dense, _ = model_layouts(ModelSizes(**TINY, exclude=("layers.0.*fc2", "proj")), ParallelSizes(world_size=2))
    left = [m for m in everything.layout.matrices if "proj" not in m.name and "layers.0.mlp.linear_fc2" not in m.name]
    assert dense.layout.matrices == tuple(left)
    with pytest.raises(UserError, match="--muon-exclude ruoter matches none of Muon's 8 matrices"):
        model_layouts(ModelSizes(**TINY, exclude=("ruoter",)), ParallelSizes(world_size=2))


def test_experts_one_by_one_without_grouped_products() -> None:
    model = ModelSizes(**MOE | {"moe_grouped_gemm": False})
    names = [p.name for p in model_parameters(model, ParallelSizes(world_size=4, expert=2)) if p.is_expert]
    assert names == [
        f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc{part}.weight"
        for expert in range(2)
        for part in (1, 2)
    ]


def test_a_tensor_parallel_rank_has_matrices_of_its_own() -> None:
    dense, _ = model_layouts(ModelSizes(**TINY), ParallelSizes(world_size=4, tensor=2))
    assert dense.layout.world_size == 2
    assert shapes(dense)["decoder.layers.0.self_attention.linear_qkv.weight"] == (8, 8)
    assert shapes(dense)["decoder.layers.0.self_attention.linear_proj.weight"] == (8, 4)
    assert shapes(dense)["decoder.layers.0.mlp.linear_fc1.weight"] == (16, 8)
    assert shapes(dense)["decoder.layers.0.mlp.linear_fc2.weight"] == (8, 8)


def test_owners_put_matrices_together_over_tensor_parallel_ranks() -> None:
    """Ranks 0 and 1 are tensor-parallel peers, 0 and 2 data-parallel ones; Layout checks that the shards tile."""
    parts, _ = model_layouts(ModelSizes(**TINY), ParallelSizes(world_size=4, tensor=2))
    whole, _ = model_layouts(ModelSizes(**TINY), ParallelSizes(world_size=4, tensor=2), over_tp=True)
    one, _ = model_layouts(ModelSizes(**TINY), ParallelSizes(world_size=1))
    assert whole.layout.world_size == 4
    assert shapes(whole) == shapes(one)
    assert whole.blocks == one.blocks
    for matrix, part in zip(whole.layout.matrices, parts.layout.matrices, strict=True):
        down = matrix.shape[0] != part.shape[0]  # cut along rows
        for shard in part.shards:
            for peer in (0, 1):
                found = matrix.shard_of(2 * shard.rank + peer)
                assert found == replace(
                    shard,
                    rank=2 * shard.rank + peer,
                    row_start=shard.row_start + down * peer * part.shape[0],
                    col_start=(not down) * peer * part.shape[1],
                )


def test_fewer_query_groups_than_tensor_parallel_ranks() -> None:
    """No part holds a whole group, but the matrix that owners put together does."""
    sizes = ModelSizes(**{**TINY, "num_query_groups": 1})
    with pytest.raises(
        UserError, match=r"--num-query-groups 1 must be a multiple of .* 2, or --muon-tp-mode duplicated"
    ):
        model_layouts(sizes, ParallelSizes(world_size=4, tensor=2))
    whole, _ = model_layouts(sizes, ParallelSizes(world_size=4, tensor=2), over_tp=True)
    one, _ = model_layouts(sizes, ParallelSizes(world_size=1))
    assert (shapes(whole), whole.blocks) == (shapes(one), one.blocks)


def test_instances_and_uncut_matrices_are_replicas() -> None:
    parallel = ParallelSizes(world_size=16, tensor=2, expert=2, expert_tensor=2, instances=2)
    dense, experts = model_layouts(ModelSizes(**MOE), parallel, over_tp=True)
    assert (dense.layout.world_size, experts.layout.world_size) == (16, 8)
    of_dense = {matrix.name: matrix.shards[0].holders for matrix in dense.layout.matrices}
    assert of_dense["decoder.layers.0.self_attention.linear_qkv.weight"] == (0, 8)
    assert of_dense["decoder.layers.1.mlp.router.weight"] == (0, 1, 8, 9)
    assert {shard.holders for matrix in experts.layout.matrices for shard in matrix.shards} >= {(0, 4), (1, 5)}


def test_latent_experts_work_in_their_width() -> None:
    dense, experts = model_layouts(ModelSizes(**MOE, moe_latent_size=2), ParallelSizes(world_size=1))
    assert shapes(dense)["decoder.layers.1.mlp.fc1_latent_proj.weight"] == (2, 8)
    assert shapes(experts)["decoder.layers.1.mlp.experts.linear_fc2.weight3"] == (2, 4)


def test_an_instance_has_its_share_of_the_ranks() -> None:
    parallel = ParallelSizes(world_size=16, expert=2, instances=2, context=2)
    assert (parallel.dense_ranks, parallel.expert_ranks) == (8, 4)


def test_more_ranks_than_rows() -> None:
    dense, _ = model_layouts(ModelSizes(**TINY), ParallelSizes(world_size=4096))
    assert len(dense.layout.matrices) == 8
    assert max(shard.rank for matrix in dense.layout.matrices for shard in matrix.shards) < 40


def test_a_piece_may_end_within_a_matrix_but_not_within_a_row() -> None:
    bucket = [Parameter("a", (5, 6), 0, muon=True), Parameter("b", (7, 4), 0, muon=True)]
    assert chunk_factor(bucket) == 12
    assert place(bucket, 12) == ([0, 32], 60)
    assert cut_bucket(bucket, 2) == {
        "a": (Shard(0, 0, 5, 0, 6),),
        "b": (Shard(0, 0, 1, 0, 4), Shard(1, 1, 6, 0, 4)),
    }


@pytest.mark.parametrize(
    ("sizes", "parallel", "message"),
    [
        ({}, {"tensor": 3}, "tensor x context parallel size x optimizer instances is 3, which does not divide 16"),
        ({}, {"tensor": 4}, "--num-query-groups 2 must be a multiple of --tensor-model-parallel-size 4"),
        ({"num_experts": 3}, {"expert": 2}, "--num-experts 3 must be a multiple of --expert-model-parallel-size 2"),
        ({"moe_layers": (True,)}, {}, "--moe-layer-freq names 1 layers, --num-layers is 2"),
        ({}, {"world_size": 0}, "--world-size must be at least 1, got 0"),
    ],
)
def test_what_does_not_divide_is_refused(sizes: dict[str, Any], parallel: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_layouts(ModelSizes(**MOE | sizes), ParallelSizes(**{"world_size": 16} | parallel))


def test_no_shard_has_nothing_to_plan() -> None:
    with pytest.raises(UserError, match="no_shard leaves nothing to plan; choose one of optim"):
        model_layouts(ModelSizes(**TINY), ParallelSizes(world_size=2), strategy="no_shard")


# --- against megatron-core's own functions ---


class Unit(torch.nn.Module):
    """Stands for TransformerLayer."""


def as_module(parameters: list[Parameter]) -> torch.nn.Module:
    """A module with these parameters, without memory, under these names and in this order."""
    root = torch.nn.Module()
    for parameter in parameters:
        module = root
        *path, leaf = parameter.name.split(".")
        for depth, part in enumerate(path):
            if part not in module._modules:
                is_layer = path[:depth] == ["decoder", "layers"]
                module.add_module(part, Unit() if is_layer else torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, torch.nn.Parameter(torch.empty(parameter.shape, device="meta")))
    return root


def megatron_buffer() -> Any:
    from megatron_muon.quiet import quiet_imports

    with quiet_imports():
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    return param_and_grad_buffer


VARIANTS = {
    "dense": TINY,
    "biases": TINY | {"bias": True, "layer_norm_bias": True, "swiglu": False, "ffn_hidden_size": 12},
    "norms": TINY | {"qk_layernorm": True, "kv_channels": 6, "qkv_bias": True, "padded_vocab_size": 24},
    "experts": MOE | {"padded_vocab_size": 40, "untied_output": True},
    "sequential": MOE | {"moe_grouped_gemm": False, "moe_latent_size": 6, "moe_shared_expert_gate": True},
}


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("bucket_size", [None, 300])
@pytest.mark.parametrize("variant", VARIANTS)
def test_buckets_are_megatrons(variant: str, bucket_size: int | None, strategy: str) -> None:
    pgb = megatron_buffer()
    listed = list(model_parameters(ModelSizes(**VARIANTS[variant]), ParallelSizes(world_size=4)))
    module = as_module(listed)
    assert [name for name, _ in module.named_parameters()] == [parameter.name for parameter in listed]
    by_unit = strategy == "optim_grads_params"
    policy = pgb.BucketingPolicy(
        suggested_bucket_size=bucket_size,
        fsdp_unit_modules=[Unit] if by_unit else [],
        data_parallel_sharding_strategy=strategy,
    )
    names = {parameter: name for name, parameter in module.named_parameters()}
    theirs, _, _ = pgb._get_parameter_groups(module, policy, {})
    ours = [
        bucket
        for is_expert in (False, True)
        for bucket in buckets(
            [parameter for parameter in listed if parameter.is_expert is is_expert],
            by_unit=by_unit,
            bucket_size=bucket_size,
        )
    ]
    assert sorted((tuple(names[p] for p in group.params), group.chunk_size_factor) for group in theirs) == sorted(
        (tuple(parameter.name for parameter in bucket), chunk_factor(bucket)) for bucket in ours
    )


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 6, 8])), min_size=1, max_size=8),
    st.integers(1, 5),
)
def test_cuts_are_megatrons(sizes: list[tuple[int, int]], world_size: int) -> None:
    """Offsets, padding and each rank's piece of every parameter, also where rows of several lengths share a bucket."""
    from types import SimpleNamespace

    pgb = megatron_buffer()
    bucket = sorted(
        (Parameter(f"w{i}", shape, 0, muon=True) for i, shape in enumerate(sizes)), key=lambda p: -p.row_size
    )
    factor = chunk_factor(bucket)
    offsets, _ = place(bucket, factor)
    cut = cut_bucket(bucket, world_size)
    for rank in range(world_size):
        items, index, piece = pgb.build_data_parallel_buffer_index(
            [torch.Size(parameter.shape) for parameter in bucket],
            rank,
            world_size,
            is_data_distributed=True,
            ddp_config=SimpleNamespace(data_parallel_sharding_strategy="optim"),
            chunk_size_factor=factor,
        )
        assert [items[i].global_data_index for i in range(len(bucket))] == offsets
        assert index.size == piece.size * world_size
        for i, parameter in enumerate(bucket):
            first = max(piece.bucket_data_index, offsets[i])
            last = min(piece.bucket_data_index + piece.size, offsets[i] + parameter.numel)
            held = next((shard for shard in cut[parameter.name] if shard.rank == rank), None)
            if (last - first) % parameter.row_size or (first - offsets[i]) % parameter.row_size:
                continue  # a matrix smaller than a chunk that was cut within a row: Megatron-FSDP cannot shard it
            assert (held.numel if held else 0) == max(last - first, 0)
            if held:
                assert held.row_start * parameter.row_size == first - offsets[i]
