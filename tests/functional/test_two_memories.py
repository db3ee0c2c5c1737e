"""Where a GPU's memory is not the host's: a run with offloaded state, and what others or we once
got wrong there.

Tests of offload, QK-clip and metrics run with `-m ''` once more in this way (the fixtures
`two_memories_too` and `every_way`). Here is a case of each for every run, and with `-m ''` saving
and resuming in every layout and framework.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_muon.tools.train.records import read_events
from tests.functional.test_any_model import FRAMEWORKS, assert_close, resumed, weights
from tests.functional.test_checkpoint_layouts import HSDP
from tests.functional.test_checkpoints import (
    DIVISIBLE,
    FULL,
    SWIGLU,
    differences,
    saved,
    strategy,
    warnings,
)
from tests.functional.test_offload import BUFFER_MB
from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.two_memories import PlaceError
from tests.support.wide import wide_but

ALL_STATE = ("--muon-offload-state", "all")
TP = ("--tensor-model-parallel-size", "2", *DIVISIBLE, "--make-vocab-size-divisible-by", "132")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "optim_grads_params": (2, (*SWIGLU, *ALL_STATE)),
    "optim": (2, (*strategy("optim"), *SWIGLU, *ALL_STATE)),  # weights are whole
    "no_shard": (2, (*strategy("no_shard"), *SWIGLU, "--muon-share-replicated", "--qk-clip")),
    "HSDP 2 x TP 2": (4, (*HSDP, *TP, *SWIGLU, *ALL_STATE)),  # views of views
}


@pytest.mark.parametrize("layout", wide_but(["optim_grads_params"], LAYOUTS))
def test_a_run_with_its_state_off_the_gpu_is_saved_and_resumed(
    ranks: Pool, tmp_path: Path, layout: str
) -> None:
    """Half of the state on disk, saved; loaded into host memory, trained on and saved again;
    metrics are measured.
    """
    size, of_layout = LAYOUTS[layout]
    steps = cli.words("--train-iters 4 --save-interval 2 --eval-interval 3 --eval-iters 1 --bf16")
    more = cli.words("--muon-metrics-interval 1 --tensorboard-dir events")
    flags = (
        *cli.TINY,
        *cli.make_corpus(tmp_path),
        *FULL,
        *steps,
        *more,
        *of_layout,
    )
    training = Trainings(ranks, tmp_path, flags, batch=4)
    (tmp_path / "state").mkdir()
    disk = (
        *cli.words("--muon-offload nvme --muon-offload-dir state --muon-offload-buffer-mb"),
        str(BUFFER_MB),
    )
    with ranks.two_memories():
        training(
            *disk, *cli.words("--muon-offload-fraction 0.5 --save before"), ranks=size
        ).checked()
        resumed = cli.words("--muon-offload cpu --load before --ckpt-step 2 --save after")
        assert warnings(training(*resumed, ranks=size).checked()) == []
    assert differences(saved(training, "after", 4), saved(training, "before", 4)) == []
    assert differences(saved(training, "before", 2), saved(training, "before", 4)), (
        "the comparison can fail"
    )
    assert len(read_events(tmp_path / "events").points("muon/momentum_norm")) >= 4


ANY_MODEL = {
    "fsdp2": (2, *FRAMEWORKS["fsdp2"]),
    "megatron-fsdp": (2, *FRAMEWORKS["megatron-fsdp"]),
    "hsdp": (4, "fsdp2", {"shape": (2, 2)}),
}


@pytest.mark.parametrize("framework", wide_but(["fsdp2"], ANY_MODEL))
def test_any_model_with_momentum_off_the_gpu_trains_and_goes_on(
    ranks: Pool, tmp_path: Path, framework: str
) -> None:
    """Momentum in host memory, saved; loaded onto a disk. Weights are those of one process
    without.
    """
    size, kind, options = ANY_MODEL[framework]
    _, expected = ranks(1, weights, kind="plain", options={}, steps=4)[0]
    (tmp_path / "momentum").mkdir()
    host, disk = {"offload": "cpu"}, {"offload": "nvme", "offload_dir": str(tmp_path / "momentum")}
    with ranks.two_memories():
        for offload, steps in (
            (host, (0, 2)),
            (disk, (2, 4)),
        ):
            given = {**options, **offload}
            found = ranks(
                size, resumed, kind=kind, options=given, folder=str(tmp_path), steps=steps
            )[0]
    assert_close(found, expected, atol=2e-6)


MISUSES = {
    "add": "aten.add.Tensor of (2,) on cuda:0, (2,) on cpu",
    "reduce": "c10d.allreduce_.default of (2,) on cpu",
    "numpy": "numpy() of (2,) on cuda:0",
    "view": "aten.detach.default: a DTensor made on cuda:0 has its local tensor on cpu",
}


def misuse(how: str) -> None:
    here, there = torch.ones(2), torch.ones(2, device="cuda")
    if how == "add":
        there + here
    elif how == "reduce":
        dist.all_reduce(here)
    elif how == "numpy":
        there.numpy()
    else:  # story: how weights whose memory the host had borrowed were saved
        weight = DTensor.from_local(there, init_device_mesh("cuda", (1,)), [Shard(0)])
        assert weight.device.type == "cuda"
        weight._local_tensor = here
        weight.detach()


def misuses(rank: int, world_size: int) -> dict[str, str]:
    """In a worker: the error of each misuse."""
    errors = {}
    for how in MISUSES:
        with pytest.raises(PlaceError) as raised:
            misuse(how)
        errors[how] = str(raised.value)
    return errors


def test_misuse_is_an_error(ranks: Pool) -> None:
    """Negative control. Story: no run with `--muon-offload-state all` could save or load on a GPU,
    and no test on a CPU noticed.
    """
    with ranks.two_memories():
        (found,) = ranks(1, misuses)
    assert {how: error[: len(MISUSES[how])] for how, error in found.items()} == MISUSES
