"""What a rule is: the part of a step that makes one variant of Muon differ from another.

It sees this rank's rows before they are orthogonalised (`before`), the whole update of a matrix on
its owner (`normalize`), and the rows of the update when they are back (`after`). `ShardedMuon`
knows none by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, override

import torch
import torch.distributed as dist

from megatron_muon.core.layout import Layout, Rectangle, Shard
from megatron_muon.core.probe import Probe


@dataclass(frozen=True)
class Held:
    """The matrices of an optimizer, and what this rank has of them."""

    layout: Layout  # who holds which rows; the same on every rank
    group: dist.ProcessGroup  # of the layout
    device: torch.device  # where weights and gradients lie
    experts: Sequence[int]  # how many matrices each of the layout's matrices stacks
    # of `shards`, where empty ones have columns or rows of their own
    rectangles: Sequence[Rectangle] | None = None
    # factors of each update, (rows, 1) fp32, where a rule applies them
    scales: Sequence[torch.Tensor] = ()
    replicated: bool = False  # every rank holds whole matrices and all of their state
    repeated: bool = False  # every rank orthogonalises every matrix
    over_tp: bool = True  # matrices are whole over tensor-parallel ranks
    shards: Sequence[Shard] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", self.layout.held(self.group.rank()))


class Step(NamedTuple):
    """A step that begins."""

    groups: Sequence[dict[str, Any]]  # the parameter group of each matrix
    # this rank's part of each matrix's slot of a name, (rows, cols) fp32
    state: Callable[[str], list[torch.Tensor]]
    probe: Probe


@dataclass(frozen=True)
class Part:
    """Consecutive matrices of a wave, of which this rank has rows, fp32, `(rows, cols)` each."""

    indices: Sequence[int]
    parameters: Sequence[torch.Tensor]
    groups: Sequence[dict[str, Any]]
    # rows one after the other: gradients before the exchange, then updates, NaN if not finite
    flat: torch.Tensor
    rows: list[torch.Tensor]  # views of it
    state: list[torch.Tensor]  # momentum before the exchange, weights after it
    flat_state: torch.Tensor | None = None  # all of it, in the order of `flat`, where it lies so
    # before the exchange: which matrices no rank updates, bool; None: none
    failed: torch.Tensor | None = None

    def by_group(
        self,
    ) -> Iterator[
        tuple[
            dict[str, Any],
            list[torch.Tensor],
            list[torch.Tensor],
        ]
    ]:
        """Each parameter group with the rows and the state of its matrices; as one flat pair where there is one."""
        if len(set(map(id, self.groups))) == 1:
            flat = self.flat_state
            yield (
                (self.groups[0], self.rows, self.state)
                if flat is None
                else (self.groups[0], [self.flat], [flat])
            )
            return
        chosen: dict[int, list[int]] = {}
        for place, group in enumerate(self.groups):
            chosen.setdefault(id(group), []).append(place)
        for places in chosen.values():
            rows, state = (
                [tensors[place] for place in places] for tensors in (self.rows, self.state)
            )
            yield self.groups[places[0]], rows, state


class Rule:
    """One part of what a step does; this one does nothing.

    In a step `begin` comes first, then for each wave `before`, `normalize` on the ranks that
    orthogonalise, and `after`; `end` comes last. `options` is what the user has set, by name.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the state that it keeps for each parameter, beside momentum."""

    unscaled: ClassVar[bool] = False
    """It takes updates unscaled, and multiplies them by `Held.scales`."""

    normalize: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None
    """Changes the whole update `(rows, cols)` fp32 of the matrix with this index in place, on the rank that
    orthogonalises it; the last argument is whether it is finite, a bool. None where whole updates are not needed: teams
    have none."""

    def __init__(self, held: Held, options: Mapping[str, Any]) -> None:
        self.held = held
        self.settings: dict[str, float] = {}
        """Numbers that each parameter group has, and a checkpoint keeps, with their defaults."""

    def zeros(self, slot: str, index: int, parameter: torch.Tensor) -> torch.Tensor:
        """A slot of a matrix's state at the start, fp32, a DTensor as `parameter` is."""
        return torch.zeros_like(parameter.detach(), dtype=torch.float32)

    def check(self, groups: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        """Refuse, by a UserError, numbers that it cannot work with; asked at construction and in each step."""

    def check_weights(self, weights: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Refuse, by a UserError, weights that it cannot work with. Collective; may wait for the device."""

    def begin(self, step: Step) -> None:
        """A step begins. Collective where numbers of other ranks are needed."""

    def before(self, part: Part) -> None:
        """Change gradients in `part.rows` towards what is orthogonalised, in place."""

    def after(self, part: Part) -> None:
        """Change updates in `part.rows`, or weights, in place."""

    def end(self) -> None:
        """The exchange of a step is over. Collective where `begin` is."""


class Measure(Rule):
    """Shows the step's probe updates as they are here: scaled, before the learning rate and decay."""

    @override
    def begin(self, step: Step) -> None:
        self._probe = step.probe

    @override
    def after(self, part: Part) -> None:
        self._probe.updates(
            part.indices, part.rows, lambda index: len(self.held.shards[index].holders)
        )
