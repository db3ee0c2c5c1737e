"""Optimizers of emerging-optimizers on shards: each equals the same class on whole matrices, on
every layout, and its state follows the matrices through checkpoints.

Gradients have full rank: where directions have no gradient SOAP normalises rounding to size 1, and
two correct runs part.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from emerging_optimizers import registry
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_muon import Sharded
from megatron_muon.errors import UserError
from megatron_muon.megatron.plan_figures import state_bytes
from tests.support.pool import Pool
from tests.support.reference import REGISTERED
from tests.support.wide import wide_but

STEPS = 10
LR = 0.05
DECAY = 0.1
OF_MOVEMENT = 1e-5
"""Largest difference from the class on whole matrices, as a part of the largest movement."""

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "soap": ("soap", {}),
    "kl-soap": ("soap", {"use_kl_shampoo": True}),
    "rekls": ("rekls", {}),
    "polargrad": ("polargrad", {"nesterov": True}),
    "mop": ("mop", {}),
    "psgd_pro": ("psgd_pro", {"momentum": 0.8}),
    "lion": ("lion", {}),
}

SHAPES = {"tall": (13, 6), "wide": (5, 12), "qkv": (12, 7), "experts": (4, 6, 10), "square": (9, 9)}
SPLIT = {"qkv": (6, 3, 3)}


def values(name: str, step: int) -> Tensor:
    """Normal numbers of the name and the step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(SHAPES[name], generator=generator)


def blocks_of(name: str, matrix: Tensor) -> list[tuple[str, Tensor]]:
    """Views of the blocks of a parameter, with their names in seeds."""
    if name == "experts":
        return [(f"experts[{number}]/0", block) for number, block in enumerate(matrix)]
    parts = matrix.split(SPLIT.get(name, len(matrix)))
    return [(f"{name}/{number}", block) for number, block in enumerate(parts)]


def by_hand(label: str, steps: int) -> dict[str, Tensor]:
    """Weights after steps of the class on whole matrices in one process, without this package."""
    kind, arguments = CLASSES[label]
    assert REGISTERED
    make = registry.get_optimizer_cls(kind)
    found = {}
    for name in SHAPES:
        weight = values(name, -1)
        for key, block in blocks_of(name, weight):
            parameter = nn.Parameter(block.clone())
            optimizer = make(
                [parameter],
                lr=LR,
                weight_decay=DECAY,
                weight_decay_method="decoupled",
                **arguments,
            )
            for step in range(steps):
                gradients = dict(blocks_of(name, values(name, step)))
                parameter.grad = gradients[key].clone()
                torch.manual_seed(zlib.crc32(f"{key}/{step}".encode()))
                with torch.compiler.set_stance("force_eager"):
                    optimizer.step()
            block.copy_(parameter.detach())
        found[name] = weight
    return found


class Training:
    """Weights on a mesh, or plain ones, with a class for all of them."""

    def __init__(self, mesh_shape: tuple[int, ...], label: str, **settings: Any) -> None:
        self.mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
        self.is_tp = settings.pop("is_tp", False)
        self.model = nn.Module()
        for name in SHAPES:
            self.model.register_parameter(name, nn.Parameter(self.placed(values(name, -1))))
        kind, arguments = CLASSES[label]
        self.optimizer = Sharded(
            kind,
            self.model.named_parameters(),
            lr=LR,
            weight_decay=DECAY,
            matrices=["*"],
            split=SPLIT,
            **arguments,
            **settings,
        )

    def placed(self, tensor: Tensor) -> Tensor:
        if self.mesh is None:
            return tensor
        placements: list[Any] = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        if self.is_tp:
            placements = [Shard(0), Shard(tensor.ndim - 1)]
        return distribute_tensor(tensor, self.mesh, placements)

    def train(self, steps: range) -> dict[str, Tensor]:
        for step in steps:
            for name, p in self.model.named_parameters():
                p.grad = self.placed(values(name, step))
            self.optimizer.step()
        found = {}
        for name, p in self.model.named_parameters():
            weight = p.detach()
            found[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
        return found


def trained(
    rank: int,
    world_size: int,
    *,
    mesh: tuple[int, ...],
    labels: Sequence[str] = tuple(CLASSES),
    **settings: Any,
) -> dict[str, dict[str, Tensor]]:
    """In a worker: weights after the steps, by class."""
    found = {}
    for label in labels:
        found[label] = Training(mesh, label, **settings).train(range(STEPS))
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], label: str) -> None:
    for name in SHAPES:
        moved = (expected[name] - values(name, -1)).abs().max()
        apart = (found[name] - expected[name]).abs().max()
        assert moved > 0.01
        assert apart <= OF_MOVEMENT * moved, f"{label}, {name}: {apart} of {moved}"


LAYOUTS: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "fsdp2 on 1": (1, (1,), {}),
    "fsdp2 on 2": (2, (2,), {}),
    "fsdp2 on 3, waves": (3, (3,), {"exchange_buffer_mb": 0.015}),
    "fsdp2 on 4": (4, (4,), {}),
    "hsdp": (4, (2, 2), {}),
    "tp": (4, (2, 2), {"is_tp": True}),
    "ddp": (2, (), {}),
    "allgather": (2, (2,), {"exchange": "allgather"}),
    "host": (2, (2,), {"offload": "cpu"}),
}


@pytest.mark.parametrize("layout", wide_but(["tp"], LAYOUTS))
def test_ten_steps_equal_the_class_on_whole_matrices(ranks: Pool, layout: str) -> None:
    """Also with the same bits on each layout, as blocks are the same."""
    size, mesh, settings = LAYOUTS[layout]
    seen = ranks(size, trained, mesh=mesh, **settings)
    alone = ranks(1, trained, mesh=())[0]
    for label in CLASSES:
        assert_equal(seen[0][label], by_hand(label, STEPS), f"{layout}, {label}")
        for name in SHAPES:
            assert torch.equal(seen[0][label][name], alone[label][name]), (label, name)


def test_the_comparison_can_fail(ranks: Pool) -> None:
    """Negative controls: KL-SOAP is not SOAP, and nine steps are not ten."""
    seen = ranks(2, trained, mesh=(2,), labels=["soap", "mop"])[0]
    for label, other, steps in (("soap", "kl-soap", STEPS), ("mop", "mop", STEPS - 1)):
        with pytest.raises(AssertionError):
            assert_equal(seen[label], by_hand(other, steps), label)


# ----------------------------------------------------------------------------------------------
# state in checkpoints


def saves(rank: int, world_size: int, *, mesh: tuple[int, ...], folder: str) -> Any:
    """In a worker: weights of some classes at the end, with a checkpoint on the way."""
    found = {}
    for label in ("soap", "psgd_pro", "mop"):
        training = Training(mesh, label)
        weights = training.train(range(4))
        state = get_optimizer_state_dict(training.model, training.optimizer)
        dcp.save({"state": state, "weights": weights}, checkpoint_id=f"{folder}/{label}")
        found[label] = training.train(range(4, 7))
    return found


def loads(
    rank: int, world_size: int, *, mesh: tuple[int, ...], folder: str, **settings: Any
) -> Any:
    """In a worker: the same weights, from the checkpoint on."""
    found = {}
    for label in ("soap", "psgd_pro", "mop"):
        training = Training(mesh, label, **settings)
        weights = {name: values(name, -1) for name in SHAPES}
        state = {
            "state": get_optimizer_state_dict(training.model, training.optimizer),
            "weights": weights,
        }
        dcp.load(state, checkpoint_id=f"{folder}/{label}")
        for name, p in training.model.named_parameters():
            p.detach().copy_(training.placed(weights[name]))
        set_optimizer_state_dict(training.model, training.optimizer, state["state"])
        found[label] = training.train(range(4, 7))
    return found


@pytest.mark.parametrize("mesh", wide_but([[2, 2]], [[1], [2], [3], [2, 2]]))
def test_a_resumed_run_has_the_same_bits_on_other_ranks(
    ranks: Pool, tmp_path: Path, mesh: list[int]
) -> None:
    """Eigenvectors and counts are restored, not computed again."""
    expected = ranks(2, saves, mesh=(2,), folder=str(tmp_path))[0]
    size = torch.Size(mesh).numel()
    found = ranks(size, loads, mesh=tuple(mesh), folder=str(tmp_path))[0]
    for label, weights in expected.items():
        for name in SHAPES:
            assert torch.equal(found[label][name], weights[name]), (label, name)


def kept(rank: int, world_size: int) -> Any:
    """In a worker: bytes of state that the rank keeps, and that the plan counts for it."""
    found = []
    for label in CLASSES:
        training = Training((world_size,), label)
        training.train(range(2))
        (part,) = training.optimizer.parts
        found.append((part.method_state.nbytes, int(state_bytes(part.waves.plan)[rank])))
    return found


def test_the_plan_counts_the_bytes_of_state(ranks: Pool) -> None:
    found = ranks(2, kept)
    for of_rank in found:
        for bytes_kept, planned in of_rank:
            assert bytes_kept == planned
    assert all(any(bytes_kept for bytes_kept, _ in each) for each in zip(*found, strict=True))


def skips(rank: int, world_size: int) -> Any:
    """In a worker: whether matrices without a finite gradient, or without one, kept their state."""
    found = []
    for is_missing in (False, True):
        training = Training((world_size,), "soap")
        before = training.train(range(3))
        held = whole_state(training)
        for name, p in training.model.named_parameters():
            gradient = values(name, 3)
            if name == "wide":
                gradient[0, 0] = torch.nan
            p.grad = None if name == "wide" and is_missing else training.placed(gradient)
        training.optimizer.step()
        after = training.train(range(0))
        now = whole_state(training)
        found.append(
            (
                {name for name in SHAPES if torch.equal(before[name], after[name])},
                {name for name in SHAPES if all(map(torch.equal, held[name], now[name]))},
            )
        )
    return found


def whole_state(training: Training) -> dict[str, list[Tensor]]:
    """The state of each parameter as a checkpoint has it."""
    state = training.optimizer.state_dict()["state"]
    return {
        name: [slot.full_tensor() for slot in state[number].values()]
        for number, name in enumerate(SHAPES)
    }


def test_a_matrix_without_a_finite_gradient_keeps_its_state(ranks: Pool) -> None:
    for found in ranks(2, skips):
        assert found == [({"wide"}, {"wide"})] * 2


def refused(rank: int, world_size: int, *, kind: str, settings: dict[str, Any]) -> str:
    """In a worker: the error of a class that cannot be used."""
    model = nn.Linear(4, 3)
    with pytest.raises(UserError) as caught:
        Sharded(kind, model.named_parameters(), matrices=["weight"], **settings)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("scion", {}, "optimizer scion reads weights"),
        ("oblique_sgd", {}, "optimizer oblique_sgd reads weights"),
        ("muon", {}, "is implemented by this package"),
        ("nothing", {}, "is not an optimizer of emerging-optimizers"),
        ("soap", {"ns_steps": 3}, "ns_steps"),
        ("soap", {"offload": "nvme"}, "offload nvme"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(
    ranks: Pool, kind: str, settings: dict[str, Any], words: str
) -> None:
    for error in ranks(2, refused, kind=kind, settings=settings):
        assert words in error
