"""Where a GPU's memory is not the host's: a run with offloaded state, and what others or we once
got wrong there.

Tests of offload, QK-clip and metrics run with `-m ''` once more in this way (the fixtures
`two_memories_too` and `every_way`). Here is a case of each for every run, and with `-m ''` saving
and resuming in every layout and framework.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

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
from tests.support.case import Case
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

EVERYTHING = {
    "muon_offload_state": "all",
    "muon_offload_buffer_mb": BUFFER_MB,
    "muon_offload_fraction": 0.5,
}
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
    flags = (*cli.TINY, *cli.make_corpus(tmp_path), *FULL, *steps, *more, *of_layout)
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
        for offload, steps in ((host, (0, 2)), (disk, (2, 4))):
            given = {**options, **offload}
            found = ranks(
                size, resumed, kind=kind, options=given, folder=str(tmp_path), steps=steps
            )[0]
    assert_close(found, expected, atol=2e-6)


BUGS = {
    "": "",
    "a state dict takes views of weights": (
        "aten.detach.default: a DTensor made on cuda:0 has its local tensor on cpu"
    ),
    "flags are reduced where weights lie": "c10d.allreduce_.default of (0,) on cpu",
    "weights and host memory are added": "aten.add.Tensor of (2,) on cuda:0, (2,) on cpu",
}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """In a worker: what becomes of a state dict of weights, and of a look at what a checkpoint has,
    with each bug.

    The bugs are how `--muon-offload-state all` once saved and loaded.
    """
    from megatron_muon.megatron.checkpoint import loading
    from megatron_muon.megatron.main_weights import MainWeights
    from tests.support.model import Trainer
    from tests.support.two_memories import PlaceError

    set_buffers = MainWeights._set_buffers

    def set_alone(self: Any, memory: Any) -> None:
        set_buffers(self, memory)
        for item in self._items.values():
            for view in item.views:
                del view.detach

    def reduce_on_host(flags: list[bool]) -> list[bool]:
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in found.tolist()]

    def add_to_host(flags: list[bool]) -> list[bool]:
        return list(torch.ones(2, device="cuda") + torch.ones(2))

    replaced = (
        contextlib.nullcontext(),
        mock.patch.object(MainWeights, "_set_buffers", set_alone),
        mock.patch.object(loading, "of_any_rank", reduce_on_host),
        mock.patch.object(loading, "of_any_rank", add_to_host),
    )
    found = dict.fromkeys(BUGS, "")
    for bug, change in zip(BUGS, replaced, strict=True):
        trainer = Trainer(Case(bf16=True, optimizer={**EVERYTHING, "muon_offload": "cpu"}))
        trainer.step()
        try:
            with change, trainer.optimizer.main_weights_at_hand():
                loading._dropped(trainer.model.state_dict_for_save_checkpoint(), {})
        except PlaceError as error:
            found[bug] = str(error)
    return found


def test_saving_and_loading_as_they_once_were_are_refused(ranks: Pool) -> None:
    """Story: no run with `--muon-offload-state all` could save or load on a GPU, and no test on a
    CPU noticed.
    """
    with ranks.two_memories():
        found = ranks(1, refusals)[0]
    assert {bug: error[: len(BUGS[bug])] for bug, error in found.items()} == BUGS
    assert found[""] == ""
