"""The passes of a step by kernels, a launch for a whole wave: plain Muon on a GPU."""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, override

import torch
from torch import Tensor

from megatron_muon.core import kernels
from megatron_muon.core.group_numbers import acts
from megatron_muon.core.passes import DECOUPLED, Passes
from megatron_muon.core.probe import Probe
from megatron_muon.core.rows import Rows
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.tiles import FLAT, TALL, Tiles, tiles_of
from megatron_muon.core.wave import Wave

_FACTORS = 256
"""Slots of a program that finds factors."""

_NUMBERS = 4
"""Of a group: share of momentum, one minus it, learning rate, decay."""


_LIBRARY = torch.library.Library("megatron_muon", "FRAGMENT")
_LIBRARY.define(
    "launch(str kernel, int programs, Tensor(a!)[] tensors, int nbytes, int[] constants) -> ()"
)
"""A launch of a kernel, as an operation of torch that fake tensors have too; `nbytes` is what it
reads and writes."""


@torch.library.impl(_LIBRARY, "launch", "CompositeExplicitAutograd")
def _launched(
    kernel: str, programs: int, tensors: list[Tensor], nbytes: int, constants: list[int]
) -> None:
    getattr(kernels, kernel)[(programs,)](*tensors, *constants)


@torch.library.register_fake("megatron_muon::launch", lib=_LIBRARY)
def _launched_on_paper(*_: Any) -> None:
    pass


_launch = torch.ops.megatron_muon.launch.default


def _run(
    kernel: str,
    tiles: Tiles,
    tensors: list[Tensor],
    element_bytes: int,
    flags: Sequence[bool] = (),
    aligned: int = 16,
) -> None:
    """Launch a kernel on tiles, which moves so many bytes for an element."""
    constants = [*map(int, flags), *(TALL if tiles.tall else FLAT), int(tiles.tall)]
    constants.append(min(aligned, tiles.aligned))
    given = [tiles.tiles, tiles.pieces, *tensors]
    _launch(kernel, tiles.tiles.numel(), given, tiles.numel * element_bytes, constants)


def _send(target: Tensor, values: Sequence[float]) -> None:
    """Copy numbers of the host to a device, which it need not wait for."""
    host = torch.tensor(values, dtype=target.dtype)
    if target.is_cuda:
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)


@dataclass
class _Tables:
    """A wave's tables.

    Attributes:
        advance, descend: tiles between this rank's matrices and the lane, or a batch's stacks.
        fill, drain: tiles between lane and stacks.
        largest: of each slot, bits of an fp32 magnitude as int32.
    """

    advance: list[Tiles]
    descend: list[Tiles]
    fill: list[Tiles]
    drain: list[Tiles]
    largest: Tensor


@dataclass
class _Addresses:
    """Addresses of one kind of tensors, one for each held matrix, on host and device."""

    on_device: Tensor
    seen: list[int] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    aligned: int = 1

    def look(self, tensors: Sequence[Tensor | None]) -> None:
        """Take new addresses, if some tensor has moved; they are contiguous and of one dtype."""
        found = [0 if one is None else one.data_ptr() for one in tensors]
        if found == self.seen:
            return
        self.dtype = next((one.dtype for one in tensors if one is not None), self.dtype)
        _send(self.on_device, found)
        self.seen = found
        bits = functools.reduce(operator.or_, found, 32)
        self.aligned = max(1, (bits & -bits) // 2)


def _alike(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients, contiguous and of one dtype: copies, in fp32, of those that are not."""
    dtypes = {one.dtype for one in gradients if one is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if dtype not in (torch.float32, torch.bfloat16):
        dtype = torch.float32
    return [None if one is None else one.to(dtype).contiguous() for one in gradients]


class FusedPasses(Passes):
    """Passes without rules, whose momentum and weights are on the device."""

    def __init__(
        self, rows: Rows, rules: Sequence[Rule], *, nesterov: bool = True, decay: str = DECOUPLED
    ) -> None:
        assert not rules and decay == DECOUPLED
        super().__init__(rows, rules, nesterov=nesterov, decay=decay)
        self._tables: dict[int, _Tables | None] = {}
        self._is_measured = False
        self._places = {index: place for place, index in enumerate(rows.held)}
        order = rows.order
        self._gradients = _Addresses(torch.zeros_like(order))
        self._weights = _Addresses(torch.zeros_like(order))
        self._momenta = _Addresses(torch.zeros_like(order))
        self._momenta.look([rows.momentum[index] for index in rows.held])
        self._groups = torch.zeros_like(order, dtype=torch.int32)
        self._of_groups: list[int] = []
        self._numbers = order.new_zeros((0, _NUMBERS), dtype=torch.float32)
        self._decays = False

    @override
    def begin(self, probe: Probe) -> None:
        super().begin(probe)
        self._is_measured = type(probe).momentum is not Probe.momentum
        held = self.rows.held
        self._regular = _alike([self.rows.gradients[index] for index in held])
        self._gradients.look(self._regular)
        self._weights.look([self.rows.weights(index) for index in held])
        self._read_groups([self.rows.groups[index] for index in held])

    def _read_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        known: dict[int, int] = {}
        of_groups = [known.setdefault(id(group), len(known)) for group in groups]
        if of_groups != self._of_groups:
            _send(self._groups, of_groups)
            self._of_groups = of_groups
        different = list({id(group): group for group in groups}.values())
        self._decays = any(acts(group["weight_decay"]) for group in different)
        numbers = []
        for group in different:
            share = group["momentum"]
            numbers += [share, 1.0 - share, group["lr"], group["weight_decay"]]
        if self._numbers.numel() != len(numbers):
            self._numbers = self._numbers.new_zeros((len(different), _NUMBERS))
        flat = self._numbers.view(-1)
        _send(flat, [0.0 if torch.is_tensor(one) else one for one in numbers])
        for place, one in enumerate(numbers):
            if torch.is_tensor(one):
                flat[place].copy_(one)

    def _tables_of(self, wave: Wave) -> _Tables | None:
        """A wave's tables; None where torch operations take it: rows have gaps, or are measured."""
        if id(wave) not in self._tables:
            weights = [self.rows.weights(held.of) for held in wave.route.rows]
            is_dense = all(one.is_contiguous() for one in weights)
            self._tables[id(wave)] = self._make_tables(wave) if is_dense else None
        return None if self._is_measured else self._tables[id(wave)]

    def _make_tables(self, wave: Wave) -> _Tables:
        route = wave.route
        device = wave.lane.device
        starts = [held.start for held in route.rows]
        firsts = []
        slot_numbers = []
        for stack in route.stacks:
            size = stack.kind.smaller * stack.kind.length
            for number in range(len(stack.slots)):
                slot_numbers.append(len(firsts))
                firsts.append(stack.start + number * size)

        def by_matrix(copies: Any) -> tuple[list[Any], list[int]]:
            moved, places = [], []
            for copy in copies:
                held = route.rows[bisect.bisect_right(starts, copy.source) - 1]
                moved.append(copy.moved(-held.start, 0))
                places.append(self._places[held.of])
            return moved, places

        def slots(copies: Any) -> list[int]:
            return [bisect.bisect_right(firsts, copy.target) - 1 for copy in copies]

        near = route.out.near
        of_batch = slots(near) if route.is_batch else None
        return _Tables(
            tiles_of(*by_matrix(near), device, of_batch),
            tiles_of(*by_matrix(route.back.near), device),
            tiles_of(route.out.far, slots(route.out.far), device),
            tiles_of(route.back.far, slots(route.back.far), device),
            torch.zeros(len(firsts), dtype=torch.int32, device=device),
        )

    @override
    def advance(self, wave: Wave) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            return super().advance(wave)
        rows = self.rows
        out = wave.stack_memory if wave.route.is_batch else wave.lane
        with self._probe.phase("momentum"):
            for tiles in tables.advance:
                tensors = [
                    rows.order if tiles.slots is None else tiles.slots,
                    rows.order,
                    self._gradients.on_device,
                    self._momenta.on_device,
                    self._groups,
                    self._numbers,
                    self._numbers if rows.failed is None else rows.failed,
                    out,
                    tables.largest,
                ]
                half = self._gradients.dtype is torch.bfloat16
                may_fail = rows.failed is not None
                flags = [half, self._nesterov, may_fail, tiles.slots is not None]
                aligned = min(self._gradients.aligned, self._momenta.aligned)
                element_bytes = self._gradients.dtype.itemsize + 8 + out.dtype.itemsize
                _run("advance", tiles, tensors, element_bytes, flags, aligned)

    @override
    def fill(self, wave: Wave) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            return super().fill(wave)
        for tiles in tables.fill:
            tensors = [wave.lane, wave.stack_memory, tables.largest]
            _run("fill", tiles, tensors, 2 * wave.lane.dtype.itemsize)

    @override
    def measure(self, wave: Wave) -> Tensor:
        tables = self._tables_of(wave)
        if tables is None:
            return super().measure(wave)
        bits = tables.largest
        if wave.agreement.shared:
            wave.agreement.agree(bits.view(torch.float32).view(-1, 1, 1))
        found = torch.empty(len(bits), 1, 1, dtype=torch.float32, device=bits.device)
        if len(bits):
            _launch(
                "factors",
                -(-len(bits) // _FACTORS),
                [bits, found],
                8 * len(bits),
                [len(bits), _FACTORS],
            )
        return found

    @override
    def drain(self, wave: Wave) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            return super().drain(wave)
        for tiles in tables.drain:
            tensors = [wave.lane, wave.stack_memory]
            _run("drain", tiles, tensors, 2 * wave.lane.dtype.itemsize)

    @override
    def descend(self, wave: Wave) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            return super().descend(wave)
        updates = wave.stack_memory if wave.route.is_batch else wave.lane
        with self._probe.phase("apply"):
            for tiles in tables.descend:
                tensors = [
                    self._weights.on_device,
                    self._groups,
                    self._numbers,
                    updates,
                    self.rows.first_elements,
                ]
                flags = [self._weights.dtype is torch.bfloat16, self._decays]
                element_bytes = 2 * self._weights.dtype.itemsize + updates.dtype.itemsize
                _run("descend", tiles, tensors, element_bytes, flags, self._weights.aligned)
