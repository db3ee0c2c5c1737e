"""State dicts of main weights that lie in host memory, on fake CUDA tensors: torch's own rules,
without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_muon.megatron.main_weights import MainWeights
from megatron_muon.offload.codecs import CODECS
from megatron_muon.offload.store import RecordStore
from megatron_muon.shards import sharded_like

ROWS, COLS = 2, 3


@pytest.fixture
def parameter() -> Iterator[nn.Parameter]:
    """One rank's rows of two, on a GPU that is not there."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cuda", (2,))
    with FakeTensorMode():
        rows = torch.empty(ROWS, COLS, device="cuda")
        yield nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)], run_check=False))
    torch.distributed.destroy_process_group()


class Buffer:
    """The part of Megatron-FSDP's buffer of main weights that `MainWeights` uses, for one
    parameter.
    """

    def __init__(self, original: torch.Tensor) -> None:
        self.data, self.data_size, self.param_idx = (
            torch.empty(ROWS * COLS, device="cuda"),
            ROWS * COLS,
            {original: 0},
        )

    def get_item(self, item: int, *, only_shard: bool) -> torch.Tensor:
        return self.data


def main_weights(parameter: nn.Parameter) -> MainWeights:
    """The parameter's main weights, moved out of Megatron-FSDP's buffer."""
    parameter.orig_param = original = torch.empty(2 * ROWS, COLS, device="cuda")
    buffer = SimpleNamespace(
        optimizer_named_parameters=[("weight", parameter)],
        parameter_groups=[
            SimpleNamespace(main_weight_buffer=Buffer(original), model_weight_buffer=None)
        ],
        param_to_param_group={original: 0},
        dist_main_weight={"weight": parameter},
    )
    weights = MainWeights([SimpleNamespace(param_and_grad_buffer=buffer)])
    with unset_fake_temporarily():
        store = RecordStore(
            [],
            [],
            [],
            CODECS["fp32"],
            device=torch.device("cpu"),
            staging_bytes=0,
        )
    weights.keep(store, [parameter], [])
    weights.move_out()
    return weights


def test_a_state_dict_has_main_weights_that_lie_in_host_memory(parameter: nn.Parameter) -> None:
    """Story: on a GPU every run with `--muon-offload-state all --save` died in its first save."""
    module, weights = nn.Module(), main_weights(parameter)
    module.weight = parameter
    with weights.at_hand(values=False):
        assert parameter.device.type == "cuda", "a DTensor keeps the device on which it was made"
        (entry,) = module.state_dict().values()
        assert (entry.device.type, entry.shape, entry.placements) == (
            "cpu",
            (2 * ROWS, COLS),
            parameter.placements,
        )
        entry.detach()
        del parameter.detach  # as it once was
        with pytest.raises(
            RuntimeError, match=r'tensor on device "cpu" to a storage on different device "cuda'
        ):
            module.state_dict()


def test_a_state_dict_has_optimizer_state_that_lies_in_host_memory(parameter: nn.Parameter) -> None:
    entry = sharded_like(parameter, torch.empty(ROWS * COLS))
    assert entry.detach().device.type == "cpu"
    entry = parameter.detach()
    entry._local_tensor = torch.empty(ROWS, COLS)
    with pytest.raises(
        RuntimeError, match=r'tensor on device "cpu" to a storage on different device "cuda'
    ):
        entry.detach()
