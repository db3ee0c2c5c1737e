"""`megatron_muon.Muon` where ranks differ: gradients, settings, or a disk that fails on one of
them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support import frameworks
from tests.support.pool import Pool
from tests.support.wide import wide_but

VICTIM = "layers.0.0.weight"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "owner": ("fsdp2", {}),
    "all-gather": ("fsdp2", {"exchange": "allgather"}),
    "normuon": ("fsdp2", {"moment2_method": "normuon"}),
    "hyperball": ("fsdp2", {"hyperball": True, "weight_decay": 0.0}),
    "int8": ("fsdp2", {"momentum_dtype": "int8"}),
    "shared": ("ddp", {"share_replicated": True}),
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def one_rank_without(
    rank: int,
    world_size: int,
    *,
    kind: str,
    options: dict[str, Any],
    fault: str,
) -> Any:
    """In a worker: which weights and momenta a step leaves alone whose gradient one rank lacks, or
    has as NaN.
    """
    torch.manual_seed(0)
    training = getattr(frameworks, kind)(**options)
    optimizer = training.optimizer
    chosen = optimizer.selection.choices.items()
    names = {p: choice.name.replace("module.", "") for p, choice in chosen}
    first, second = frameworks.tokens(2)
    training.step(first)
    optimizer.zero_grad()
    training.model(second).backward()
    if rank == world_size - 1:
        victim = next(p for p, name in names.items() if name == VICTIM)
        if fault == "none":
            victim.grad = None
        else:
            local(victim.grad).view(-1)[-1] = torch.nan
    before = training.weights()
    momenta = {p: local(m).clone() for p, m in optimizer.momentum_state().items()}
    optimizer.step()
    after = training.weights()
    now = optimizer.momentum_state()
    still = [name for name in before if torch.equal(before[name], after[name])]
    resting = []
    for p, momentum in momenta.items():
        if momentum.numel() and torch.equal(momentum, local(now[p])):
            resting.append(names[p])
    skipped = [name.replace("module.", "") for name in optimizer.skipped_updates()]
    training.step(first)
    is_finite = all(value.isfinite().all() for value in training.weights().values())
    return still, resting, skipped, is_finite


@pytest.mark.parametrize("fault", ["none", "nan"])
@pytest.mark.parametrize("case", wide_but(["owner", "shared"], CASES))
def test_a_gradient_that_one_rank_lacks_leaves_weights_and_momentum_on_all_ranks(
    ranks: Pool, case: str, fault: str
) -> None:
    """Story: the update was skipped, but the other ranks' momentum advanced; with shared work so
    did their weights.
    """
    kind, options = CASES[case]
    found = ranks(2, one_rank_without, kind=kind, options=options, fault=fault)
    assert found == [([VICTIM], [VICTIM], [VICTIM], True)] * 2


def lost_on_one_rank(
    rank: int,
    world_size: int,
    *,
    folder: str,
    reader: str,
) -> tuple[str, bool]:
    """In a worker: what a step, or a checkpoint, says on every rank once the last rank lost what it
    reads ahead.
    """
    from megatron_muon.errors import OffloadError

    torch.manual_seed(0)
    training = frameworks.fsdp2(offload="nvme", offload_dir=folder)
    first, second = frameworks.tokens(2)
    training.step(first)
    training.optimizer.zero_grad()
    training.model(second).backward()
    before = training.weights()
    if rank == world_size - 1:
        store = training.optimizer.stores[0]
        store.read(0)  # what was read ahead is dropped
        os.ftruncate(store.disk.file._file.fileno(), 0)
        store._read_ahead()
    with pytest.raises(OffloadError) as caught:
        getattr(training.optimizer, reader)()
    after = training.weights()
    training.optimizer.close()
    return str(caught.value), all(
        torch.equal(
            before[name],
            after[name],
        )
        for name in before
    )


@pytest.mark.parametrize("reader", ["step", "state_dict"])
def test_momentum_lost_on_one_rank_is_an_error_on_all(
    ranks: Pool, reader: str, tmp_path: Path
) -> None:
    answers = ranks(2, lost_on_one_rank, folder=str(tmp_path), reader=reader)
    assert answers[0] == answers[1]
    said, unmoved = answers[0]
    assert said.startswith("rank 1 cannot read momentum in ")
    assert unmoved
    assert list(tmp_path.iterdir()) == []


def changed_dtype(
    rank: int,
    world_size: int,
    *,
    folder: str,
    dtypes: tuple[str, str],
) -> tuple[bool, int]:
    """In a worker: whether momentum saved as one dtype is loaded as another, by torch; steps
    counted after one more.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    before, after = (frameworks.fsdp2(momentum_dtype=dtype) for dtype in dtypes)
    first, second, third = frameworks.tokens(3)
    for batch in (first, second):
        before.step(batch)
    weights, state = get_state_dict(before.model, before.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    weights, state = get_state_dict(after.model, after.optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(after.model, after.optimizer, model_state_dict=weights, optim_state_dict=state)
    pairs = zip(
        before.optimizer.momentum_state().values(),
        after.optimizer.momentum_state().values(),
        strict=True,
    )
    close = all(
        torch.allclose(
            local(one),
            local(other),
            rtol=0.03,
            atol=0.03,
        )
        for one, other in pairs
    )
    after.step(third)
    return close, after.optimizer.param_groups[0]["rounding_steps"]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    wide_but(
        [("fp32", "int8")],
        [("fp32", "int8"), ("fp32", "bf16"), ("int8", "fp32")],
    ),
)
def test_a_checkpoint_loads_into_another_momentum_dtype(
    ranks: Pool, saved: str, loaded: str, tmp_path: Path
) -> None:
    """Story: from fp32, torch's distributed checkpoints lacked the count of steps that rounding
    depends on.
    """
    found = ranks(2, changed_dtype, folder=str(tmp_path), dtypes=(saved, loaded))
    assert found == [(True, 3)] * 2
