"""A method with state: updates are those of whole matrices, and checkpoints load on other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_muon import Muon
from megatron_muon.core.methods.method import Method
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.errors import UserError
from megatron_muon.fsdp import options
from megatron_muon.megatron import builder
from megatron_muon.megatron.plan_figures import state_bytes
from tests.functional.test_checkpoints import (
    DIVISIBLE,
    FULL,
    SWIGLU,
    differences,
    saved,
    strategy,
    warnings,
)
from tests.support import cli
from tests.support import training as runs
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

STEPS = 3
BETA = 0.9
LR = 0.1
DECAY = 0.01
MOMENTUM = 0.95
SHAPES = {"tall": (13, 6), "wide": (5, 12), "qkv": (12, 7), "experts": (4, 6, 10)}
SPLIT = {"qkv": (6, 3, 3)}
LEFT = "left_accumulator"
COUNT = "count"


class Shampoo(Method):
    """One-sided Shampoo: (L / (1 - beta^t))^(-1/2) G, L the mean of G G^T over steps."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def cost(self, rows: int, cols: int, team: int = 1, steps: int = 0) -> int:
        return rows * cols * min(rows, cols)

    def state_shapes(self, kind: Any) -> dict[str, tuple[int, ...]]:
        return {LEFT: (kind.smaller, kind.smaller), COUNT: ()}

    def run(
        self,
        stack: Tensor,
        kind: Any,
        factors: Tensor,
        work: Any,
        *,
        state: Mapping[str, Tensor] | None = None,
        **_: Any,
    ) -> None:
        assert state is not None
        assert state[LEFT].shape == (len(stack), kind.smaller, kind.smaller)
        for number, block in enumerate(stack):
            if factors[number].isnan():
                block.fill_(torch.nan)
            else:
                precondition(block, state[LEFT][number], state[COUNT][number])


def precondition(block: Tensor, left: Tensor, count: Tensor) -> None:
    """Replace a block `(m, n)` with m <= n by its update, and advance its state."""
    block = block if block.shape[0] <= block.shape[1] else block.mT
    left.lerp_(block @ block.mT, 1 - BETA)
    count.add_(1)
    values, vectors = torch.linalg.eigh(left.double() / (1 - BETA ** count.item()))
    root = vectors @ (values + 1e-6).rsqrt().diag() @ vectors.mT
    block.copy_((root @ block.double()).float())


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    return values(shape, 100 * step + len(shape) + shape[0])


def blocks_of(name: str, matrix: Tensor) -> list[Tensor]:
    if name == "experts":
        return list(matrix)
    if name == "qkv":
        return list(matrix.split(SPLIT["qkv"]))
    return [matrix]


def by_hand(steps: int) -> dict[str, Tensor]:
    """Weights after the same steps on whole matrices, in plain torch."""
    found = {}
    for name, shape in SHAPES.items():
        weight = values(shape, 7)
        momentum = torch.zeros(shape)
        blocks = blocks_of(name, momentum)
        states = []
        for block in blocks:
            smaller = min(block.shape)
            states.append((torch.zeros(smaller, smaller), torch.zeros(())))
        for step in range(steps):
            update = gradient(shape, step)
            momentum.lerp_(update, 1 - MOMENTUM)
            update.lerp_(momentum, MOMENTUM)
            for block, state in zip(blocks_of(name, update), states, strict=True):
                precondition(block, *state)
            weight -= LR * (DECAY * weight + update)
        found[name] = weight
    return found


class Training:
    """Weights, cut by rows if there is a mesh, with a Muon that has the method."""

    def __init__(self, mesh_shape: tuple[int, ...], **settings: Any) -> None:
        options.method_of = lambda given, device: Shampoo()  # type: ignore[assignment,return-value]
        self.mesh = None
        if mesh_shape:
            self.mesh = init_device_mesh("cpu", mesh_shape)
        self.model = nn.Module()
        for name, shape in SHAPES.items():
            self.model.register_parameter(name, nn.Parameter(self.placed(values(shape, 7))))
        self.optimizer = Muon(
            self.model.named_parameters(),
            lr=LR,
            momentum=MOMENTUM,
            weight_decay=DECAY,
            matrices=["*"],
            split=SPLIT,
            **settings,
        )

    def placed(self, tensor: Tensor) -> Tensor:
        if self.mesh is None:
            return tensor
        leading = [Replicate()] * (self.mesh.ndim - 1)
        return distribute_tensor(tensor, self.mesh, [*leading, Shard(0)])

    def train(self, steps: range) -> None:
        for step in steps:
            for name, p in self.model.named_parameters():
                p.grad = self.placed(gradient(SHAPES[name], step))
            self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for name, p in self.model.named_parameters():
            weight = p.detach()
            found[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
        return found

    def accumulators(self) -> list[Tensor]:
        slots = self.optimizer.state_dict()["state"].values()
        return [each[LEFT].full_tensor() for each in slots]

    def state(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)


def trained(
    rank: int,
    world_size: int,
    *,
    mesh: tuple[int, ...],
    folder: str,
    settings: dict[str, Any],
) -> Any:
    """In a worker: weights after some steps, when a checkpoint is saved, and after more."""
    training = Training(mesh, **settings)
    training.train(range(STEPS))
    before = training.weights()
    state = {"state": training.state(), "weights": before}
    dcp.save(state, checkpoint_id=folder)
    training.train(range(STEPS, 2 * STEPS))
    return before, training.weights()


def resumed(
    rank: int,
    world_size: int,
    *,
    mesh: tuple[int, ...],
    folder: str,
    settings: dict[str, Any],
) -> Any:
    """In a worker: weights after the later steps, from the checkpoint, and without its state."""
    found = []
    for with_state in (True, False):
        training = Training(mesh, **settings)
        state = {"state": training.state(), "weights": training.weights()}
        dcp.load(state, checkpoint_id=folder)
        for name, p in training.model.named_parameters():
            p.detach().copy_(training.placed(state["weights"][name]))
        if with_state:
            set_optimizer_state_dict(training.model, training.optimizer, state["state"])
        training.train(range(STEPS, 2 * STEPS))
        found.append(training.weights())
    return found


SMALL: dict[str, Any] = {"exchange_buffer_mb": 0.015}
"""Several waves."""


@pytest.fixture(scope="module")
def two_ranks(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A checkpoint of two ranks, and the weights there and after more steps."""
    folder = str(tmp_path_factory.mktemp("saved"))
    before, after = ranks(2, trained, mesh=(2,), folder=folder, settings=SMALL)[0]
    return folder, before, after


def test_updates_are_those_of_whole_matrices(two_ranks: Any) -> None:
    """Products of parts of stacks round otherwise, which the inverse root magnifies: 1e-4."""
    _, before, after = two_ranks
    for steps, found in ((STEPS, before), (2 * STEPS, after)):
        for name, expected in by_hand(steps).items():
            torch.testing.assert_close(found[name], expected, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ((1,), {}),
        ((2,), {}),
        ((3,), {}),
        ((2, 2), {}),
        ((2,), {"exchange": "allgather"}),
        ((), {}),
    ],
)
def test_a_checkpoint_goes_on_to_the_same_bits_on_other_ranks(
    ranks: Pool, two_ranks: Any, mesh: tuple[int, ...], settings: dict[str, Any]
) -> None:
    folder, _, expected = two_ranks
    size = 1
    for count in mesh or (2,):
        size *= count
    loaded, fresh = ranks(size, resumed, mesh=mesh, folder=folder, settings=settings)[0]
    for name in SHAPES:
        assert torch.equal(loaded[name], expected[name]), name
        assert not torch.allclose(fresh[name], expected[name], atol=1e-2), name


def state_of_ranks(rank: int, world_size: int) -> Any:
    """In a worker: elements of state that the rank keeps, and of its optimizer's state dict."""
    training = Training((world_size,))
    training.train(range(1))
    (part,) = training.optimizer.parts
    slots = training.optimizer.state_dict()["state"].values()
    shares = [each[LEFT].to_local().numel() for each in slots]
    shown = [each[LEFT] for each in training.optimizer.state.values() if LEFT in each]
    assert not any(each.numel() for each in shown), "a name without values, for flattened dicts"
    return part.method_state.nbytes // 4, sum(shares), int(state_bytes(part.waves.plan)[rank])


def test_each_block_has_its_state_on_one_rank_as_the_plan_counts(ranks: Pool) -> None:
    kept, shares, planned = zip(*ranks(2, state_of_ranks), strict=True)
    squares = 6**2 + 5**2 + 6**2 + 3**2 + 3**2 + 4 * 6**2
    assert sum(kept) == squares + 9
    assert sum(shares) == squares
    assert [4 * numel for numel in kept] == list(planned)


def refused(rank: int, world_size: int, *, settings: dict[str, Any], mesh: bool) -> str:
    """In a worker: the error of settings that a method with state cannot have."""
    with pytest.raises(UserError) as caught:
        Training((world_size,) if mesh else (), **settings)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "mesh"),
    [({"team_size": "2"}, True), ({"share_replicated": True}, False)],
)
def test_a_method_with_state_is_refused_where_no_rank_can_keep_it(
    ranks: Pool, settings: dict[str, Any], mesh: bool
) -> None:
    (name,) = settings
    for error in ranks(2, refused, settings=settings, mesh=mesh):
        assert name in error
        assert "Shampoo" in error


def skipped(rank: int, world_size: int) -> tuple[bool, bool]:
    """In a worker: True if a gradient that is not finite leaves state and weights."""
    training = Training((world_size,))
    training.train(range(1))
    before = training.accumulators()
    weights = training.weights()
    for name, p in training.model.named_parameters():
        p.grad = training.placed(torch.full(SHAPES[name], torch.nan))
    training.optimizer.step()
    after = training.accumulators()
    kept = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
    still = [torch.equal(weights[name], now) for name, now in training.weights().items()]
    return all(kept), all(still)


def test_a_gradient_that_is_not_finite_leaves_the_state(ranks: Pool) -> None:
    assert set(ranks(2, skipped)) == {(True, True)}


class Remembering(NewtonSchulz):
    """Newton-Schulz of G + M G, with M the mean of G G^T over steps. Without M it serves teams."""

    def state_shapes(self, kind: Any) -> dict[str, tuple[int, ...]]:
        return {LEFT: (kind.smaller, kind.smaller)}

    def run(self, stack: Tensor, kind: Any, factors: Tensor, work: Any, **others: Any) -> Tensor:
        left = others["state"][LEFT]
        for number, block in enumerate(stack.clone()):
            if not factors[number].isnan():
                left[number].lerp_(block @ block.mT, 1 - BETA)
                stack[number] += left[number] @ stack[number]
        return super().run(stack, kind, factors, work, **others)


def train_with_state(rank: int, world_size: int, **how: Any) -> tuple[int, str]:
    """In a worker: a run of Megatron's whose Muon has the method."""
    builder.NewtonSchulz = Remembering  # type: ignore[misc]
    return runs.train(rank, world_size, **how)


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    steps = cli.words("--train-iters 4 --save-interval 2")
    sizes = (*DIVISIBLE, "--make-vocab-size-divisible-by", "132")
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *steps, *sizes), batch=12)


def run_with_state(training: Trainings, *flags: str, ranks: int) -> cli.Run:
    answers = training.ranks(
        ranks,
        train_with_state,
        argv=training.line(*SWIGLU, *flags, ranks=ranks),
        folder=str(training.folder),
    )
    return cli.Run(answers[0][0], "".join(text for _, text in answers), 0.0)


OFFLOAD = cli.words("--muon-offload cpu --muon-offload-state all")


MOVED = [
    (3, (*cli.MUON, *strategy("optim"))),
    (4, (*FULL, "--tensor-model-parallel-size", "2", *OFFLOAD)),
    (4, (*FULL, "--num-distributed-optimizer-instances", "2")),
]


@pytest.mark.parametrize(("size", "flags"), wide_but(MOVED[1:2], MOVED))
def test_checkpoints_of_megatron_have_the_state(
    training: Trainings, size: int, flags: tuple[str, ...]
) -> None:
    def run(*given: str, ranks: int) -> None:
        result = run_with_state(training, *given, ranks=ranks)
        assert warnings(result.checked()) == []

    run(*FULL, "--save", "whole", ranks=2)
    run(*FULL, *cli.words("--load whole --ckpt-step 2 --save resumed"), ranks=2)
    expected = saved(training, "whole", 4)
    state = [name for name in expected if name.endswith(LEFT)]
    assert len(state) == 3 * 4
    assert all(expected[name].any() for name in state)
    assert set(state) <= set(differences(saved(training, "whole", 2), expected))
    assert differences(saved(training, "resumed", 4), expected) == []
    # The last iteration is done: the run saves again and ends.
    run(*flags, *cli.words("--load whole --save others --save-interval 3"), ranks=size)
    found = saved(training, "others", 4)
    of_peers = [name for name in found if name.startswith("rng_state.")]
    assert [name for name in differences(found, expected) if name not in of_peers] == []


def test_state_of_whole_matrices_is_refused_for_parts(training: Trainings) -> None:
    flags = (*FULL, *cli.words("--tensor-model-parallel-size 2 --muon-tp-mode blockwise"))
    run = run_with_state(training, *flags, ranks=2)
    assert run.returncode != 0
    assert "--muon-tp-mode blockwise cannot be: Remembering keeps state" in run.output
