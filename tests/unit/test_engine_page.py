"""The code of docs/engine.md: the loop is that of the engine; rule, method and kernel work."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon import Muon
from megatron_muon.core import engine
from megatron_muon.core.passes import Passes
from megatron_muon.core.rows import HeldRows
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.wave import Wave
from megatron_muon.fsdp import options

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
LR = 0.1
DECAY = 0.01
SHAPES = [(8, 3), (4, 6)]

Page = dict[str, Any]


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> Page:
    """Names that the page's examples define."""
    found: Page = {}
    for code in blocks()[1:]:
        exec(compile(code, str(PAGE), "exec"), found)
    return found


def randn(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def stepped(page: Page, shape: tuple[int, int], **parts: Any) -> torch.Tensor:
    """A weight that began as a multiple of ones, after a step of the page."""
    weight = torch.full(shape, 2.0)
    page["step"](weight, randn(shape), **parts)
    return weight


def update_of(weight: torch.Tensor) -> torch.Tensor:
    """The update that brought a weight here."""
    return (torch.full_like(weight, 2.0) - weight) / LR - DECAY * 2.0


def test_the_page_has_at_most_120_lines() -> None:
    assert len(PAGE.read_text("utf-8").splitlines()) <= 120


def test_the_loop_is_that_of_the_engine() -> None:
    source = inspect.getsource(engine.run)
    assert re.sub(r'\n    """.*?"""', "", source, flags=re.DOTALL) == blocks()[0]


def test_the_rule_limits_the_elements_of_an_update(page: Page) -> None:
    rule = page["Clip"](held=None, options={})
    clipped = update_of(stepped(page, (8, 3), rules=[rule]))
    plain = update_of(stepped(page, (8, 3)))
    assert float(plain.abs().max()) > 0.2
    torch.testing.assert_close(clipped, plain.clamp(-0.1, 0.1), rtol=0.0, atol=1e-5)


def test_a_rule_may_change_gradients_before_momentum_takes_them(page: Page) -> None:
    """`before` was documented, and no step called it."""

    class Negated(Rule):
        def before(self, part: HeldRows) -> None:
            part.flat.neg_()

    held: Any = None
    negated = update_of(stepped(page, (8, 3), rules=[Negated(held, {})]))
    torch.testing.assert_close(negated, -update_of(stepped(page, (8, 3))), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_update_of_the_method_is_the_exact_polar_factor(
    page: Page, shape: tuple[int, int]
) -> None:
    """The inverse root of one product, whose condition number is the square of the block's."""
    u, _, v = torch.linalg.svd(randn(shape).double(), full_matrices=False)
    exact = (u @ v).float()
    found = update_of(stepped(page, shape, method=page["Shampoo"]()))
    torch.testing.assert_close(found, exact, rtol=0.0, atol=1e-5)
    iterated = update_of(stepped(page, shape))
    assert not torch.allclose(iterated, exact, rtol=0.0, atol=1e-2)


def test_an_optimizer_keeps_the_state_of_the_method(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "method_of", lambda _, __: page["Shampoo"]())
    weight = torch.nn.Parameter(torch.full((8, 3), 2.0))
    optimizer = Muon([("w", weight)], lr=LR, weight_decay=DECAY)
    weight.grad = randn((8, 3))
    optimizer.step()
    expected = stepped(page, (8, 3), method=page["Shampoo"]())
    torch.testing.assert_close(weight.detach(), expected, rtol=0.0, atol=1e-6)
    (slots,) = optimizer.state_dict()["state"].values()
    block = slots["momentum_buffer"] * 0.95 + randn((8, 3)) * 0.05  # what Nesterov's rule gives
    products = slots["products"].view(3, 3)
    torch.testing.assert_close(products, block.mT @ block, rtol=1e-5, atol=1e-6)
    other = torch.nn.Parameter(weight.detach().clone())
    loaded = Muon([("w", other)], lr=LR, weight_decay=DECAY)
    loaded.load_state_dict(optimizer.state_dict())
    other.grad = randn((8, 3))
    optimizer.step()
    loaded.step()
    assert torch.equal(weight, other)
    again = update_of(stepped(page, (8, 3), method=page["Shampoo"]()))
    assert not torch.allclose((expected - weight) / LR - DECAY * expected, again, atol=0.1)


def test_the_kernel_takes_each_wave_once_and_moves_weights_as_the_pass_does(page: Page) -> None:
    taken: list[Wave] = []
    begun: list[Passes] = []

    class Noted(page["Descent"]):  # type: ignore[misc]
        def descend(self, wave: Wave) -> None:
            taken.append(wave)
            super().descend(wave)

        def begin(self, probe: Any) -> None:
            begun.append(self)
            super().begin(probe)

    moved = stepped(page, (8, 3), passes=Noted)
    assert len(begun) == 1
    assert len({id(wave) for wave in taken}) == len(taken)
    assert sum(len(wave.chunks) for wave in taken) == 1
    torch.testing.assert_close(moved, stepped(page, (8, 3)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parts", [{}, {"method": "Shampoo"}, {"passes": "Descent"}])
def test_a_gradient_that_is_not_finite_leaves_the_weight(page: Page, parts: dict[str, str]) -> None:
    chosen = {name: page[value] for name, value in parts.items()}
    if "method" in chosen:
        chosen["method"] = chosen["method"]()
    weight = torch.ones(8, 3)
    page["step"](weight, torch.full((8, 3), math.nan), **chosen)
    assert torch.equal(weight, torch.ones(8, 3))
