"""A rule: the part of a step that makes one variant of Muon differ from another.

It sees this rank's gradients before momentum takes them (`before`), the whole update of a matrix on
its owner (`normalize`), and the rows of the update when they are back (`after`). The step runs a
list of rules and knows none by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megatron_muon.core.rules.held import Held

type Tensors = list[Tensor]
type Groups = Sequence[dict[str, Any]]
type Options = Mapping[str, Any]
type Normalize = Callable[[int, Tensor, Tensor, Tensor], None]


class Step(Protocol):
    """The matrices of a step, as rules see them; `rows.Rows` is one.

    Attributes:
        groups: the parameter group of each matrix.
        gradients: rows of each, None if there is none; empty once the step is over.
        state: by a slot's name, this rank's part of it of each matrix, fp32.
    """

    groups: Groups
    gradients: Sequence[Tensor | None]
    state: Callable[[str], Tensors]


@dataclass(frozen=True)
class Part:
    """Consecutive matrices of a wave, of which this rank has rows.

    Attributes:
        flat: their rows, fp32, one matrix after the other: gradients before the exchange, then
            updates, NaN in all elements of one that is not finite.
        rows: views of `flat`, `(rows, cols)` each.
        state: momentum before the exchange, weights after it, `(rows, cols)` each.
        flat_state: all of `state`, in the order of `flat`, if it is contiguous.
        scratch: fp32 memory as large as `flat` for a rule to overwrite; None allocates.
    """

    indices: Sequence[int]
    groups: Groups
    flat: Tensor
    rows: Tensors
    state: Tensors
    flat_state: Tensor | None = None
    scratch: Tensor | None = None

    def by_group(self) -> Iterator[tuple[dict[str, Any], Tensors, Tensors]]:
        """Each parameter group with rows and state of its matrices, as one flat pair if it can."""
        if len(set(map(id, self.groups))) == 1:
            if self.flat_state is None:
                yield self.groups[0], self.rows, self.state
            else:
                yield self.groups[0], [self.flat], [self.flat_state]
            return
        places: dict[int, list[int]] = {}
        for place, group in enumerate(self.groups):
            places.setdefault(id(group), []).append(place)
        for chosen in places.values():
            rows = [self.rows[place] for place in chosen]
            state = [self.state[place] for place in chosen]
            yield self.groups[chosen[0]], rows, state

    def scratch_like(self, rows: Tensor) -> Tensor:
        """Memory of the shape of `rows`, fp32, to overwrite until the next call."""
        if self.scratch is None:
            return torch.empty_like(rows)
        return self.scratch[: rows.numel()].view(rows.shape)


class Rule:
    """One part of a step; this one does nothing.

    In a step `begin` comes first, then for each wave `normalize` on the ranks that orthogonalize,
    and `after`; `end` comes last.

    Attributes:
        slots: names of the state that it keeps for each parameter, beside momentum.
        unscaled: it takes updates unscaled, and multiplies them by `Held.scales`.
        scratch: it uses `Part.scratch`.
        moves_weights: its `after` or `end` takes the place of descent along the updates.
        normalize: changes the update `(rows, cols)` fp32 of a matrix in place, on the rank that
            orthogonalizes it; arguments are the index of the matrix, the update, a bool that is
            true if it is finite, and fp32 memory of its shape to overwrite. None if the rule needs
            no whole updates, which teams do not have.
        numbers: names of options that each parameter group has, and a checkpoint keeps;
            `settings` are their defaults.
        step: the step that has begun.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()
    unscaled: ClassVar[bool] = False
    scratch: ClassVar[bool] = False
    moves_weights: ClassVar[bool] = False
    normalize: Normalize | None = None
    step: Step

    def __init__(self, held: Held, options: Options) -> None:
        """Prepare for the matrices of `held`; `options` are the user's settings by name."""
        self.held = held
        self.settings = {name: options[name] for name in self.numbers}

    def zeros(
        self,
        slot: str,
        index: int,
        parameter: Tensor,
    ) -> Tensor:
        """A slot's first state for a matrix, fp32, a DTensor as `parameter` is."""
        return torch.zeros_like(
            parameter.detach(),
            dtype=torch.float32,
        )

    def check(
        self,
        groups: Groups,
        names: Sequence[str],
    ) -> None:
        """Raise a UserError for unsuitable numbers of groups; at construction and in each step."""

    def check_weights(
        self,
        weights: Sequence[Tensor],
        names: Sequence[str],
    ) -> None:
        """Raise a UserError for unsuitable weights. Collective; may wait for the device."""

    def begin(self, step: Step) -> None:
        """Begin a step. Collective if numbers of other ranks are needed."""
        self.step = step

    def before(self, part: Part) -> None:
        """Change gradients in `part.rows` in place, before momentum takes them."""

    def after(self, part: Part) -> None:
        """Change updates in `part.rows`, or weights, in place."""

    def end(self) -> None:
        """End a step, after its exchange. Collective if `begin` is."""
