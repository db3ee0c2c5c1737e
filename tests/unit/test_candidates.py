"""Classes of optimizers on trial: which can be sharded, their state, and their operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_muon import Sharded
from megatron_muon.core.methods.candidate import Candidate, find
from megatron_muon.core.methods.owner import OwnerMethod
from megatron_muon.core.methods.rehearsal import approve
from megatron_muon.core.slices import BlockKind
from megatron_muon.errors import UserError
from tests.unit.test_plan_command import planned

TAKEN = ("soap", "rekls", "polargrad", "mop", "psgd_pro", "lion", "laprop")
SOAP = "--optimizer soap"
READING = ("scion", "spel", "oblique_sgd", "oblique_adam", "sinkhorn_muon")


class Halved(torch.optim.Optimizer):
    """A user's class: subtracts half of the gradient, and counts."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.change(p, group)

    def change(self, p: Tensor, group: Any) -> None:
        p.sub_(0.5 * group["lr"] * p.grad)
        self.state[p]["seen"] = self.state[p].get("seen", 0) + 1


class OutsideState(Halved):
    def change(self, p: Tensor, group: Any) -> None:
        super().change(p, group)
        self.steps += 1


class ReadsWeights(Halved):
    def change(self, p: Tensor, group: Any) -> None:
        p.sub_(group["lr"] * (p.grad + 0.01 * p))  # type: ignore[operator]


class KeepsFloat(Halved):
    def change(self, p: Tensor, group: Any) -> None:
        self.state[p]["share"] = self.state[p].get("share", 0.1) * 1.1


class OwnBuffers(Halved):
    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.buffers: dict[Tensor, Tensor] = {}

    def change(self, p: Tensor, group: Any) -> None:
        buffer = self.buffers.setdefault(p, torch.zeros_like(p))
        p.sub_(group["lr"] * buffer.mul_(0.9).add_(p.grad))  # type: ignore[arg-type]


class Rebinds(Halved):
    def change(self, p: Tensor, group: Any) -> None:
        p.data = p.data - group["lr"] * p.grad  # type: ignore[operator]


class SquaresRate(Halved):
    def change(self, p: Tensor, group: Any) -> None:
        p.sub_(group["lr"] ** 2 * p.grad)


class MeansOfAll(Halved):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        members = self.param_groups[0]["params"]
        size = sum(p.grad.norm() for p in members)
        for p in members:
            p.sub_(self.param_groups[0]["lr"] * p.grad / size)


class MadeAtOnce(Halved):
    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = 0


class Swaps(Halved):
    """Two slots change places, and one is transposed, in each step."""

    def change(self, p: Tensor, group: Any) -> None:
        state = self.state[p]
        if not state:
            state.update(a=torch.zeros_like(p), b=torch.zeros_like(p), c=torch.zeros_like(p.mT))
        state["a"].add_(p.grad)  # type: ignore[arg-type]
        state["c"] = state["a"].mT.contiguous() if state["c"].sum() == 0 else state["c"] * 0.5
        p.sub_(group["lr"] * (state["a"] - 0.5 * state["b"] + state["c"].mT))
        state["a"], state["b"] = state["b"], state["a"]


class Fails(Halved):
    def change(self, p: Tensor, group: Any) -> None:
        raise LookupError("no such row")


@pytest.mark.parametrize("name", TAKEN)
def test_the_state_on_meta_is_that_of_a_real_block(name: str) -> None:
    candidate = find(name, {})
    for shape in ((9, 4), (4, 9), (5, 5)):
        leaves, _ = candidate.state_of(shape)
        parameter = torch.zeros(shape)
        optimizer = candidate.optimizer([parameter])
        parameter.grad = torch.randn(shape)
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        values = []
        for value in optimizer.state[parameter].values():
            values += value if isinstance(value, list) else [value]
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in values]
        assert [leaf.shape for leaf in leaves] == shapes


@pytest.mark.parametrize("name", READING)
def test_a_class_that_reads_weights_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} (reads weights|refuses a matrix of zeros)"):
        _ = find(name, {}).trial


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (OutsideState, "OutsideState keeps state outside of optimizer.state"),
        (ReadsWeights, "ReadsWeights reads weights"),
        (KeepsFloat, "KeepsFloat keeps share of <class 'float'>"),
        (OwnBuffers, "OwnBuffers gives other updates with new instances"),
        (Rebinds, "Rebinds gives other updates"),
        (SquaresRate, "SquaresRate gives other updates with .*another learning rate"),
        (MeansOfAll, "MeansOfAll gives other updates if it steps several blocks"),
        (MadeAtOnce, "MadeAtOnce makes state before its first step"),
        (Fails, "Fails fails on a block of 4 x 3: no such row"),
    ],
)
def test_a_users_class_is_tried(made: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        approve(find(made, {}))


def test_slots_that_a_class_exchanges_are_kept_apart() -> None:
    assert approve(find(Swaps, {})).trial.slots == ["a", "b", "c"]


def test_names_that_are_none_are_refused() -> None:
    for given, words in (
        ("bogus", "is not an optimizer of emerging-optimizers.*psgd_pro"),
        ("muon", "is implemented by this package"),
        ("torch.optim:Nothing", "cannot be imported"),
        (":Adam", "cannot be imported"),
        (".x:Y", "cannot be imported"),
        (nn.Linear, "nor a class of torch.optim.Optimizer"),
    ):
        with pytest.raises(UserError, match=words):
            find(given, {})  # type: ignore[arg-type]
    for name in ("lr", "weight_decay", "weight_decay_method"):
        with pytest.raises(UserError, match=f"{name}=1 is not the class's"):
            find("soap", {name: 1})
    with pytest.raises(UserError, match="use_kl_shampoo=no is neither True nor False"):
        find("soap", {"use_kl_shampoo": "no"})
    assert find(type("adamw", (Halved,), {}), {}).name != "adamw"
    with pytest.raises(UserError, match=r"bogus.*it takes betas"):
        _ = find("soap", {"bogus": 1}).trial


def test_only_psgd_draws_random_numbers() -> None:
    assert {name for name in TAKEN if find(name, {}).trial.is_random} == {"psgd_pro"}


def test_a_trial_leaves_the_programs_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of GPUs, which torch.manual_seed would seed too."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    monkeypatch.setattr(torch, "manual_seed", None)
    candidate = approve(find("psgd_pro", {}))
    assert candidate.trial.is_random
    assert candidate.operations(30, 20)
    assert candidate.state_of((6, 5))
    assert torch.equal(torch.rand(2), expected)


def test_operations_of_soap_are_those_counted_by_hand() -> None:
    """Of a square of side n: two Gram matrices, four products of two each, two approximate
    eigenvalues, two products and two QR of 16/3.
    """
    count = find("soap", {}).operations(640, 640) / 640**3
    assert count == pytest.approx(4 + 16 + 4 + 4 + 2 * 16 / 3, rel=0.01)
    halves = find("soap", {}).operations(640, 320) / find("soap", {}).operations(2560, 1280)
    assert halves == pytest.approx(1 / 64, rel=0.02)


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 4, bias=False))


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        ("torch.optim:SGD", {"momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {}),
        (Halved, {}),
    ],
)
def test_a_torch_optimizer_on_blocks_is_the_same_as_on_parameters(
    made: Any, arguments: dict[str, Any]
) -> None:
    one, other = model(), model()
    ours = Sharded(
        made, one.named_parameters(), lr=0.1, weight_decay=0.0, matrices=["*"], **arguments
    )
    kind = made if isinstance(made, type) else torch.optim.SGD
    if "weight_decay" in kind.__init__.__annotations__:
        arguments = {**arguments, "weight_decay": 0.0}
    theirs = kind(other.parameters(), lr=0.1, **arguments)
    for step in range(4):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["soap", "psgd_pro"])
def test_a_gradient_whose_squares_overflow_is_skipped(name: str) -> None:
    """SOAP's owner failed to find eigenvectors while the other ranks waited; PSGD kept NaN."""
    one, other = model(), model()
    optimizers = []
    for each in (one, other):
        optimizers.append(Sharded(name, each.named_parameters(), lr=0.1, matrices=["*"]))
    for step, scale in enumerate((1.0, 1e20, 1.0)):
        for each, optimizer in zip((one, other), optimizers, strict=True):
            if each is other and scale > 1.0:
                continue
            for p in each.parameters():
                generator = torch.Generator().manual_seed(step)
                p.grad = scale * torch.randn(p.shape, generator=generator)
            optimizer.step()
    assert set(optimizers[0].skipped_updates().values()) == {1}
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_tall_and_wide_blocks_have_state_of_their_own_shapes() -> None:
    method = OwnerMethod(find("soap", {}))
    wide = BlockKind(3, 5, 1.0, 0, (), 5)
    assert method.state_shapes(wide)["L"] == (3, 3)
    assert method.state_shapes(wide._replace(is_tall=True))["L"] == (5, 5)


def test_a_class_with_other_arguments_is_another() -> None:
    plain, other = find("soap", {}), find("soap", {"use_kl_shampoo": True})
    assert isinstance(plain, Candidate)
    assert plain.operations(64, 64) < other.operations(64, 64)


@pytest.mark.parametrize("ranks", [32, 96])
def test_owners_are_even_in_operations_and_in_bytes(tmp_path: Any, ranks: int) -> None:
    """Of Llama 3 8B: 96 blocks of 14,336 x 4,096 have nine tenths of both."""
    figures = planned(tmp_path, f"--config configs/llama3-8b.yaml --world-size {ranks} {SOAP}")
    assert figures["max_over_mean"] <= 1.1
    assert figures["state_max_over_mean"] <= 1.25


def test_on_64_ranks_some_rank_has_two_of_96_large_blocks(tmp_path: Any) -> None:
    """No plan is below 2 / 1.5 of these, less the small blocks; this one is at that bound."""
    figures = planned(tmp_path, f"--config configs/llama3-8b.yaml --world-size 64 {SOAP}")
    count = find("soap", {"use_kl_shampoo": True}).operations
    large = count(14336, 4096)
    small = 2 * count(4096, 4096) + 2 * count(1024, 4096)
    mean = 32 * (3 * large + small) / 64
    assert figures["max_over_mean"] == pytest.approx(2 * large / mean, rel=0.01)
    assert figures["state_max_over_mean"] <= 1.25
