"""The four passes over memory of a step, on whole waves, in torch operations.

    advance   gradient, momentum -> momentum, lane      (4 + 4 -> 4 + wire bytes an element)
    fill      lane -> stacks
    drain     stacks -> lane
    descend   lane, weight -> weight, with decay

Copies are made once, in `core/wave.py`: `chunk.pack` from prepared rows to the lane, of a batch to
its stacks; `fill` and `drain` between lane and stacks, also for what stays on this rank;
`chunk.unpack` back to updates. `advance` calls rules before momentum takes gradients, `descend`
before weights take updates; plain Muon has none. Momentum is an exponential moving average with
Nesterov's look-ahead, as in emerging-optimizers' Muon. Decay is decoupled (AdamW's), coupled (added
to the gradient), or a rule's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_muon.core.copies import Copies
from megatron_muon.core.cost import TOGETHER
from megatron_muon.core.group_numbers import Number, acts
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.rows import HeldRows, Rows
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.wave import Wave, WaveStack

DECOUPLED, COUPLED, BY_RULE = "decoupled", "coupled", "by rule"

LEAST, MOST = 2.0**-40, 2.0**40
"""Largest magnitudes of blocks whose squares fit in fp32 and bf16 as they are."""


class Passes:
    """The passes on this rank's rows and stacks.

    Args:
        rules: in the order of a step.
        nesterov: mix momentum with the gradient again before it travels.
        decay: DECOUPLED, COUPLED or BY_RULE.
        levels: the method takes levelled stacks.
    """

    def __init__(
        self,
        rows: Rows,
        rules: Sequence[Rule],
        *,
        nesterov: bool = True,
        decay: str = DECOUPLED,
        levels: bool = True,
    ) -> None:
        self.rows = rows
        self.rules = rules
        self._nesterov = nesterov
        self._decay = decay
        self._levels = levels
        self._normalizing = [rule.normalize for rule in rules if rule.normalize is not None]
        self._moving = [rule for rule in rules if rule.moves_weights]
        self._probe: Probe = SILENT

    _mark_failed: Callable[[Tensor], None] | None = None
    """As `Rows.find_failed` has it."""

    def look(self) -> None:
        """Note where gradients and weights are, and numbers of groups; before a step is captured."""

    def begin(self, probe: Probe) -> None:
        """Begin a step. Collective."""
        self._probe = probe
        self.rows.find_failed(self._mark_failed)
        self.rows.beside.begin()
        for rule in self.rules:
            rule.begin(self.rows)

    def end(self) -> None:
        """End a step. Collective."""
        self.rows.beside.end()
        self.rows.end()
        with self._probe.phase("apply"):
            for rule in self.rules:
                rule.end()

    def advance(self, wave: Wave) -> None:
        """Advance momentum, and write what is orthogonalized to lanes, or to stacks.

        momentum <- lerp(momentum, gradient, 1 - share); what is orthogonalized is
        lerp(gradient, momentum, share), Nesterov's look-ahead, or momentum. A method that takes no
        momentum gets gradients. Of a matrix that some rank cannot update each shard's first element
        becomes NaN, so that no rank updates it.
        """
        for chunk in wave.chunks:
            with self._probe.phase("momentum"), self.rows.beside.prepare(chunk):
                marks = failed = None
                if self.rows.failed is not None:
                    marks = self.rows.failed[chunk.index]
                    failed = marks.isnan()
                for places, part in self.rows.with_momentum(chunk):
                    if self._decay == COUPLED:
                        self._couple(part)
                    for rule in self.rules:
                        rule.before(part)
                    if not self.rows.has_momentum:
                        continue
                    if failed is not None:
                        _keep(part, failed[places.start : places.stop])
                    for group, rows, momentum in part.by_group():
                        share = group["momentum"]
                        if len(rows) == 1:  # it may be more than a launch of calls on lists takes
                            momentum[0].lerp_(rows[0], 1.0 - share)
                        else:
                            torch._foreach_lerp_(momentum, rows, 1.0 - share)
                        if not self._nesterov:
                            torch._foreach_copy_(rows, momentum)
                        elif len(rows) == 1:
                            rows[0].lerp_(momentum[0], share)
                        else:
                            torch._foreach_lerp_(rows, momentum, share)
                    self._probe.momentum(part.indices, part.state, self.rows.replicas)
                if marks is not None:
                    chunk.prepared.index_add_(0, chunk.firsts, marks)
            copy_all(chunk.pack)
            self.rows.beside.packed(chunk)

    def fill(self, wave: Wave) -> None:
        """Fill the stacks of a wave from its lane."""
        copy_all(wave.fill)

    def measure(self, wave: Wave) -> Tensor:
        """A power of two for each block, `(slots, 1, 1)` fp32, as `unit_factor`. Collective in teams.

        Of levelled stacks, 1 where squares fit. A team's ranks have the same factors, whether kernels
        or torch operations find them.
        """
        found = [largest_magnitude(stack.blocks) for stack in wave.stacks]
        if not found:  # this rank has no slots, but agrees with others
            found.append(wave.lane.new_zeros(0, 1, 1, dtype=torch.float32))
        largest = found[0] if len(found) == 1 else torch.cat(found)
        if wave.agreement.shared:
            wave.agreement.agree(largest)
        factors = unit_factor(largest)
        if self._levels:
            is_usual = (largest == 0) | ((largest >= LEAST) & (largest <= MOST))
            factors.masked_fill_(is_usual, 1.0)
        return factors

    def scale(self, wave: Wave, stack: WaveStack, factors: Tensor) -> None:
        """Multiply blocks of a wave by their factors; rounds nothing, as these are powers of two."""
        torch.mul(stack.blocks, factors.to(stack.blocks.dtype), out=stack.blocks)

    def take(self, wave: Wave, number: int, updates: Tensor) -> Tensor | None:
        """Take the updates of a stack of a wave from where the method has left them.

        Returns memory in which it may leave those of the next stack; None for its own buffer.
        """
        blocks = wave.stacks[number].blocks
        if updates is not blocks:
            blocks.copy_(updates)
        return None

    def finish(self, wave: Wave, factors: Tensor) -> None:
        """Have rules change whole updates on their owner; `factors` are NaN for slots to skip."""
        if not self._normalizing:
            return
        finite = factors.view(-1) == factors.view(-1)
        for normalize in self._normalizing:
            for whole in wave.whole:
                update = whole.read()
                normalize(
                    whole.index,
                    update,
                    finite[whole.slot],
                    whole.squares,
                )
                whole.write()

    def drain(self, wave: Wave) -> None:
        """Write the updates of a wave from its stacks to its lane."""
        copy_all(wave.drain)

    def descend(self, wave: Wave) -> None:
        """weight <- weight - lr * (update + decay * weight); where an update is NaN weights stay."""
        for chunk in wave.chunks:
            copy_all(chunk.unpack)
            with self._probe.phase("apply"):
                for part in self.rows.with_weights(chunk):
                    for rule in self.rules:
                        if not rule.moves_weights:
                            rule.after(part)
                    self._probe.updates(part.indices, part.rows, self.rows.replicas)
                    for rule in self._moving:
                        rule.after(part)
                    if self._moving:
                        continue
                    by_group = list(part.by_group())
                    for group, rows, weights in by_group:
                        decay = group["weight_decay"]
                        if self._decay == DECOUPLED and acts(decay):
                            add_scaled(rows, weights, decay)  # so that both are rounded once
                    part.flat.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
                    for group, rows, weights in by_group:
                        add_scaled(weights, rows, -group["lr"])

    def _couple(self, part: HeldRows) -> None:
        """Add decay to the gradient."""
        for index, group, rows in zip(part.indices, part.groups, part.rows, strict=True):
            if acts(group["weight_decay"]):
                weights = self.rows.weights(index).to(rows.device, rows.dtype)
                add_scaled([rows], [weights], group["weight_decay"])


def copy_all(copies: Copies) -> None:
    """Copy, with a cast where the two ends have different dtypes."""
    if copies.targets:
        torch._foreach_copy_(*copies)


def _keep(part: HeldRows, failed: Tensor) -> None:
    """Put the momentum of matrices that fail in the place of their gradients: it stays then.

    One pass over neighbors of one size. A mask of elements would cost more than the iteration:
    `repeat_interleave` gives a whole matrix to one warp.
    """
    if part.flat_state is None:
        for rows, momentum, flag in zip(part.rows, part.state, failed.unbind(), strict=True):
            torch.where(flag, momentum, rows, out=rows)
        return
    start = first = 0
    for numel, alike in itertools.groupby(one.numel() for one in part.rows):
        count = len(list(alike))
        end = start + count * numel
        rows = part.flat[start:end].view(count, numel)
        momentum = part.flat_state[start:end].view(count, numel)
        torch.where(
            failed[first : first + count, None],
            momentum,
            rows,
            out=rows,
        )
        start, first = end, first + count


def add_scaled(
    tensors: list[Tensor],
    others: list[Tensor],
    factor: Number,
) -> None:
    """Add `factor` times the others, in place; with a tensor the products are rounded first."""
    if not isinstance(factor, Tensor):
        torch._foreach_add_(tensors, others, alpha=factor)
        return
    for part in together(tensors):
        torch._foreach_add_(tensors[part], torch._foreach_mul(others[part], factor))


def together(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Slices of consecutive `tensors` of at most `TOGETHER` elements, or of one tensor."""
    first = elements = 0
    for place, tensor in enumerate(tensors):
        most = TOGETHER["cpu" if tensor.device.type == "cpu" else "cuda"]
        if elements and elements + tensor.numel() > most:
            yield slice(first, place)
            first, elements = place, 0
        elements += tensor.numel()
    if tensors:
        yield slice(first, len(tensors))


def largest_magnitude(blocks: Tensor) -> Tensor:
    """Largest magnitude of each `(..., m, n)` block, `(..., 1, 1)` fp32; not finite where an element is not."""
    dims = (-2, -1)
    if blocks.device.type == "cpu":
        # Two reductions: torch 2.13 takes 5 to 20 times as long over a norm.
        largest = blocks.amax(dims, keepdim=True)
        smallest = blocks.amin(dims, keepdim=True)
        return torch.maximum(largest, smallest.neg_()).float()
    norms: Tensor = torch.linalg.vector_norm(
        blocks,
        ord=math.inf,
        dim=dims,
        keepdim=True,
        dtype=torch.float32,
    )
    return norms


def unit_factor(largest: Tensor) -> Tensor:
    """Power of two that brings each magnitude into [0.5, 1), fp32; NaN for those that are not finite.

    It is 2^125 for magnitudes below 2^-126. Squares of small entries vanish, and an eps in the
    normalization shrinks the update of small momentum, for instance after clipping by a tiny
    factor. A power of two changes no bit of the mantissa.
    """
    within = largest.clamp_min(2.0**-126)
    return torch.frexp(within).mantissa.div_(within)
