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
from megatron_muon.fsdp.whole_step import (
    GRADIENT,
    VANISHED,
    WEIGHT,
    Finding,
    Subject,
    Tensors,
    WholeStep,
)
from megatron_muon.ranks import (
    in_the_world,
    is_first_rank,
    numbers_of_all_ranks,
    of_all_ranks_if_any,
)


class Audit:
    """Audits the steps of a part.

    Args:
        part: the matrices, of which this rank has rows.
        held: their layout over all ranks that hold them.
        interval: audit every so many steps, and the first one with a learning rate after a start or
            load; 0 is never.
        whole_step: takes a step on a whole matrix.

    Attributes:
        steps: taken so far; to be set where a run is resumed.
        is_due: the next step with a learning rate is audited whatever its number.
        is_new: no weight has moved yet.
        is_audited: the latest step was.
        line: report of its audit, on the first rank; else empty.
        faults: the same on all ranks, if it found faults.
    """

    def __init__(self, part: Any, held: Held, interval: int, whole_step: WholeStep) -> None:
        self._part = part
        self._held = held
        self._interval = interval
        self._whole_step = whole_step
        self._rank = held.group.rank()
        self._ranks = in_the_world(held.group)
        self.steps = 0
        self.is_due = self.is_new = interval > 0
        self.is_audited = False
        self._is_warning = False
        self.line = ""
        self.faults: list[str] = []

    def begin(self, probe: Probe) -> Any:
        """Collect a matrix if the step that begins is audited; returns its probe. Collective."""
        self.steps += 1
        self.is_audited = False
        self._is_warning = False
        self.line = ""
        self.faults = []
        interval = self._interval
        if not (interval and (self.is_due or self.steps % interval == 0)):
            return probe
        matrices = self._held.layout.matrices
        index = self.steps // interval % len(matrices)
        group = self._part.rows.groups[index]
        if self.is_due and not float(group["lr"]):  # a warm-up begins with 0
            return probe
        self.is_audited = True
        viewed = next(each for each in self._part.viewed.values() if index in each.numbers)
        # experts may have no tokens, and layers above may begin at zero
        is_expert = viewed.view.is_stack or "expert" in viewed.name
        self._may_vanish = is_expert or self.is_new or self._has_gradients()
        self._subject = Subject(
            index,
            self.steps,
            matrices[index],
            group,
            self._part.method_state.of_matrix(index),
            self._part.waves.method.device,
            viewed.parameter.dtype,
            self._ranks,
        )
        self.is_due = self.is_new = False
        self._before = self._collect(GRADIENT)
        self._elements = Counter[int]()
        return counting(probe, index, self._elements)

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
        blocks = range(len(self._subject.matrix.blocks))
        iterated = [self._elements[number] for number in blocks]
        of_ranks = numbers_of_all_ranks([bits, int(self._may_vanish), *iterated], self._held.group)
        has_faults = self._rank == 0 and self._judge(after, of_ranks)
        del self._before, self._subject
        lines = of_all_ranks_if_any(self.line if has_faults else "", self._held.group)
        self.faults = lines[:1]
        if self._is_warning or (self.line and is_first_rank()):
            kind = "warning: " if self._is_warning else ""
            print(f"megatron-muon: {kind}{self.line}", flush=True)

    def _judge(self, after: Tensors, of_ranks: Sequence[Sequence[int]]) -> bool:
        """Write the report; returns True if there are faults."""
        matrix = self._subject.matrix
        findings = self._compare_replicas([bits for bits, *_ in of_ranks])
        if not any(may_vanish for _, may_vanish, *_ in of_ranks):
            text = "all gradients are zero; were they clipped to nothing?"
            findings.append(Finding(text, is_fault=True))
        if self._part.captured is None:  # a replayed graph calls no probe
            findings += self._compare_iterations([elements for _, _, *elements in of_ranks])
        try:
            findings += self._whole_step.compare(self._subject, self._before, after)
        except torch.OutOfMemoryError:
            findings.append(Finding("update not checked: out of memory", is_unchecked=True))
        except Exception as error:  # others wait for this rank
            findings.append(Finding(f"update not checked: {error!r}", is_unchecked=True))
        faults = [finding for finding in findings if finding.is_fault]
        warned = [finding for finding in findings if finding.is_fault or finding.is_unchecked]
        shown = ", ".join(finding.text for finding in warned or findings)
        rows, cols = matrix.shape
        self.line = f"audit of step {self.steps}: {matrix.name} ({rows} x {cols}): {shown}"
        self._is_warning = bool(warned)
        return bool(faults)

    def _compare_replicas(self, bits: Sequence[int]) -> list[Finding]:
        found = []
        shards = self._subject.matrix.shards
        for shard in shards:
            others = [rank for rank in shard.replicas if bits[rank] != bits[shard.rank]]
            if others:
                numbers = [str(self._ranks[rank]) for rank in (*others, shard.rank)]
                text = f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}, replicas, differ"
                found.append(Finding(text, is_fault=True))
        copies = max(len(shard.holders) for shard in shards)
        if copies > 1:
            found.append(Finding(f"{copies} replicas equal"))
        return found

    def _compare_iterations(self, of_ranks: Sequence[Sequence[int]]) -> list[Finding]:
        found = []
        times = len(of_ranks) if self._part.waves.scheme in (LOCAL, GATHERED) else 1
        for number, shape in enumerate(self._subject.matrix.blocks):
            done = sum(elements[number] for elements in of_ranks) / math.prod(shape)
            if done != times:
                text = f"block {number} was orthogonalized {done / times:g} times"
                found.append(Finding(text, is_fault=True))
        return found

    def _has_gradients(self) -> bool:
        """True if a gradient of this rank's rows, of any matrix, is not zero, or is not finite."""
        rows = self._part.rows
        held = [rows.gradients[index] for index in rows.held]
        gradients: Any = [each for each in held if each is not None]
        norms = torch._foreach_norm(gradients, ord=math.inf) if gradients else []
        return any(not float(norm) < VANISHED for norm in norms)

    def _rows(self, *others: str) -> Tensors:
        """This rank's rows by slot; nothing if it holds none."""
        rows = self._part.rows
        index = self._subject.index
        if not self._subject.matrix.held_by(self._rank).numel:
            return {}
        found = {WEIGHT: rows.kept_weights.read(index)}
        if self._part.has_momentum:
            found[MOMENTUM] = rows.kept_momentum.read(index)
        if self._whole_step.moment2:
            found[MOMENT2] = rows.state(MOMENT2)[index]
        if others:
            gradient = rows.gradients[index]
            if gradient is None:
                gradient = torch.full_like(found[WEIGHT], math.nan)
            found[GRADIENT] = gradient
        return found

    def _collect(self, *others: str) -> Tensors:
        """Whole tensors by slot, `(rows, cols)` or with 1 for either, fp32 on the host.

        Only the first rank has elements. Collective.
        """
        mine = self._rows(*others)
        matrix = self._subject.matrix
        shapes = {WEIGHT: matrix.shape}
        if self._part.has_momentum:
            shapes[MOMENTUM] = matrix.shape
        if self._whole_step.moment2:
            shapes[MOMENT2] = self._whole_step.moment2_shape(self._subject.index, matrix)
        shapes |= dict.fromkeys(others, matrix.shape)
        whole = {}
        for slot, shape in shapes.items():
            whole[slot] = torch.empty(shape if self._rank == 0 else (0, 0), dtype=torch.float32)
            for shard in matrix.shards:
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


def counting(probe: Probe, index: int, elements: Counter[int]) -> Probe:
    """A probe that also counts the elements of a matrix that this rank orthogonalizes, by block.

    It has the methods of the probe's class, which passes look at, and the probe's attributes.
    """

    class Counting(type(probe)):  # type: ignore[misc]
        def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
            for slot in slots:
                if slot.index == index:
                    elements[slot.block] += slot.numel
            super().orthogonalized(slots)

    made: Probe = object.__new__(Counting)
    made.__dict__ = probe.__dict__
    return made
