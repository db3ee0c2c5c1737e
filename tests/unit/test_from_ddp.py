"""Where parameters are in a torch_dist checkpoint, by a model's own `sharded_state_dict`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn

from megatron_muon.checkpoint.torch_dist import Part
from megatron_muon.errors import UserError
from megatron_muon.megatron.checkpoint import from_ddp

LAYERS, LAYER = 3, 1
RANKS, RANK = 2, 1
"""Tensor-parallel ranks."""

FC1 = torch.Size((LAYERS, 2 * RANKS * 4, 6))
FC2 = torch.Size((LAYERS, 6, RANKS * 4))


class Layer(nn.Module):
    """A gated MLP, an embedding and a tied output layer, with rows of shards as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=None)
        shapes = {"fc1": (8, 6), "fc2": (6, 4), "table": (5, 6)}
        for name, shape in shapes.items():
            shard = nn.Parameter(torch.zeros(3))
            shard.orig_param = torch.empty(shape)
            self.register_parameter(name, shard)
        self.output = self.table
        self.register_buffer("bias", torch.ones(7))
        self.given: dict[str, Any] = {}
        self.devices: set[str] = set()

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        self.given = metadata
        self.devices = {p.device.type for p in self.parameters()}
        assert self.output is self.table
        layer = (0, LAYER, LAYERS)

        def sharded(tensor: torch.Tensor, dim: int) -> ShardedTensor:
            name = {id(self.fc1): "fc1", id(self.fc2): "fc2"}[id(tensor)]
            place = (dim + 1, RANK, RANKS)
            return ShardedTensor.from_rank_offsets(
                f"layers.{name}", tensor, layer, place, prepend_axis_num=1
            )

        return {
            "fc1": apply_swiglu_sharded_factory(sharded(self.fc1, 0), (layer,)),
            "more": {"fc2": sharded(self.fc2, 1)},
            "table": ShardedTensor.from_rank_offsets("table", self.table, (0, RANK, RANKS)),
            "bias": ShardedTensor.from_rank_offsets("bias", self.bias),
            "fc1._extra_state": ShardedObject("extra", None, (1,), (0,)),
        }


@pytest.fixture
def located(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Part]]:
    groups = SimpleNamespace(get_data_parallel_group=lambda with_context_parallel: "replicas")
    monkeypatch.setattr(from_ddp, "parallel_state", groups)
    monkeypatch.setattr(from_ddp, "with_all_experts", lambda names, config: names)
    model, wrapper = Layer(), nn.Module()
    wrapper.module = model
    before = dict(model.named_parameters())
    found = from_ddp._locate(wrapper, {"of": "the checkpoint"})
    assert model.given == {"of": "the checkpoint", "dp_cp_group": "replicas"}
    assert model.devices == {"meta"}
    after = dict(model.named_parameters())
    assert all(after[name] is p for name, p in before.items())
    assert model.output is model.table
    return found


def test_parameters_and_buffers_are_located_by_the_shapes_of_a_tensor_parallel_rank(
    located: dict[str, list[Part]],
) -> None:
    assert located.keys() == {"fc1", "fc2", "table", "bias"}
    assert located["fc2"] == [Part("layers.fc2", FC2, (1, 0, 4), (1, 6, 4), (0, 4))]
    assert located["table"] == [Part("table", torch.Size((10, 6)), (5, 0), (5, 6), (5, 0))]
    assert located["bias"] == [Part("bias", torch.Size((7,)), (0,), (7,), (0,))]
    gate = Part("layers.fc1", FC1, (1, 4, 0), (1, 4, 6), (4, 0))
    up = Part("layers.fc1", FC1, (1, 12, 0), (1, 4, 6), (12, 0))
    assert located["fc1"] == [gate, up]


def test_a_half_has_the_rows_of_all_ranks_and_a_whole_those_of_each_rank_together(
    located: dict[str, list[Part]],
) -> None:
    """Of 16 rows: gate 4, up 4 of the first rank, then gate 4 and up 4 of this one."""

    def places(name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        parts = from_ddp._parts(name, located)
        return [(part.offsets, part.place) for part in parts]

    assert places("fc1_w") == [((1, 4, 0), (4, 0))]
    assert places("fc1_v") == [((1, 12, 0), (4, 0))]
    assert places("fc1") == [((1, 4, 0), (8, 0)), ((1, 12, 0), (12, 0))]
    assert places("fc2") == [((1, 0, 4), (0, 4))]
    assert places("bias") == [((0,), (0,))]
    assert places("fc2_w") == places("other") == places("other_v") == []


def test_a_checkpoint_before_0_17_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ended in a KeyError: such a checkpoint has common.pt."""
    monkeypatch.setattr(from_ddp, "read_object", lambda folder, name: None)
    with pytest.raises(UserError, match=r"is of a megatron-core before 0\.17, with common\.pt"):
        from_ddp.TorchDistSource(tmp_path)


@pytest.mark.parametrize(
    ("optimizer", "stored", "own", "choice"),
    [
        ("muon", {"optimizer": "muon"}, None, "upstream"),
        ("muon", {"optimizer": "adam"}, None, "ours"),
        ("muon", None, {"muon_matrices": "upstream"}, "upstream"),
        ("muon", None, {"muon_matrices": "auto"}, "ours"),
        ("muon", None, {}, "ours"),  # of Adam
        ("muon", None, None, "auto"),
        ("soap", {"optimizer": "muon"}, None, "auto"),
    ],
)
def test_auto_follows_the_run_that_wrote_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    optimizer: str,
    stored: dict[str, str] | None,
    own: dict[str, str] | None,
    choice: str,
) -> None:
    """`stored` are arguments in a torch_dist checkpoint, `own` in one of ours."""
    monkeypatch.setattr(from_ddp, "is_torch_dist", lambda folder: stored is not None)
    common = {"args": SimpleNamespace(**(stored or {}))}
    monkeypatch.setattr(from_ddp, "read_object", lambda folder, name: common)
    if own is not None:
        ours = {"args": SimpleNamespace(**own)}
        monkeypatch.setattr(from_ddp.content, "read", lambda folder, names: ours)
    flags = SimpleNamespace(
        optimizer=optimizer, muon_matrices="auto", load=str(tmp_path), ckpt_step=2
    )
    from_ddp.settle_matrices(flags)
    assert flags.muon_matrices == choice
