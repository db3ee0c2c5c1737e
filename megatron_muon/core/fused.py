"""The passes of a step by kernels, a launch for a whole wave: `core.kernels`, on a GPU."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, override

import torch
from torch import Tensor

from megatron_muon.core import launches, wave_tables
from megatron_muon.core.copies import Copy
from megatron_muon.core.group_numbers import acts
from megatron_muon.core.passes import COUPLED, Passes
from megatron_muon.core.probe import Probe
from megatron_muon.core.rows import Rows
from megatron_muon.core.rules.cautious import CautiousDecay
from megatron_muon.core.rules.hyperball import Hyperball
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.rules.second_moments import MOMENT2, AdaMuon, NorMuon
from megatron_muon.core.tiles import Tiles, tiles_of
from megatron_muon.core.wave import Wave, WaveStack
from megatron_muon.core.wave_tables import Tables
from megatron_muon.errors import UserError

_NUMBERS = 6
"""Numbers of a group, as `kernels.GROUP` has them."""

_NO_DECAY, _DECOUPLED, _CAUTIOUS = range(3)
_OF_ELEMENTS, _OF_NEURONS = 1, 2
"""Flags of kernels: kinds of decay, and of second moments."""

_FUSED: tuple[type[Rule], ...] = (AdaMuon, NorMuon, CautiousDecay, Hyperball)
"""Rules that the kernels have."""


def can_fuse(device: torch.device, rules: Sequence[Rule], decay: str) -> bool:
    """True if kernels have these rules, and this decay."""
    known = all(type(rule) in _FUSED for rule in rules)
    return launches.has_kernels(device) and known and decay != COUPLED


@dataclass
class _Sent:
    """Numbers of the host on a device, sent again when they change."""

    on_device: Tensor
    seen: Sequence[float] = ()
    _host: Tensor | None = None

    def look(self, values: Sequence[float]) -> bool:
        """Take values; True if they are new."""
        if values == self.seen:
            return False
        host = torch.tensor(values, dtype=self.on_device.dtype)
        if self.on_device.is_cuda:
            host = host.pin_memory()
        self.on_device.copy_(host, non_blocking=True)
        self._host = host  # the copy may not have been made yet
        self.seen = values
        return True


@dataclass
class _Addresses(_Sent):
    """Addresses of one kind of tensors, one for each held matrix.

    `aligned`: elements of two bytes, at most 16, of which addresses are multiples.
    """

    dtype: torch.dtype = torch.float32
    aligned: int = 1

    @override
    def look(self, values: Sequence[Any]) -> bool:
        has_moved = super().look(values)
        if has_moved:
            bits = functools.reduce(operator.or_, values, 32)
            self.aligned = max(1, (bits & -bits) // 2)
        return has_moved

    def look_at(self, tensors: Sequence[Tensor | None]) -> bool:
        """Take the addresses of tensors of one dtype; True if some tensor has moved."""
        self.dtype = next((one.dtype for one in tensors if one is not None), self.dtype)
        return self.look([0 if one is None else one.data_ptr() for one in tensors])

    @property
    def is_half(self) -> bool:
        """They are bf16."""
        return self.dtype is torch.bfloat16


def _alike(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients, contiguous and of one dtype: copies, in fp32, of those that are not."""
    dtypes = {one.dtype for one in gradients if one is not None}
    dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    have_gaps = any(not (one is None or one.is_contiguous()) for one in gradients)
    if not have_gaps and dtypes <= {dtype}:
        return gradients
    return [None if one is None else one.to(dtype).contiguous() for one in gradients]


class FusedPasses(Passes):
    """Passes whose momentum and weights are on the device.

    Args:
        waves: of the step, with their batches.
    """

    def __init__(
        self,
        rows: Rows,
        rules: Sequence[Rule],
        *,
        waves: Sequence[Wave] = (),
        **options: Any,
    ) -> None:
        super().__init__(rows, rules, **options)
        self._waves = [each for wave in waves for each in (wave, *wave.batches)]
        self._momentum = rows.kept_momentum
        self._tables: dict[int, Tables] = {}
        self._is_measured = self._is_under_way = False
        self._dense: list[tuple[bool, torch.dtype]] | None = None
        self._regular: list[Tensor | None] = []
        """Gradients, with copies of those that kernels do not take."""
        by_type: Mapping[type[Rule], Any] = {type(rule): rule for rule in rules}
        self._divisor: AdaMuon | None = by_type.get(AdaMuon)
        self._norms: NorMuon | None = by_type.get(NorMuon)
        self._sphere: Hyperball | None = by_type.get(Hyperball)
        self._is_cautious = CautiousDecay in by_type
        order = rows.order

        def addresses() -> _Addresses:
            return _Addresses(torch.zeros_like(order))

        self._gradients, self._weights = addresses(), addresses()
        self._momenta, self._scales = addresses(), addresses()
        self._moments, self._row_scales = addresses(), addresses()
        self._groups = _Sent(torch.zeros_like(order, dtype=torch.int32))
        self._all_groups = _Sent(order.new_zeros(len(rows.names), dtype=torch.int32))
        self._seeds = _Sent(order.new_zeros(4 * len(order), dtype=torch.int32))
        self._numbers = _Sent(order.new_zeros(0, dtype=torch.float32))
        self._decays = False

    @override
    def look(self) -> None:
        held = self.rows.held
        gradients = [self.rows.gradients[index] for index in held]
        self._regular = _alike(gradients)
        is_gpu = self.rows.order.is_cuda
        if self._regular is not gradients and is_gpu and torch.cuda.is_current_stream_capturing():
            raise UserError("cuda_graph=True needs contiguous gradients of one dtype, fp32 or bf16")
        self._gradients.look_at(self._regular)
        weights = [self.rows.weights(index) for index in held]
        if self._weights.look_at(weights) or self._dense is None:
            dense = [(one.is_contiguous(), one.dtype) for one in weights]
            if dense != self._dense:
                self._dense = dense
                self._make_tables()
        self._read_groups(self.rows.groups)
        if self._momentum.format:
            self._seeds.look([seed for index in held for seed in self._momentum.seeds(index)])

    @override
    def begin(self, probe: Probe) -> None:
        self._is_measured = type(probe).momentum is not Probe.momentum
        self.look()
        if self._is_under_way:  # an error ended the step before
            for tables in self._tables.values():
                tables.reset()
        self._is_under_way = True
        super().begin(probe)

    @override
    def end(self) -> None:
        super().end()
        self._regular = []
        self._is_under_way = False

    @override
    def _mark_failed(self, failed: Tensor) -> None:
        """Make numbers of matrices NaN whose gradient is missing here, or not finite."""
        tensors = [self.rows.order, self._gradients.on_device, failed]
        flags = [self._gradients.is_half]
        element_bytes = self._gradients.dtype.itemsize
        self._shards.launch("find", tensors, element_bytes, flags, self._gradients.aligned)

    def _make_tables(self) -> None:
        held = self.rows.held
        self._tables.clear()
        places = {index: place for place, index in enumerate(held)}
        assert self._dense is not None
        whole = []
        dtypes = {dtype for _, dtype in self._dense}
        is_int8 = self._momentum.format == wave_tables.INT8
        is_known = len(dtypes) <= 1 and dtypes <= {torch.float32, torch.bfloat16}
        for wave in self._waves:
            is_dense = is_known
            for of, shard, _ in wave.route.rows:
                is_dense = is_dense and self._dense[places[of]][0]
                sides = (shard.rows, shard.cols, shard.cols), (shard.cols, 1, 1)
                whole.append(Copy(0, 0, ((1, 0, 0), *sides)))
            if is_dense and (not is_int8 or wave_tables.keeps_scales(wave)):
                tables = Tables(wave, places, norms=self._norms, sphere=self._sphere)
                self._tables[id(wave)] = tables
        self._shards = tiles_of(whole, range(len(whole)), self.rows.order.device)
        found = [self._momentum.addresses(index) for index in held]
        self._momenta.look([elements for elements, _ in found])
        self._scales.look([scales for _, scales in found])
        second = self._divisor or self._norms
        if second is not None:
            self._row_scales.look_at([second.row_scales[index] for index in held])
        if self._divisor is not None:
            moments = self.rows.state(MOMENT2)
            self._moments.look_at([moments[index] for index in held])
        elif self._norms is not None:
            first_neurons = []
            for index in held:
                start = self._norms.starts[index]
                first_neurons.append(2 * start + self._norms.is_by_columns(index))
            self._moments.look(first_neurons)
        if self._sphere is not None:
            self._sphere.move = self._move

    def _read_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        known: dict[int, int] = {}
        of_matrices = [known.setdefault(id(group), len(known)) for group in groups]
        self._all_groups.look(of_matrices)
        self._groups.look([of_matrices[index] for index in self.rows.held])
        different = list({id(group): group for group in groups}.values())
        self._decays = any(acts(group["weight_decay"]) for group in different if group)
        numbers: list[Any] = []
        for group in different:
            if not group:  # of a parameter that is in no group, and has no rows here
                numbers += [0.0] * _NUMBERS
                continue
            share, beta2 = group["momentum"], group.get("beta2", 0.0)
            numbers += [share, 1.0 - share, group["lr"], group["weight_decay"]]
            numbers += [1.0 - beta2, group.get("eps", 0.0)]
        if self._numbers.on_device.numel() != len(numbers):
            self._numbers = _Sent(self._numbers.on_device.new_zeros(len(numbers)))
        self._numbers.look([0.0 if torch.is_tensor(one) else one for one in numbers])
        for place, one in enumerate(numbers):
            if torch.is_tensor(one):
                self._numbers.on_device[place].copy_(one)

    def _tables_of(self, wave: Wave) -> Tables | None:
        """A wave's tables; None where torch operations take it: rows have gaps, or are measured."""
        return None if self._is_measured else self._tables.get(id(wave))

    @override
    def advance(self, wave: Wave) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            return super().advance(wave)
        rows = self.rows
        out = wave.stack_memory if wave.route.is_batch else wave.lane
        failed = self._numbers.on_device if rows.failed is None else rows.failed
        stored = self._momentum.format
        tensors = [
            rows.order,
            self._gradients.on_device,
            self._momenta.on_device,
            self._scales.on_device,
            self._seeds.on_device,
            self._groups.on_device,
            self._numbers.on_device,
            failed,
            out,
            *tables.levels,
        ]
        flags = [self._gradients.is_half, stored, self._nesterov, rows.failed is not None]
        flags += [wave.route.is_batch, not wave.agreement.is_among_ranks, self._levels]
        element_bytes = self._gradients.dtype.itemsize + out.dtype.itemsize
        element_bytes += 2 * (4, 2, 1)[stored]
        aligned = min(self._gradients.aligned, self._momenta.aligned)
        with self._probe.phase("momentum"):
            tables.advance.launch("advance", tensors, element_bytes, flags, aligned)

    @override
    def fill(self, wave: Wave) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            return super().fill(wave)
        tensors = [wave.lane, wave.stack_memory, *tables.levels]
        flags = [not wave.agreement.is_among_ranks, self._levels]
        tables.fill.launch("fill", tensors, 2 * wave.lane.dtype.itemsize, flags)

    @override
    def measure(self, wave: Wave) -> Tensor:
        """As `Passes.measure`; of levelled stacks, which are multiplied already, 1 where squares fit."""
        tables = self._tables_of(wave)
        if tables is None:
            return super().measure(wave)
        if wave.agreement.is_among_ranks:
            wave.agreement.agree(tables.largest.view(torch.float32).view(-1, 1, 1))
            tables.level(wave.stack_memory, multiplies=self._levels)
        return tables.factors

    @override
    def scale(self, wave: Wave, stack: WaveStack, factors: Tensor) -> None:
        if self._tables_of(wave) is None:
            super().scale(wave, stack, factors)

    @override
    def finish(self, wave: Wave, factors: Tensor) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            super().finish(wave, factors)
        elif tables.neurons is not None and not self._is_direct(wave):
            groups = self._all_groups.on_device, self._numbers.on_device
            tables.neurons.advance(wave.stack_memory, tables.factors, groups)
            tables.neurons.normalize(wave.stack_memory)

    def _is_direct(self, wave: Wave) -> bool:
        """Weights descend right along the updates that the method leaves, with NorMuon's factors."""
        return wave.route.is_batch and len(wave.stacks) == 1 and wave.keeps_dtype

    @override
    def take(self, wave: Wave, number: int, updates: Tensor) -> Tensor | None:
        """Let weights descend along a batch's updates from where they are, or drain a wave's later.

        Updates then lie in the memory of the stack before; that of their stack is spare.
        """
        tables = self._tables_of(wave)
        blocks = wave.stacks[number].blocks
        if tables is not None and tables.neurons is not None and self._is_direct(wave):
            groups = self._all_groups.on_device, self._numbers.on_device
            tables.neurons.advance(updates, tables.factors, groups)
            self._descend(tables, tables.descend, updates, moment=_OF_NEURONS)
        elif tables is None or not tables.parts:
            super().take(wave, number, updates)
        elif wave.route.is_batch:
            if not wave.keeps_dtype:  # as if they had travelled
                super().take(wave, number, updates)
                updates = blocks
            self._descend(tables, tables.parts[number], updates)
        else:
            is_last = number == wave.order[-1]
            rows = 0
            if updates is not blocks:
                rows = tables.rows_that_stay(updates, is_last=is_last)
            if rows:
                tables.leave(number, updates, blocks, rows)
                tables.spare = blocks
            else:
                super().take(wave, number, updates)
                tables.left.append((tables.parts[number], blocks))
            return tables.spare
        return None

    @override
    def drain(self, wave: Wave) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            super().drain(wave)
            return
        left = tables.left if tables.parts else [(tables.drain, wave.stack_memory)]
        for tiles, updates in left:
            element_bytes = wave.lane.dtype.itemsize + updates.dtype.itemsize
            tiles.launch("drain", [wave.lane, updates], element_bytes)
        tables.left.clear()
        tables.spare = None

    @override
    def descend(self, wave: Wave) -> None:
        tables = self._tables_of(wave)
        if tables is None:
            super().descend(wave)
        elif not wave.route.is_batch:
            self._descend(tables, tables.descend, wave.lane)
        elif not tables.parts and not self._is_direct(wave):
            self._descend(tables, tables.descend, wave.stack_memory)

    def _descend(
        self,
        tables: Tables,
        tiles: Tiles,
        updates: Tensor,
        moment: int = 0,
    ) -> None:
        if self._divisor is not None:
            moment = _OF_ELEMENTS
        holds = self._sphere is not None
        tensors = [
            self._weights.on_device,
            self._groups.on_device,
            self._numbers.on_device,
            updates,
            self.rows.first_elements,
            self._moments.on_device,
            self._row_scales.on_device,
            self._numbers.on_device if self._norms is None else self._norms.moments_of_neurons[2],
            self._gradients.on_device,
            tables.partial(tiles) if holds else self._numbers.on_device,
        ]
        decay = _CAUTIOUS if self._is_cautious else _DECOUPLED
        flags: list[int] = [self._weights.is_half, self._gradients.is_half]
        flags += [decay if self._decays else _NO_DECAY, moment, holds]
        weight_bytes = self._weights.dtype.itemsize
        element_bytes = updates.dtype.itemsize + weight_bytes
        element_bytes += self._gradients.dtype.itemsize if holds else weight_bytes
        element_bytes += 8 if moment == _OF_ELEMENTS else 0
        aligned = self._weights.aligned
        if holds:
            aligned = min(aligned, self._gradients.aligned)
        with self._probe.phase("apply"):
            tiles.launch("descend", tensors, element_bytes, flags, aligned)
            if self._sphere is not None:
                tables.add_up(tiles, self._sphere.sums)

    def _move(self, of_weights: Tensor, of_updates: Tensor) -> None:
        """Take weights along the updates that are in the gradients' place: `Hyperball.end`."""
        if self._is_measured:
            return
        tensors = [
            self.rows.order,
            self._weights.on_device,
            self._gradients.on_device,
            of_weights,
            of_updates,
        ]
        flags = [self._weights.is_half, self._gradients.is_half]
        element_bytes = 2 * self._weights.dtype.itemsize + self._gradients.dtype.itemsize
        aligned = min(self._weights.aligned, self._gradients.aligned)
        for tables in self._tables.values():
            tables.descend.launch("move", tensors, element_bytes, flags, aligned)
