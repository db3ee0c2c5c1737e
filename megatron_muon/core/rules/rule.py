"""A rule: the part of a step that makes one variant of Muon differ from another.

It sees this rank's gradients before momentum takes them (`before`), the whole update of a matrix on
its owner (`normalize`), and the rows of the update when they are back (`after`). The step runs a
list of rules and knows none by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron_muon.core.rules.held import Held

if TYPE_CHECKING:
    from megatron_muon.core.rows import HeldRows, Rows

type Tensors = list[Tensor]
type Groups = Sequence[dict[str, Any]]
type Options = Mapping[str, Any]
type Normalize = Callable[[int, Tensor, Tensor, Tensor], None]


class Rule:
    """One part of a step; this one does nothing.

    In a step `begin` comes first, then for each wave `normalize` on the ranks that orthogonalize,
    and `after`; `end` comes last.

    Attributes:
        slots: names of the state that it keeps for each parameter, beside momentum.
        unscaled: it takes updates unscaled, and multiplies them by `Held.scales`.
        scratch: it uses `HeldRows.scratch`.
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
    step: Rows

    def __init__(self, held: Held, options: Options) -> None:
        """Prepare for the matrices of `held`; `options` are the user's settings by name."""
        self.held = held
        self.settings = {name: options[name] for name in self.numbers}

    def zeros(
        self,
        index: int,
        parameter: Tensor,
    ) -> Tensor:
        """The first state of each slot for a matrix, fp32, a DTensor as `parameter` is."""
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

    def begin(self, step: Rows) -> None:
        """Begin a step. Collective if numbers of other ranks are needed."""
        self.step = step

    def before(self, part: HeldRows) -> None:
        """Change gradients in `part.rows` in place, before momentum takes them."""

    def after(self, part: HeldRows) -> None:
        """Change updates in `part.rows`, or weights, in place."""

    def end(self) -> None:
        """End a step, after its exchange. Collective if `begin` is."""
