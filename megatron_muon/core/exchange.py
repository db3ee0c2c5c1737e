"""A step's waves: rows are packed, sent, unpacked and orthogonalised, and the updates sent back and applied.

`Exchange._wave` is the life of one wave from top to bottom, a generator that yields where a
collective is under way; `plan.schedule` says which wave goes on when. What a wave carries is in
`route`, as numbers, and in `wave`, as views of buffers, made at construction. An update that is not
finite is NaN in all elements: its holders keep the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_muon.core import collectives
from megatron_muon.core.arena import Arena, Buffer
from megatron_muon.core.assignment import Unmet
from megatron_muon.core.layout import Layout
from megatron_muon.core.memory import CHUNK
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import MOMENTS, Plan, moments_of, schedule
from megatron_muon.core.probe import Probe
from megatron_muon.core.ranks import all_gather_single
from megatron_muon.core.route import ALL_GATHER, ALL_TO_ALL, BROADCAST, Route, Way
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.wave import Agreement, Chunk, Wave

OWNER, SHARED, LOCAL, GATHERED = "owner", "shared", "local", "allgather"
"""Schemes: every matrix has an owner, or a team; replicas share the work, and owners broadcast; every rank has whole
matrices and does all of the work; or does so after gathering them, the reference to compare with."""


class RowPhases(Protocol):
    """The elementwise phases of a step on this rank's rows; `ShardedMuon` has them."""

    def prepare(self, chunk: Chunk) -> None:
        """Fill `chunk.prepared` with what is orthogonalised of these rows: momentum, look-ahead."""

    def packed(self, chunk: Chunk) -> None:
        """All that reads `chunk.prepared` has been enqueued."""

    def apply(self, chunk: Chunk) -> None:
        """Change the weights by `chunk.updates`, which may be overwritten."""


@dataclass(frozen=True)
class Buffers:
    """Where an exchange has its buffers."""

    device: torch.device  # where rows lie
    # rows are prepared on a stream of their own, so their buffers are shared with nothing
    rows_apart: bool = False
    # memory of another exchange that never steps at the same time
    scratch: torch.Tensor | None = None
    free: bool = False  # give the buffers back after each step


class Exchange:
    """Makes matrices whole, has them orthogonalised, and brings the update's rows back.

    Args:
        scheme: OWNER, SHARED, LOCAL or GATHERED.
        layout: who holds which rectangle of each matrix; the same on every rank of `group`.
        rules: one of which may change whole updates.
        routes: this rank's part in each wave that travels, in the order of all ranks.
        local: waves that do not travel; they are spread over the others.
        wire_dtype: of what travels and of the stacks: torch.float32, or torch.bfloat16 where the
            iteration starts from it. What a rank has itself is rounded like what travels: a result
            does not depend on who holds what.
        teams: those that this rank is in.
        unmet: a setting that these ranks cannot have.
    """

    def __init__(
        self,
        scheme: str,
        layout: Layout,
        group: dist.ProcessGroup,
        orthogonalizer: Orthogonalizer,
        buffers: Buffers,
        rules: Sequence[Rule] = (),
        *,
        routes: Sequence[Route],
        local: Sequence[Route] = (),
        wire_dtype: torch.dtype = torch.float32,
        plan: Plan | None = None,
        teams: collectives.Teams | None = None,
        unmet: Unmet | None = None,
    ) -> None:
        self.scheme, self.layout, self.group, self.plan, self.unmet = (
            scheme,
            layout,
            group,
            plan,
            unmet,
        )
        self._rank, self._orthogonalizer, self._teams = group.rank(), orthogonalizer, teams or {}
        self._normalize = next(
            (rule.normalize for rule in rules if rule.normalize is not None), None
        )
        chunk_numel = CHUNK["cpu" if buffers.device.type == "cpu" else "cuda"]
        self._buffers, self._order = buffers, schedule(len(routes), len(local))
        moments = moments_of(self._order)
        self._waves = [
            Wave(
                route,
                orthogonalizer.work_bytes(route.stacks, wire_dtype.itemsize),
                wire_dtype,
                when,
                chunk_numel=chunk_numel,
                rows_apart=buffers.rows_apart,
            )
            for route, when in zip((*routes, *local), moments, strict=True)
        ]
        placed = list(itertools.chain(*(wave.buffers.values() for wave in self._waves)))
        if buffers.rows_apart:  # two buffers, in the order in which waves are prepared
            end = max(itertools.chain(*moments), default=0) + MOMENTS
            largest = max((wave.route.numel for wave in self._waves), default=0)
            apart = [Buffer(largest, torch.float32, 0, end) for _ in range(2)]
            for place, number in enumerate(dict.fromkeys(self._order)):
                self._waves[number].buffers["prepared"] = apart[place % 2]
            placed += apart
        self.arena = Arena(buffers.device, placed, buffers.scratch)
        self.chunks: list[Chunk] = []
        for wave in self._waves:
            wave.make_views(self.arena, len(self.chunks))
            self._make_agreements(wave)
            self.chunks += wave.chunks

    def replicas(self, index: int) -> int:
        """How many ranks hold the same rows of a matrix as this one."""
        shard = self.layout.matrices[index].shard_of(self._rank)
        return 1 if shard is None else len(shard.holders)

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step of all matrices: each shard of this rank is prepared once, then updated once. Collective."""
        self.arena.acquire()
        waves = [self._wave(wave, rows, probe) for wave in self._waves]
        for number in self._order:
            next(waves[number], None)
        self.free_buffers()

    def free_buffers(self) -> None:
        """Give the buffers back until the next step, where that is wanted; no view of them can be made until then."""
        if self._buffers.free:
            self.arena.release()

    def _wave(self, wave: Wave, rows: RowPhases, probe: Probe) -> Iterator[None]:
        """The life of a wave; it yields where the waves beside it go on."""
        number = wave.route.number
        with probe.phase("gather", number):
            for chunk, copies in zip(wave.chunks, wave.pack, strict=True):
                rows.prepare(chunk)
                for copy in copies:
                    copy()
                rows.packed(chunk)
            work = self._send(wave, probe)
        yield
        with probe.phase("gather_wait", number):
            work.wait()
        with probe.phase("orthogonalize", number):
            for copy in wave.unpack:
                copy()
            self._orthogonalize(wave, probe)
        yield
        with probe.phase("send_back", number):
            for copy in wave.pack_back:
                copy()
            work = self._send_back(wave, probe)
        yield
        with probe.phase("scatter_wait", number):
            work.wait()
            for chunk, assemble in zip(wave.chunks, wave.assemble, strict=True):
                assemble()
                rows.apply(chunk)

    def _send(self, wave: Wave, probe: Probe) -> Any:
        """Start to send the rows of a wave."""
        route, tensors = wave.route, wave.tensors
        if route.rows_by == ALL_TO_ALL:
            return self._all_to_all(
                tensors["receive"], tensors["send"], route.receive, route.send, probe
            )
        if route.rows_by == ALL_GATHER:
            probe.received(tensors["receive"].nbytes - tensors["own"].nbytes)
            return all_gather_single(tensors["receive"], tensors["own"], self.group, async_op=True)
        return collectives.Works()

    def _send_back(self, wave: Wave, probe: Probe) -> Any:
        """Start to send the updates of a wave to their holders."""
        route, tensors = wave.route, wave.tensors
        if route.updates_by == ALL_TO_ALL:
            returned = tensors["returned"][: route.returned.numel]
            return self._all_to_all(returned, tensors["back"], route.returned, route.back, probe)
        if route.updates_by == BROADCAST and self.group.size() > 1:
            probe.received(sum(part.nbytes for owner, part in wave.by_owner if owner != self._rank))
            parts = wave.by_owner
            return collectives.Works(
                [
                    dist.broadcast(part, group=self.group, group_src=owner, async_op=True)
                    for owner, part in parts
                ]
            )
        return collectives.Works()

    def _all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, arriving: Way, leaving: Way, probe: Probe
    ) -> Any:
        probe.received(received.nbytes)
        what = received, sent, arriving.counts, leaving.counts, self.group
        if self.plan is not None and self.plan.by_pairs:
            return collectives.exchange_pairs(*what)
        return dist.all_to_all_single(*what, async_op=True)

    def _orthogonalize(self, wave: Wave, probe: Probe) -> None:
        """Put the updates of a wave's blocks in their place."""
        marks = []
        for stack, of in zip(wave.stacks, wave.route.stacks, strict=True):
            team = self._teams[of.kind.ranks] if of.kind.ranks else None
            marks.append(
                self._orthogonalizer.orthogonalize_stack(stack, of.kind, team, probe, wave.work)
            )
        probe.orthogonalized(wave.route.slots)
        if wave.agreements:
            self._agree(wave, marks)

    def _agree(self, wave: Wave, marks: list[torch.Tensor]) -> None:
        """Make every block of a matrix NaN if one is, on each rank of its team; normalize whole updates.

        `marks` has 0 for each finite block of a stack, NaN for the others; blocks are in one
        agreement at most.
        """
        of_slots = (
            torch.cat(marks).view(-1)
            if marks
            else self.arena.memory.new_zeros(0, dtype=torch.float32)
        )
        agreed = of_slots
        for team, number, slots, matrices in wave.agreements:
            of_matrices = of_slots.new_zeros(number)
            of_matrices.index_add_(0, matrices, of_slots if slots is None else of_slots[slots])
            if team is not None:
                dist.all_reduce(of_matrices, group=team.group)
            theirs = of_matrices[matrices]
            agreed = theirs if slots is None else agreed.index_copy(0, slots, theirs)
        for index, blocks, slots in wave.whole:
            self._normalize_whole(index, blocks, agreed[slots][0] == 0.0)
        agreed = agreed.to(wave.tensors["stacks"].dtype).view(-1, 1, 1)
        for stack, of_stack in zip(
            wave.stacks, agreed.split([len(stack) for stack in wave.stacks]), strict=True
        ):
            stack.add_(of_stack)  # 0 or NaN

    def _normalize_whole(
        self, index: int, blocks: list[torch.Tensor], finite: torch.Tensor
    ) -> None:
        """Have an owner's whole update normalised, in fp32; `blocks` are views of its slots."""
        assert self._normalize is not None
        matrix = self.layout.matrices[index]
        if len(blocks) == 1:
            whole = blocks[0].float()
            parts = [whole]
        else:
            whole = blocks[0].new_empty(matrix.shape, dtype=torch.float32)
            parts = matrix.split.views(whole)
            for part, block in zip(parts, blocks, strict=True):
                part.copy_(block.view(part.shape))
        self._normalize(index, whole, finite)
        for part, block in zip(parts, blocks, strict=True):
            block.view(part.shape).copy_(part)

    def _make_agreements(self, wave: Wave) -> None:
        """Which slots of a wave belong to one matrix, and so are finite together."""
        slots, device = wave.route.slots, self.arena.memory.device
        of_matrix: dict[int, list[int]] = {}
        for place, slot in enumerate(slots):
            of_matrix.setdefault(slot.index, []).append(place)
        by_team: dict[tuple[int, ...], list[int]] = {}
        for index in wave.route.indices:  # in the order of all ranks
            ranks = self.plan.teams[index].ranks if self.plan is not None else (self._rank,)
            if self._rank in ranks:
                by_team.setdefault(ranks, []).append(index)
        several = (
            any(len(places) > 1 for places in of_matrix.values()) or self._normalize is not None
        )
        for ranks, indices in sorted(by_team.items()):
            team = self._teams[ranks] if len(ranks) > 1 else None
            if team is not None or several:
                ours = sorted(
                    (at, number)
                    for number, index in enumerate(indices)
                    for at in of_matrix.get(index, [])
                )
                at, matrices = (
                    torch.tensor(ours, dtype=torch.int64, device=device).view(-1, 2).T.contiguous()
                )
                is_all = [place for place, _ in ours] == list(range(len(slots)))
                wave.agreements.append(
                    Agreement(team, len(indices), None if is_all else at, matrices)
                )
        if self._normalize is not None:
            wide = itertools.chain(*wave.stacks)
            views = [
                view.mT if slot.is_tall else view for view, slot in zip(wide, slots, strict=True)
            ]
            for index, places in of_matrix.items():
                in_order = sorted(places, key=lambda place: slots[place].block or 0)
                on_device = torch.tensor(places, dtype=torch.int64, device=device)
                wave.whole.append((index, [views[place] for place in in_order], on_device))
