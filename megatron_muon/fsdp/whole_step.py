"""One step of a whole matrix by emerging-optimizers' classes in fp32, and comparisons with it.

Directions in which momentum has nothing but rounding are orthogonalized too, and there two correct
runs differ. So differences of updates are weighted by the momentum (by the gradient, for other
methods). AdaMuon divides each element of an update by the root of its second moment, so elements
of nothing but rounding grow as large as others: they are multiplied by these roots again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch import Tensor

from megatron_muon.core.layout import Matrix
from megatron_muon.core.methods.method import UPDATES, BlockState, Method
from megatron_muon.core.methods.newton_schulz import NewtonSchulz, coefficients
from megatron_muon.core.methods.owner import LEAST_FACTOR, OwnerMethod
from megatron_muon.core.passes import COUPLED, largest_magnitude, unit_factor
from megatron_muon.core.reference import muon_on
from megatron_muon.core.rows import MOMENTUM
from megatron_muon.core.rules import RULES
from megatron_muon.core.rules.cautious import aligned
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.rules.second_moments import MOMENT2, NorMuon
from megatron_muon.core.slices import Team

type Tensors = dict[str, Tensor]

WEIGHT, GRADIENT = "weight", "gradient"

VANISHED = 2.0**-100
"""Largest magnitude of a gradient that counts as zero."""

_DIRECTIONS = 32
"""Random combinations of directions in which differences are measured."""

_EXACT = 1e-3
"""Bound of updates in fp32."""

_FEW = 16
"""A matrix with fewer elements is too small to distinguish its decay from rounding."""


def _square(values: Tensor) -> float:
    """The square of a norm."""
    return float(values.square().sum())


def _percent(share: float) -> str:
    """A share in words, with two digits."""
    return f"{100.0 * share:.0f} %" if share >= 0.1 else f"{100.0 * share:.2g} %"


class Finding(NamedTuple):
    """The result of one comparison, in words; with `is_unchecked` there was none."""

    text: str
    is_fault: bool = False
    is_unchecked: bool = False


@contextmanager
def _products_in_fp32() -> Iterator[None]:
    """Set torch's newer switch: while that says TF32, its older one cannot be read."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        switch.fp32_precision = before


@dataclass(frozen=True)
class Subject:
    """The matrix that a step is compared for.

    Attributes:
        index: among the matrices of its layout.
        step: its number, from 1.
        group: numbers of its parameter group.
        state: of each block by slot, flat, of methods that keep state.
        device: where steps are compared.
        dtype: of its weights.
        ranks: of the world, by rank in the layout.
    """

    index: int
    step: int
    matrix: Matrix
    group: Mapping[str, Any]
    state: Sequence[Tensors]
    device: torch.device
    dtype: torch.dtype
    ranks: Sequence[int]

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Row numbers of each block."""
        numbers = torch.arange(self.matrix.shape[0], device=self.device).view(-1, 1)
        return [rows.reshape(-1) for rows in self.matrix.split.views(numbers)]

    def number(self, name: str) -> float:
        """A number of the parameter group."""
        return float(self.group[name])

    def where(self, wrong: Tensor) -> str:
        """The rows that are wrong, `(rows,)` bool, with the ranks that hold them."""
        found = []
        for shard in self.matrix.shards:
            rows = wrong[shard.row_start : shard.row_start + shard.rows].nonzero()
            if len(rows):
                first, last = (int(rows[at]) + shard.row_start for at in (0, -1))
                named = f"row {first}" if first == last else f"rows {first} to {last}"
                found.append(f"{named} of rank {self.ranks[shard.rank]}")
        return f" in {'; '.join(found[:4])}" if found else ""


class WholeStep:
    """Takes steps of whole matrices, and compares.

    Args:
        rules: of the part.
        nesterov, decay: as for `Passes`.
        half: the exchange is in bf16.
        rounds: momentum is rounded when it is stored.

    Attributes:
        moment2: a rule keeps a second moment.
    """

    def __init__(
        self,
        method: Method,
        rules: Sequence[Rule],
        *,
        nesterov: bool,
        decay: str,
        half: bool,
        rounds: bool,
    ) -> None:
        self._method = method
        self._nesterov = nesterov
        self._decay = "l2" if decay == COUPLED else "decoupled"
        self._half = half
        self._momentum_bound = 0.02 if rounds else 1e-6
        self._most = 1.0 / LEAST_FACTOR if isinstance(method, OwnerMethod) else math.inf
        self._bound = _EXACT
        if half and isinstance(method, OwnerMethod):
            self._bound = 0.01  # the update is rounded once
        elif half or method.dtype is torch.bfloat16:
            self._bound = 0.15
        elif isinstance(method, NewtonSchulz) and method.iteration.precision == "high":
            self._bound = 0.05
        self._rules = {name: rule for rule in rules for name in RULES if type(rule) is RULES[name]}
        self.moment2 = "adamuon" in self._rules or "normuon" in self._rules

    def moment2_shape(self, index: int, matrix: Matrix) -> tuple[int, int]:
        """Shape of a matrix's second moment."""
        rows, cols = matrix.shape
        rule = self._rules.get("normuon")
        if not isinstance(rule, NorMuon):
            return rows, cols
        return (1, cols) if rule.is_by_columns(index) else (rows, 1)

    @_products_in_fp32()
    def compare(self, subject: Subject, before: Tensors, after: Tensors) -> list[Finding]:
        """Compare a step, from whole fp32 tensors `(rows, cols)` by slot, on the host."""
        largest = float(torch.linalg.vector_norm(before[GRADIENT], math.inf))
        if not largest < self._most:  # of NaN too
            if all(torch.equal(before[slot], after[slot]) for slot in after):
                return [Finding("left out, as its gradient is missing or not finite")]
            return [Finding("it moved, but its gradient is missing or not finite", True)]
        expected = self._step(subject, before)
        if not expected[WEIGHT].isfinite().all():
            return [Finding("its weights or momentum are not finite", True)]
        found = []
        if MOMENTUM in after:
            found.append(self._compare_momentum(subject, after[MOMENTUM], expected.pop(MOMENTUM)))
        found += self._compare_updates(subject, before, after, expected)
        if largest < VANISHED:
            found.append(Finding("its gradient is zero"))
        return found

    def _step(self, subject: Subject, tensors: Tensors) -> Tensors:
        """Weight, momentum and second moment after a step."""
        own = {slot: tensors[slot].to(subject.device, copy=True) for slot in tensors}
        if isinstance(self._method, OwnerMethod):
            return {WEIGHT: self._descend(subject, own)}
        p = torch.nn.Parameter(own.pop(WEIGHT), requires_grad=False)
        p.grad = own.pop(GRADIENT)
        p.row_blocks = subject.blocks  # type: ignore[attr-defined]
        method = self._method
        assert isinstance(method, NewtonSchulz)
        second_moment = {name: subject.number(name) for name in ("beta2", "eps") if self.moment2}
        optimizer: Any = muon_on(
            [p],
            tuple(self._rules),
            second_moment,
            lr=subject.number("lr"),
            momentum=subject.number("momentum"),
            weight_decay=subject.number("weight_decay"),
            nesterov=self._nesterov,
            weight_decay_method=self._decay,
            fp32_matmul_prec="highest",
            scale_mode=method.scale_mode,
            extra_scale_factor=method.extra_scale_factor,
        )
        iteration = method.iteration.with_steps(subject.matrix.steps)
        steps = coefficients(iteration.coefficient_type, iteration.steps)

        def orthogonalize(block: Tensor) -> Tensor:
            # emerging-optimizers divides blocks of a norm under eps by eps
            factor = unit_factor(largest_magnitude(block))
            eps = max(method.eps * float(factor), VANISHED)
            update: Tensor = muon_utils.newton_schulz(
                block.mul_(factor), len(steps), "custom", steps, eps
            )
            return update.mul_(method.scale((len(block), block.shape[1])))

        optimizer.scaled_orthogonalize_fn = orthogonalize
        optimizer.state[p] = own
        optimizer.step()
        return {WEIGHT: p.detach(), **own}

    def _descend(self, subject: Subject, tensors: Tensors) -> Tensor:
        """The weight after a step of a class on each block."""
        method = self._method
        assert isinstance(method, OwnerMethod)
        weight = tensors[WEIGHT]
        update = torch.empty_like(weight)
        slices = Team((0,), (0.0,)).slices(subject.index, subject.matrix)
        for block, rows, values in zip(slices, subject.blocks, subject.state, strict=True):
            kind = method.kind(block)
            state = BlockState()
            state.slots = [block]
            for slot, shape in method.state_shapes(kind).items():
                state[slot] = values[slot].clone().view(1, *shape)
            parameter = torch.zeros_like(weight[rows])
            gradient = tensors[GRADIENT][rows]
            parameter.grad = gradient.bfloat16().float() if self._half else gradient
            optimizer = method.candidate.optimizer([parameter])
            if state[UPDATES]:
                optimizer.state[parameter] = method.read_state(kind, state, 0)
            with method.arithmetic(), method.random_numbers_of(state, [0]):
                optimizer.step()
            update[rows] = -parameter
        decayed = weight
        if "cautious" in self._rules:
            decayed = torch.where(aligned(weight, update), weight, 0.0)
        moved = update + subject.number("weight_decay") * decayed
        return weight - subject.number("lr") * moved

    def _compare_momentum(self, subject: Subject, found: Tensor, expected: Tensor) -> Finding:
        difference = (found.to(subject.device) - expected).abs()
        difference /= expected.abs().max().clamp_min(VANISHED)
        share = float(difference.max())
        bound = self._momentum_bound
        if share <= bound:
            return Finding(f"momentum within {_percent(share)}" if share else "momentum exact")
        # of NaN too
        where = subject.where(~(difference <= bound).all(dim=1))
        sizes = f"{_percent(share)} (bound {_percent(bound)})"
        return Finding(f"momentum differs by {sizes}{where}", True)

    def _compare_updates(
        self, subject: Subject, before: Tensors, after: Tensors, expected: Tensors
    ) -> list[Finding]:
        weight = before[WEIGHT].to(subject.device)
        moved = expected[WEIGHT].to(subject.dtype).float()  # rounded once, as weights are
        difference = after[WEIGHT].to(subject.device) - moved
        moved -= weight
        found = self._compare_decay(subject, weight, moved, difference)
        if subject.number("lr") == 0.0 and not difference.any():
            return [Finding("update not compared, as the learning rate is 0")]
        # weights of fp64 are fp32 here
        eps = max(torch.finfo(dtype).eps for dtype in (subject.dtype, torch.float32))
        noise = eps * weight
        if "adamuon" in self._rules:
            root = after[MOMENT2].to(subject.device).sqrt()
            noise *= root
            difference.add_(moved).mul_(root)
            if self._bound > _EXACT:  # rounding moves roots more than a wrong second moment would
                root = expected.pop(MOMENT2).sqrt_()
            difference -= moved.mul_(root)
        measure = _Weighted(subject, self._looks_ahead(subject, before))
        lengths = measure(moved)
        errors = measure(difference)
        last_bits = 4.0 * measure.of_noise(noise)
        size = float(lengths.norm().clamp_min(VANISHED))
        share = float(errors.norm()) / size
        bound = self._bound
        usual = lengths.clamp_min(size / math.sqrt(len(lengths)))
        wrong = ~(errors <= 3.0 * bound * usual + last_bits)
        is_wrong = not share * size <= bound * size + last_bits.norm()
        sizes = f"{_percent(share)} (bound {_percent(bound)})"
        if is_wrong or wrong.any():
            return [*found, Finding(f"update differs by {sizes}{subject.where(wrong)}", True)]
        if share > bound:
            return [*found, Finding("update within the rounding of weights")]
        return [*found, Finding(f"update within {sizes}")]

    def _compare_decay(
        self, subject: Subject, weight: Tensor, moved: Tensor, difference: Tensor
    ) -> list[Finding]:
        """Compare decay by the part of a difference that is proportional to weights.

        Takes that part away where decay is wrong.
        """
        lr, decay = subject.number("lr"), subject.number("weight_decay")
        if lr == 0.0 or weight.numel() < _FEW or "hyperball" in self._rules:
            return []  # of hyperball the norm is rounded
        # young weights are sums of updates like this one, whose size rounding changes
        of_moved = _square(moved) or 1.0
        along = float((weight * moved).sum()) / of_moved
        weight_alone = weight - along * moved
        square = _square(weight_alone)
        if square <= _EXACT * _square(weight):
            return []
        share = float((difference * weight_alone).sum()) / square
        rest = difference - share * weight
        of_rest = _square(rest) - float((rest * moved).sum()) ** 2 / of_moved
        noise = math.sqrt(max(0.0, of_rest) / (square * min(weight.shape)))
        if abs(share) <= 0.2 * lr * decay + 4.0 * noise:
            return []
        difference.copy_(rest)
        return [Finding(f"weights decay by {decay - share / lr:.3g} instead of {decay:g}", True)]

    def _looks_ahead(self, subject: Subject, tensors: Tensors) -> Tensor:
        """The input of the method; decay in the gradient is left out."""
        gradient = tensors[GRADIENT].to(subject.device)
        if MOMENTUM not in tensors:
            return gradient
        share = subject.number("momentum")
        momentum = tensors[MOMENTUM].to(subject.device).lerp(gradient, 1.0 - share)
        return gradient.lerp(momentum, share) if self._nesterov else momentum


class _Weighted:
    """Sizes of the rows of a difference of updates, weighted by momentum."""

    def __init__(self, subject: Subject, momentum: Tensor) -> None:
        momentum = momentum / momentum.abs().max().clamp_min(VANISHED)
        generator = torch.Generator(momentum.device).manual_seed(subject.index)
        self._blocks = []
        for rows in subject.blocks:
            noise = momentum.new_empty(len(rows), _DIRECTIONS).normal_(generator=generator)
            self._blocks.append((rows, momentum[rows].mT @ noise))

    def __call__(self, difference: Tensor) -> Tensor:
        sizes = difference.new_empty(len(difference))
        for rows, directions in self._blocks:
            sizes[rows] = torch.linalg.vector_norm(difference[rows] @ directions, dim=1)
        return sizes

    def of_noise(self, deviation: Tensor) -> Tensor:
        """The same of independent elements with this standard deviation."""
        sizes = deviation.new_empty(len(deviation))
        for rows, directions in self._blocks:
            squares = directions.square().sum(dim=1)
            sizes[rows] = (deviation[rows].square() @ squares).sqrt()
        return sizes
