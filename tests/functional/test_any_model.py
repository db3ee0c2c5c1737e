"""`megatron_muon.Muon` on a model that is not Megatron's: every framework gives the weights of one
process.

Every rank has the same batch, so averaged gradients are those of one process up to the rounding of
their average: weights agree to 1e-6. In one framework nothing depends on timing: two runs agree to
the last bit.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_muon
from tests.support import frameworks
from tests.support.pool import Pool
from tests.support.wide import wide_but

STEPS = 5
ATOL = 1e-6

FRAMEWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp, shared": ("ddp", {"share_replicated": True}),
    "fsdp2": ("fsdp2", {}),
    "fsdp2, kept": ("fsdp2", {"options": {"reshard_after_forward": False}}),
    "fsdp2, all-gather": ("fsdp2", {"exchange": "allgather"}),
    "megatron-fsdp, optim": ("megatron_fsdp", {"strategy": "optim"}),
    "megatron-fsdp, optim_grads": ("megatron_fsdp", {"strategy": "optim_grads"}),
    "megatron-fsdp": ("megatron_fsdp", {}),
    "megatron-fsdp, no_shard": ("megatron_fsdp", {"strategy": "no_shard"}),
    "megatron-fsdp, package": ("megatron_fsdp", {"package": "megatron_fsdp"}),
}
HYPERBALL = {"hyperball": True, "weight_decay": 0.0, "adamw_weight_decay": 0.1}
ON_FOUR = {
    "tensor parallel": ("fsdp2_tp", {}),
    "tensor parallel, normuon": ("fsdp2_tp", {"moment2_method": "normuon"}),
    "tensor parallel, hyperball": ("fsdp2_tp", HYPERBALL),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"split": {"layers.*.0.weight": (19, 19)}},
    "normuon": {"moment2_method": "normuon"},
    "cautious": {"cautious_weight_decay": True, "weight_decay": 1.0},
    "hyperball": HYPERBALL,
    "int8 momentum": {"momentum_dtype": "int8"},
    "host": {"offload": "cpu"},
    "disk": {"offload": "nvme", "offload_dir": "{folder}"},
}


def weights(
    rank: int,
    world_size: int,
    *,
    kind: str,
    options: dict[str, Any],
    steps: int = STEPS,
) -> Any:
    """In a worker: the weights after training from the same start."""
    torch.manual_seed(0)
    training = getattr(frameworks, kind)(**options)
    start = training.weights()
    for batch in frameworks.tokens(steps):
        training.step(batch)
    after = training.weights()
    return (start, after) if rank == 0 else None


def assert_close(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    atol: float = ATOL,
) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=0.0, atol=atol), name


@pytest.mark.parametrize(
    ("framework", "world_size"),
    wide_but(
        [(name, 3) for name in ("ddp, shared", "fsdp2", "megatron-fsdp")],
        itertools.product(FRAMEWORKS, (2, 3, 4)),
    ),
)
def test_every_framework_trains_as_one_process(
    ranks: Pool, framework: str, world_size: int
) -> None:
    """The wrapper of Megatron-FSDP takes a step of its own before training, which moves nothing."""
    kind, options = FRAMEWORKS[framework]
    start, expected = ranks(1, weights, kind="plain", options={})[0]
    found_start, found = ranks(world_size, weights, kind=kind, options=options)[0]
    assert_close(found_start, start, atol=0.0)
    assert_close(found, expected)
    assert all(not torch.equal(found[name], start[name]) for name in start)  # all of it trains
    again = ranks(world_size, weights, kind=kind, options=options)[0][1]
    assert all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.parametrize("layout", wide_but(["tensor parallel"], ON_FOUR))
def test_tensor_parallelism_beside_fsdp2(ranks: Pool, layout: str) -> None:
    kind, options = ON_FOUR[layout]
    _, expected = ranks(1, weights, kind="plain", options=options)[0]
    assert_close(ranks(4, weights, kind=kind, options=options)[0][1], expected)


@pytest.mark.parametrize("settings", wide_but(["normuon", "int8 momentum", "disk"], SETTINGS))
def test_every_setting_means_the_same_under_fsdp2(
    ranks: Pool, settings: str, tmp_path: Path
) -> None:
    """Rounding of momentum depends on the element's place in the whole matrix, never on who holds
    it.

    Averages over four ranks round nothing; those over three would now and then round momentum to
    another value.
    """
    options = {
        name: value.format(folder=tmp_path) if isinstance(value, str) else value
        for name, value in SETTINGS[settings].items()
    }
    _, expected = ranks(1, weights, kind="plain", options=options)[0]
    assert_close(ranks(4, weights, kind="fsdp2", options=options)[0][1], expected)


def test_bf16_parameters_and_policies(ranks: Pool) -> None:
    """Under a bf16 policy of FSDP2 losses are those of fp32 to bf16's rounding; the weights stay
    fp32.
    """
    losses = {
        policy: ranks(2, losses_under, policy=policy)[0]
        for policy in ("none", "bf16 policy", "bf16 parameters")
    }
    for policy in ("bf16 policy", "bf16 parameters"):
        assert losses[policy] == pytest.approx(losses["none"], rel=0.02)
        assert losses[policy] != losses["none"]


def losses_under(rank: int, world_size: int, *, policy: str) -> list[float]:
    """In a worker: losses of training with `MixedPrecisionPolicy`, or with parameters in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    torch.manual_seed(0)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    training = frameworks.fsdp2(
        options={"mp_policy": mixed} if policy == "bf16 policy" else {},
        dtype=torch.bfloat16 if policy == "bf16 parameters" else torch.float32,
    )
    losses = [training.step(batch) for batch in frameworks.tokens(8)]
    momentum = [
        state["momentum_buffer"]
        for state in training.optimizer.state.values()
        if "momentum_buffer" in state
    ]
    assert {each.dtype for each in momentum} == {torch.float32}
    return losses


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp2": (3, "fsdp2", {}),
    "ddp": (2, "ddp", {}),
    "library, 2": (2, "megatron_fsdp", {}),
    "library, 3": (3, "megatron_fsdp", {}),
}


def resumed(
    rank: int,
    world_size: int,
    *,
    kind: str,
    options: dict[str, Any],
    folder: str,
    steps: tuple[int, int],
) -> Any:
    """In a worker: load what is in `folder`, if anything, train from one step to another, save; the
    weights.

    Hooks of Megatron-FSDP as a library make its state dicts, functions of torch the others.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.manual_seed(steps[0])  # what is not loaded would differ
    training = getattr(frameworks, kind)(**options)
    model, optimizer = (
        (training.model.module if kind == "ddp" else training.model),
        training.optimizer,
    )

    def state() -> dict[str, Any]:
        is_library = kind == "megatron_fsdp"
        found = (
            (model.state_dict(), optimizer.state_dict())
            if is_library
            else get_state_dict(model, optimizer)
        )
        return dict(zip(("model", "optimizer"), found, strict=True))

    if steps[0]:
        dcp.load(loaded := state(), checkpoint_id=f"{folder}/{steps[0]}")
        if kind == "megatron_fsdp":
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        else:
            weights, slots = loaded["model"], loaded["optimizer"]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=slots)
    for batch in frameworks.tokens(steps[1])[steps[0] :]:
        training.step(batch)
    dcp.save(state(), checkpoint_id=f"{folder}/{steps[1]}")
    after = training.weights()
    return after if rank == 0 else None


@pytest.mark.parametrize(
    ("settings", "chain"),
    wide_but(
        [
            ("plain", ("ddp", "fsdp2", "ddp")),
        ],
        [
            ("plain", ("ddp", "fsdp2", "ddp")),
            *(
                (settings, ("library, 3", "library, 2"))
                for settings in ("plain", "host", "normuon")
            ),
        ],
    ),
)
def test_checkpoints_go_on_in_any_layout(
    ranks: Pool, settings: str, chain: tuple[str, ...], tmp_path: Path
) -> None:
    """Two steps in each layout of the chain are the steps of one process, uninterrupted; those of
    DTensors are in test_every_matrix.py.
    """
    given = SETTINGS[settings]
    _, expected = ranks(
        1,
        weights,
        kind="plain",
        options=given,
        steps=2 * len(chain),
    )[0]
    for number, layout in enumerate(chain):
        size, kind, options = LAYOUTS[layout]
        steps = (2 * number, 2 * number + 2)
        found = ranks(
            size,
            resumed,
            kind=kind,
            options={**options, **given},
            folder=str(tmp_path),
            steps=steps,
        )[0]
        assert found.keys() == expected.keys()
    assert_close(found, expected, atol=2e-6)


def partial_gradients(rank: int, world_size: int) -> Any:
    """In a worker: a step of tensor parallelism alone, whose replicated weights get gradients that
    are partial sums.
    """
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (world_size,))
    start = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    alone = [nn.Parameter(start.clone()), nn.Parameter(start[0].clone())]
    sharded = []
    for p in alone:
        whole = DTensor.from_local(p.detach().clone(), mesh, [Replicate()])
        sharded.append(nn.Parameter(whole))
        parts = torch.randn(world_size, *p.shape, generator=torch.Generator().manual_seed(2))
        p.grad = parts.sum(dim=0)
        sharded[-1].grad = DTensor.from_local(parts[rank], mesh, [Partial()])
    for parameters in (sharded, alone):
        megatron_muon.Muon(zip("wv", parameters, strict=True), **frameworks.SETTINGS).step()
    differences = []
    for p, other in zip(sharded, alone, strict=True):
        difference = p.to_local() - other
        differences.append(float(difference.abs().max().detach()))
    return differences


def test_gradients_that_are_partial_sums_are_added_up(ranks: Pool) -> None:
    assert all(difference < 1e-6 for found in ranks(2, partial_gradients) for difference in found)


WITHOUT_MEGATRON = """
import sys
for name in ("megatron", "megatron.core", "einops", "tensorboard"):
    sys.modules[name] = None  # as if it were not installed
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import megatron_muon
from megatron_muon.cli import main
from tests.support import frameworks
import torch
torch.manual_seed(0)
training = frameworks.fsdp2()
(batch,) = frameworks.tokens(1)
losses = [training.step(batch) for _ in range(5)]
assert losses[-1] < losses[0]
try:
    import megatron_muon
    megatron_muon.get_megatron_muon_optimizer
except ImportError as error:
    print(error)
"""


def test_fsdp2_needs_no_megatron(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_MEGATRON, "utf-8")
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=root,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "pip install '.[megatron]' in the checkout" in run.stdout
