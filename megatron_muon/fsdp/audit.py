"""Audits of a run: a step on shards is compared with the same step on one whole matrix.

Around an audited step the first rank of a layout collects gradient, weight and state of one matrix,
by broadcasts of its rectangles; `fsdp/whole_step.py` compares. Each audit draws another matrix.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.build import GATHERED, LOCAL
from megatron_muon.core.probe import Probe
from megatron_muon.core.rows import MOMENTUM
from megatron_muon.core.rules.held import Held
from megatron_muon.core.rules.second_moments import MOMENT2
from megatron_muon.core.slices import BlockSlice
from megatron_muon.fsdp.whole_step import GRADIENT, WEIGHT, Subject, Tensors, WholeStep
from megatron_muon.ranks import is_first_rank, numbers_of_all_ranks, of_all_ranks_if_any


class Audit:
    """Audits the steps of a part.

    Args:
        part: the matrices, of which this rank has rows.
        held: their layout over all ranks that hold them.
        interval: audit every so many steps, and the first one after a start or load; 0 is never.
        whole_step: takes a step on a whole matrix.

    Attributes:
        steps: taken so far; to be set where a run is resumed.
        is_due: the next step is audited whatever its number.
        line: report of the step's audit, on the first rank; empty without one.
        faults: found in it.
    """

    def __init__(self, part: Any, held: Held, interval: int, whole_step: WholeStep) -> None:
        self._part = part
        self._held = held
        self._interval = interval
        self._whole_step = whole_step
        self._rank = held.group.rank()
        self._index = -1
        self.steps = 0
        self.is_due = interval > 0
        self.line = ""
        self.faults: list[str] = []

    @property
    def is_audited(self) -> bool:
        """The latest step is audited, on all ranks."""
        return self._index >= 0

    def begin(self, probe: Probe) -> Any:
        """Collect a matrix if the step that begins is audited; returns its probe. Collective."""
        self.steps += 1
        self.line = ""
        self.faults = []
        self._index = -1
        if not self._interval or not (self.is_due or self.steps % self._interval == 0):
            return probe
        number = self.steps if self.is_due else self.steps // self._interval
        self.is_due = False
        matrices = self._held.layout.matrices
        self._index = drawn(number, len(matrices))
        self._matrix = matrices[self._index]
        self._before = self._collect(GRADIENT)
        self._subject = Subject(
            self._index,
            self.steps,
            self._matrix,
            self._part.rows.groups[self._index],
            self._part.method_state.of_matrix(self._index),
            self._part.waves.method.device,
        )
        self._elements = Counter[tuple[int, int]]()
        return counting(probe, self._elements)

    @torch.no_grad()
    def end(self) -> None:
        """Compare after the step. Collective."""
        if not self.is_audited:
            return
        after = self._collect()
        bits = 0
        for rows in self._rows().values():
            content = rows.contiguous().view(-1).view(torch.uint8)
            bits = zlib.crc32(content.cpu().numpy(), bits)
        iterated = [self._elements[self._index, n] for n in range(len(self._matrix.blocks))]
        of_ranks = numbers_of_all_ranks([bits, *iterated], self._held.group)
        if self._rank == 0:
            self._judge(after, of_ranks)
        self._before = {}
        if self.faults or (self.line and is_first_rank()):
            kind = "warning: " if self.faults else ""
            print(f"megatron-muon: {kind}{self.line}", flush=True)

    def faults_of_all(self) -> list[str]:
        """The line of the step's audit on every rank, if it found faults. Collective."""
        if not self.is_audited:
            return []
        lines = of_all_ranks_if_any(self.line if self.faults else "", self._held.group)
        return [line for line in lines if line]

    def _judge(self, after: Tensors, of_ranks: Sequence[Sequence[int]]) -> None:
        """Fill in the report."""
        rows, cols = self._matrix.shape
        self._check_replicas([bits for bits, *_ in of_ranks])
        if self._part.captured is None:  # a replayed graph calls no probe
            self._check_iterations([elements for _, *elements in of_ranks])
        try:
            found, faults = self._whole_step.compare(self._subject, self._before, after)
        except torch.OutOfMemoryError:
            found, faults = ["update not checked: out of memory"], []
        self.faults += faults
        copies = max(len(shard.holders) for shard in self._matrix.shards)
        if copies > 1:
            found.append(f"{copies} replicas equal")
        shown = ", ".join(self.faults or found)
        self.line = f"audit of step {self.steps}: {self._matrix.name} ({rows} x {cols}): {shown}"

    def _check_replicas(self, bits: Sequence[int]) -> None:
        for shard in self._matrix.shards:
            others = [rank for rank in shard.replicas if bits[rank] != bits[shard.rank]]
            if others:
                ranks = ", ".join(map(str, others))
                self.faults.append(f"ranks {ranks} and {shard.rank}, replicas, have other bits")

    def _check_iterations(self, of_ranks: Sequence[Sequence[int]]) -> None:
        times = len(of_ranks) if self._part.waves.scheme in (LOCAL, GATHERED) else 1
        for number, shape in enumerate(self._matrix.blocks):
            done = sum(elements[number] for elements in of_ranks) / math.prod(shape)
            if done != times:
                self.faults.append(f"block {number} was orthogonalized {done / times:g} times")

    def _rows(self, *others: str) -> Tensors:
        """This rank's rows by slot; nothing if it holds none."""
        rows = self._part.rows
        if not self._matrix.held_by(self._rank).numel:
            return {}
        found = {WEIGHT: rows.kept_weights.read(self._index)}
        if self._part.has_momentum:
            found[MOMENTUM] = rows.kept_momentum.read(self._index)
        if self._whole_step.moment2:
            found[MOMENT2] = rows.state(MOMENT2)[self._index]
        if others:
            gradient = rows.gradients[self._index]
            if gradient is None:
                gradient = torch.full_like(found[WEIGHT], math.nan)
            found[GRADIENT] = gradient
        return found

    def _collect(self, *others: str) -> Tensors:
        """Whole tensors by slot, `(rows, cols)` or with 1 for either, fp32 on the host.

        Only the first rank has elements. Collective.
        """
        mine = self._rows(*others)
        shapes = {WEIGHT: self._matrix.shape}
        if self._part.has_momentum:
            shapes[MOMENTUM] = self._matrix.shape
        if self._whole_step.moment2:
            shapes[MOMENT2] = self._whole_step.moment2_shape(self._index, self._matrix)
        shapes |= dict.fromkeys(others, self._matrix.shape)
        whole = {}
        for slot, shape in shapes.items():
            whole[slot] = torch.empty(shape if self._rank == 0 else (0, 0), dtype=torch.float32)
            for shard in self._matrix.shards:
                rows, cols = shard.region(shape)
                part = mine.get(slot)
                if self._rank != shard.rank or part is None:
                    part = torch.empty(len(rows), len(cols), dtype=torch.float32)
                part = part.detach().to(self._part.device, torch.float32).contiguous()
                if shard.rank:  # else the first rank has it
                    dist.broadcast(part, group=self._held.group, group_src=shard.rank)
                if self._rank == 0:
                    whole[slot][rows.start : rows.stop, cols.start : cols.stop] = part
        return whole


def counting(probe: Probe, elements: Counter[tuple[int, int]]) -> Probe:
    """A probe that also counts the elements that this rank orthogonalizes, by matrix and block.

    It has the methods of the probe's class, which passes look at, and the probe's attributes.
    """

    class Counting(type(probe)):  # type: ignore[misc]
        def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
            for slot in slots:
                elements[slot.index, slot.block] += slot.numel
            super().orthogonalized(slots)

    made: Probe = object.__new__(Counting)
    made.__dict__ = probe.__dict__
    return made


def drawn(number: int, count: int) -> int:
    """The matrix of an audit: `count` consecutive audits draw each once, neighbors far apart."""
    stride = int(0.618 * count) or 1
    while math.gcd(stride, count) > 1:
        stride += 1
    return number * stride % count
