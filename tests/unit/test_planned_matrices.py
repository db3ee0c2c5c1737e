"""Matrices of a config without ranks: small examples cut by hand, and models that only
megatron-core can list.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon import cpu
from megatron_muon.core.layout import Layout, Matrix, RowSplit
from megatron_muon.errors import UserError

TINY = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": "true",
    "num_query_groups": 2,
    "kv_channels": 2,
    "swiglu": "true",
    "disable_bias_linear": "true",
    "normalization": "RMSNorm",
    "seq_length": 8,
    "max_position_embeddings": 8,
    "vocab_size": 32,
}
MOE = TINY | {
    "num_experts": 4,
    "moe_layer_freq": "([0]*1+[1]*1)",
    "moe_ffn_hidden_size": 4,
    "moe_grouped_gemm": "true",
    "moe_shared_expert_intermediate_size": 6,
    "moe_router_load_balancing_type": "none",
}
LATENT_ATTENTION = {
    "multi_latent_attention": "true",
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 3,
}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
TP2 = {"tensor_model_parallel_size": 2}
BLOCKWISE = {"muon_tp_mode": "blockwise"}


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """The groups of a config with these flags, over so many ranks."""

    def groups(flags: dict[str, Any], world_size: int) -> list[Layout]:
        cpu.install(force=True)
        from megatron_muon.tools.plan.planned_model import read_model

        path = tmp_path / "run.yaml"
        text = "MODEL_ARGS:\n"
        for name, value in flags.items():
            text += f"  --{name.replace('_', '-')}: {value}\n"
        path.write_text(text, "utf-8")
        return [group.layout for group in read_model(path, world_size)[1]]

    return groups


def matrix_of(layout: Layout, name: str) -> Matrix:
    return next(matrix for matrix in layout.matrices if matrix.name.endswith(name))


def rows(layout: Layout, name: str) -> list[tuple[int, int, int]]:
    """`(rank, first row, rows)` of each shard."""
    shards = matrix_of(layout, name).shards
    return [(shard.rank, shard.row_start, shard.rows) for shard in shards]


def shapes(layout: Layout) -> dict[str, tuple[int, int]]:
    return {matrix.name: matrix.shape for matrix in layout.matrices}


def splits(layout: Layout) -> list[RowSplit]:
    return [matrix.split for matrix in layout.matrices]


def blocks(layout: Layout, name: str) -> RowSplit:
    return matrix_of(layout, name).split


def test_a_dense_layer_is_cut_as_by_hand(planned: Any) -> None:
    """A layer on 2 ranks: fc2 first for its long rows, then by module order, vectors last.

    fc2 8 x 16 at 0, proj 8 x 8 at 128, qkv 16 x 8 at 192, fc1 32 x 8 at 320, two norms of 8 at 576:
    592 elements, padded to 2 x 16: 592 = 18.5 x 32, so 19 x 32 = 608 and a piece is 304.
    """
    (dense,) = planned(TINY, 2)
    assert len(dense.matrices) == 8
    assert rows(dense, "layers.0.mlp.linear_fc2.weight") == [(0, 0, 8)]
    assert rows(dense, "layers.0.self_attention.linear_proj.weight") == [(0, 0, 8)]
    assert rows(dense, "layers.0.self_attention.linear_qkv.weight") == [(0, 0, 14), (1, 14, 2)]
    assert rows(dense, "layers.0.mlp.linear_fc1.weight") == [(1, 0, 32)]
    assert rows(dense, "layers.1.mlp.linear_fc1.weight") == [(1, 0, 32)]
    assert blocks(dense, "layers.0.self_attention.linear_qkv.weight") == RowSplit(2, (4, 2, 2))
    assert matrix_of(dense, "layers.0.self_attention.linear_qkv.weight").blocks == [
        (8, 8),
        (4, 8),
        (4, 8),
    ]


def test_experts_are_cut_as_by_hand(planned: Any) -> None:
    """4 experts, EP 2, 4 ranks: two experts over two ranks; fc1 8 x 8 twice, then fc2 8 x 4 twice:
    192, a piece 96.
    """
    dense, experts = planned(MOE | EP2 | {"muon_split_gated_mlp": "true"}, 4)
    assert (dense.world_size, experts.world_size) == (4, 2)
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
    assert blocks(dense, "layers.0.mlp.linear_fc1.weight") == RowSplit(1, (16, 16))
    assert blocks(dense, "shared_experts.linear_fc1.weight") == RowSplit(1, (6, 6))
    assert blocks(experts, "linear_fc1.weight1") == RowSplit(1, (4, 4))


def test_excluded_matrices_still_take_room_in_their_bucket(planned: Any) -> None:
    (everything,) = planned(TINY, 2)
    (dense,) = planned(TINY | {"muon_exclude": "linear_fc2"}, 2)
    left = [matrix for matrix in everything.matrices if "linear_fc2" not in matrix.name]
    assert dense.matrices == tuple(left)
    with pytest.raises(UserError, match="--muon-exclude ruoter matches none of Muon's 8 matrices"):
        planned(TINY | {"muon_exclude": "ruoter"}, 2)


def test_a_checkpoint_that_is_elsewhere_is_noted(
    planned: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could have been megatron-core's own Muon's, which takes other matrices."""
    (everything,) = planned(TINY, 2)
    assert "note" not in capsys.readouterr().out
    assert planned(TINY | {"load": "elsewhere"}, 2) == [everything]
    assert "--load elsewhere has no checkpoint here" in capsys.readouterr().out
    planned(TINY | {"load": "elsewhere", "muon_matrices": "ours"}, 2)
    assert "note" not in capsys.readouterr().out


def test_latent_attention_and_predicted_tokens_are_listed(planned: Any) -> None:
    flags = {name: value for name, value in MOE.items() if "quer" not in name}
    latent = LATENT_ATTENTION | {"position_embedding_type": "rope", "mtp_num_layers": 1}
    (dense,) = planned(flags | latent, 2)  # experts of no groups of their own are dense
    attention = "decoder.layers.0.self_attention."
    assert blocks(dense, f"{attention}linear_kv_down_proj.weight") == RowSplit(1, (5, 2))
    assert blocks(dense, f"{attention}linear_kv_up_proj.weight") == RowSplit(4, (4, 3))
    found = shapes(dense)
    assert found[f"{attention}linear_q_up_proj.weight"] == (24, 6)
    assert found["mtp.layers.0.eh_proj.weight"] == (8, 16)
    assert "mtp.layers.0.mtp_model_layer.self_attention.linear_kv_up_proj.weight" in found
    assert found["decoder.layers.1.mlp.experts.linear_fc2.weight3"] == (8, 4)


SHAPES = st.tuples(
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
)


@settings(max_examples=60)
@given(
    st.lists(SHAPES, min_size=1, max_size=8),
    st.integers(1, 5),
)
def test_cuts_are_megatrons(sizes: list[tuple[int, int]], world_size: int) -> None:
    """Each rank's part of every parameter, also where rows of several lengths share a bucket."""
    cpu.install(force=True)
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    from megatron_muon.tools.plan.planned_cuts import PieceHolders, bucket_shards
    from megatron_muon.tools.plan.planned_model import in_buckets

    model = torch.nn.Module()
    for index, shape in enumerate(sizes):
        model.register_parameter(
            f"w{index}",
            torch.nn.Parameter(torch.empty(shape, device="meta")),
        )
    ddp_config = SimpleNamespace(data_parallel_sharding_strategy="optim")
    groups = SimpleNamespace(intra_dp_cp=SimpleNamespace(size=lambda: world_size))
    holders = PieceHolders(np.arange(world_size).reshape(1, world_size, 1))
    starts = in_buckets(model, groups, ddp_config, None)
    shards = {
        p: bucket_shards(*starts[p], tuple(p.shape), tuple(p.shape), holders)
        for p in model.parameters()
    }
    policy = buffers.BucketingPolicy(None, [], "optim")
    (bucket,) = buffers._get_parameter_groups(model, policy, {})[0]
    for rank in range(world_size):
        buffer = object.__new__(buffers.DataParallelBuffer)
        buffer.item_index_map, _, buffer.shard_bucket_index = (
            buffers.build_data_parallel_buffer_index(
                [parameter.shape for parameter in bucket.params],
                rank,
                world_size,
                True,
                ddp_config,
                chunk_size_factor=bucket.chunk_size_factor,
            )
        )
        for item, parameter in enumerate(bucket.params):
            start, end = buffer._get_item_slice_in_shard(item)
            held = next((shard for shard in shards[parameter] if shard.rank == rank), None)
            if start % parameter.shape[1] or end % parameter.shape[1]:
                # a matrix smaller than a chunk that was cut within a row: Megatron-FSDP cannot
                # shard it
                continue
            assert (held.numel if held else 0) == end - start
            assert not held or held.row_start * parameter.shape[1] == start
