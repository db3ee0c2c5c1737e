"""The owner scheme: rows travel to the rank that orthogonalises their matrix, and the update's rows travel back.

A step walks the plan's waves. While the matrices of wave k are orthogonalised, the rows of wave k+1 are under way to
their owners and the updates of wave k-1 back to their holders; matrices that lie whole on their owner fill what is
left. Each wave and direction is one all-to-all-v. Which rank sends what is settled at construction: a step has no
collective on Python objects and never waits for the device.

The rows of a matrix that a team owns go to several ranks, and their updates come from several. So each rank puts its
rows together again, and the team agrees on whether the matrix is finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_muon.core.assignment import Unmet
from megatron_muon.core.exchange.steps import (
    Batch,
    BatchMaker,
    InFlight,
    Parcel,
    Parcels,
    PlannedExchange,
    RowPhases,
    all_to_all,
)
from megatron_muon.core.layout import Shard
from megatron_muon.core.plan import Plan
from megatron_muon.core.portions import Portion
from megatron_muon.core.probe import Probe
from megatron_muon.core.teams import TeamGroup, Teams


@dataclass(frozen=True)
class _Agreement:
    """A team that says which of its matrices are finite.

    Attributes:
        team: the team.
        count: of its matrices in a wave.
        rooms: this rank's rooms of them, also on the device as `at`.
        matrices: for each room the place of its matrix among them, on the device.
    """

    team: TeamGroup
    count: int
    rooms: list[int]
    at: torch.Tensor
    matrices: torch.Tensor


@dataclass(frozen=True)
class _Route:
    """What this rank does in one wave.

    Attributes:
        wave: its number, from 0, for traces.
        batch: what this rank orthogonalises: whole matrices, then portions, each in its room.
        rooms: how many they are.
        agreements: with its teams.
        given: matrices whose rows it prepares when the wave begins. Where a replica sends them, only momentum counts.
        sent: rectangles for their matrices' owners.
        stayed: those of them that this rank orthogonalises in a team.
        late: this rank's own shards of matrices that it owns alone, prepared when they are orthogonalised.
        gathered: rectangles that arrive.
        spread: rectangles whose updates this rank sends to their holders.
        home: those of them that it holds itself, of a team's matrices.
        returned: rectangles whose updates arrive.
        assembled: shards that this rank puts together from several updates, by matrix index.
        finals: matrices whose updates are complete when all of the wave have arrived.
        flags: for each of them one of its parcels, by its place in `returned` and then `home`, on the device.
    """

    wave: int
    batch: Batch
    rooms: int
    agreements: list[_Agreement]
    given: list[int]
    sent: Parcels
    stayed: Parcels
    late: Parcels
    gathered: Parcels
    spread: Parcels
    home: Parcels
    returned: Parcels
    assembled: dict[int, Shard]
    finals: list[int]
    flags: torch.Tensor


@dataclass
class _Leaving:
    """Updates of a wave that are under way to their holders, and what this rank has of its own of them."""

    route: _Route
    flight: InFlight
    shards: dict[int, torch.Tensor]
    finite: torch.Tensor


@dataclass
class _Parts:
    """The parcels of a wave, as they are collected."""

    sent: list[Parcel] = field(default_factory=list)
    stayed: list[Parcel] = field(default_factory=list)
    late: list[Parcel] = field(default_factory=list)
    gathered: list[Parcel] = field(default_factory=list)
    spread: list[Parcel] = field(default_factory=list)
    home: list[Parcel] = field(default_factory=list)
    returned: list[Parcel] = field(default_factory=list)


class OwnerExchange(PlannedExchange):
    """Carries out a plan for matrices whose rows lie on several ranks.

    `teams` are those of the plan that this rank is in, `unmet` the settings that its ranks cannot have; the other
    arguments are those of `PlannedExchange`.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        batches: BatchMaker,
        *,
        wire_dtype: torch.dtype = torch.float32,
        device: torch.device,
        teams: Teams | None = None,
        unmet: Mapping[str, Unmet] | None = None,
    ) -> None:
        self._teams, self.unmet = teams or {}, unmet or {}
        super().__init__(plan, group, batches, wire_dtype=wire_dtype, device=device)

    def _make_routes(self, batches: BatchMaker) -> None:
        self._routes = [self._route(number, wave, batches) for number, wave in enumerate(self.plan.waves)]
        self._fillers = [(indices, batches(indices)) for indices in self.plan.fillers(self._rank)]

    def _route(self, number: int, wave: Sequence[int], batches: BatchMaker) -> _Route:
        """This rank's part in a wave."""
        rank, teams, own = self._rank, self.plan.teams, self.layout.held(self._rank)
        alone = [index for index in wave if teams[index].ranks == (rank,)]
        portions = [
            portion
            for index in wave
            if teams[index].cuts is not None
            for portion in self.plan.portions(index)
            if portion.rank == rank
        ]
        rooms: dict[object, int] = {index: room for room, index in enumerate(alone)}
        rooms |= {portion: room for room, portion in enumerate(portions, len(alone))}
        parts, given = _Parts(), []
        for index in wave:
            matrix = self.layout.matrices[index]
            is_team = teams[index].cuts is not None
            if own[index].numel and index not in rooms:
                given.append(index)
            for portion in self.plan.portions(index):
                room = rooms.get(portion if is_team else index, -1) if portion.rank == rank else -1
                held = (own[index],) if own[index].numel else ()
                for shard in matrix.shards if portion.rank == rank else held:
                    self._add(parts, portion, shard, room, is_team=is_team)
        parcels = {name: self._parcels(found) for name, found in vars(parts).items()}
        arriving = [*parcels["returned"].parcels, *parcels["home"].parcels]
        whole = {parcel.index for parcel in parcels["returned"].parcels if parcel.piece.numel == parcel.shard.numel}
        place = {parcel.index: number for number, parcel in enumerate(arriving)}
        return _Route(
            number,
            batches(alone, portions) if portions else batches(alone),
            len(rooms),
            self._agreements(wave, portions, len(alone)),
            given,
            **parcels,
            assembled={parcel.index: parcel.shard for parcel in arriving if parcel.index not in whole},
            finals=list(place),
            flags=self._on_device(place.values()),
        )

    def _add(self, parts: _Parts, portion: Portion, shard: Shard, room: int, *, is_team: bool) -> None:
        """Add what this rank does with the rectangles that a shard and a portion have in common."""
        rank, index, owner = self._rank, portion.index, portion.rank
        source = shard.source(owner, self.layout.world_size)
        for piece in portion.pieces(shard) if rank == owner or rank in shard.holders else ():
            if rank == owner:
                own = parts.stayed if is_team else parts.late
                (own if source == rank else parts.gathered).append(Parcel(source, index, piece, shard, room))
                for holder in shard.holders:
                    if holder != rank:
                        parts.spread.append(Parcel(holder, index, piece, shard, room))
                    elif is_team:
                        parts.home.append(Parcel(rank, index, piece, shard, room))
            else:
                parts.returned.append(Parcel(owner, index, piece, shard))
                if source == rank:
                    parts.sent.append(Parcel(owner, index, piece, shard))

    def _agreements(self, wave: Sequence[int], portions: Sequence[Portion], first: int) -> list[_Agreement]:
        """The teams of this rank with matrices in a wave, in an order that all ranks have."""
        owned: dict[tuple[int, ...], list[int]] = {}
        for index in wave:
            ranks = self.plan.teams[index].ranks
            if len(ranks) > 1 and self._rank in ranks:
                owned.setdefault(ranks, []).append(index)
        agreements = []
        for ranks, indices in sorted(owned.items()):
            rooms = [room for room, portion in enumerate(portions, first) if portion.index in indices]
            places = (indices.index(portions[room - first].index) for room in rooms)
            of_rooms = self._on_device(rooms), self._on_device(places)
            agreements.append(_Agreement(self._teams[ranks], len(indices), rooms, *of_rooms))
        return agreements

    def _on_device(self, numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._nothing.device)

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, wave by wave."""
        fillers, beside_a_wave = iter(self._fillers), -(-len(self._fillers) // max(len(self._routes), 1))
        leaving: _Leaving | None = None
        arriving = self._gather(self._routes[0], rows, probe) if self._routes else None
        for route, following in itertools.zip_longest(self._routes, self._routes[1:]):
            assert arriving is not None
            current = arriving
            arriving = self._gather(following, rows, probe) if following is not None else None
            for filler in itertools.islice(fillers, beside_a_wave):
                self._update_whole(*filler, rows, probe)
            self._assemble(route, rows, current, probe)
            del current  # what has arrived is in its rooms
            results, finite = self._orthogonalize(route, probe)
            if leaving is not None:
                self._receive(leaving, rows, probe)
                del leaving  # before as much leaves again
            leaving = self._send_back(route, results, finite, probe)
            if route.late.indices:
                rows.finalize(route.late.indices, route.late.in_rooms(results), finite[route.late.rooms])
            del results  # before the next are made
        for filler in fillers:  # where there are no waves
            self._update_whole(*filler, rows, probe)
        if leaving is not None:
            self._receive(leaving, rows, probe)

    def _gather(self, route: _Route, rows: RowPhases, probe: Probe) -> InFlight:
        """Send this rank's rows of a wave to their owners, and expect the rows of the matrices that it owns."""
        with probe.phase("gather", route.wave):
            flight = self._pack(route, rows)
            self._all_to_all(flight, route.sent, route.gathered, probe)
            return flight

    def _pack(self, route: _Route, rows: RowPhases) -> InFlight:
        send, stay = self._nothing.new_empty(route.sent.numel), self._nothing.new_empty(route.stayed.numel)
        if route.given:
            shards = dict(zip(route.given, rows.prepare(route.given), strict=True))
            _copy(route.sent.in_buffer(send), route.sent.in_shards(shards))
            _copy(route.stayed.in_buffer(stay), route.stayed.in_shards(shards))
        return InFlight(send, kept=stay)

    def _assemble(self, route: _Route, rows: RowPhases, arriving: InFlight, probe: Probe) -> None:
        """Put this rank's matrices of a wave together from what arrived and its own rows."""
        with probe.phase("gather_wait", route.wave):
            arrived = arriving.wait()
        if not route.rooms:
            return
        with probe.phase("orthogonalize", route.wave):
            rooms = route.batch.allocate(self._nothing)
            if route.late.indices:
                own = dict(zip(route.late.indices, rows.prepare(route.late.indices), strict=True))
                _copy(route.late.in_rooms(rooms), route.late.in_shards(own))
                del own  # before the iteration
            _copy(route.gathered.in_rooms(rooms), route.gathered.in_buffer(arrived))
            if arriving.kept is not None:
                _copy(route.stayed.in_rooms(rooms), route.stayed.in_buffer(arriving.kept))

    def _orthogonalize(self, route: _Route, probe: Probe) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The updates of this rank's matrices of a wave, in their rooms, and which are finite."""
        if not route.rooms and not route.agreements:
            return [], self._nothing.bool()
        with probe.phase("orthogonalize", route.wave):
            results, finite = route.batch.orthogonalize(probe)
            return results, self._agree(route, results, finite)

    def _agree(self, route: _Route, results: list[torch.Tensor], finite: torch.Tensor) -> torch.Tensor:
        """Which rooms belong to matrices that are finite on all ranks of their teams; the others become zero."""
        finite = finite.to(self._nothing.device)
        for agreement in route.agreements:
            failed = self._nothing.new_zeros(agreement.count, dtype=torch.int32)
            failed.index_add_(0, agreement.matrices, (~finite[agreement.at]).int())
            agreed = agreement.team.all(failed == 0)[agreement.matrices]
            finite[agreement.at] = agreed
            for room, keep in zip(agreement.rooms, agreed.unbind(), strict=True):
                results[room].mul_(keep)
        return finite

    def _send_back(self, route: _Route, results: list[torch.Tensor], finite: torch.Tensor, probe: Probe) -> _Leaving:
        """Send the update rows of other ranks to their holders, and begin to put this rank's own together."""
        with probe.phase("send_back", route.wave):
            flight = self._pack_updates(route, results, finite)
            shards = {
                index: self._nothing.new_empty(shard.rows, shard.cols) for index, shard in route.assembled.items()
            }
            _copy(route.home.in_shards(shards), route.home.in_rooms(results))
            self._all_to_all(flight, route.spread, route.returned, probe)
            return _Leaving(route, flight, shards, finite[route.home.rooms])

    def _pack_updates(self, route: _Route, results: list[torch.Tensor], finite: torch.Tensor) -> InFlight:
        send = self._nothing.new_empty(route.spread.numel)
        if route.spread.indices:
            _copy(route.spread.in_buffer(send), route.spread.in_rooms(results))
            route.spread.mark(send, finite)
        return InFlight(send)

    def _receive(self, leaving: _Leaving, rows: RowPhases, probe: Probe) -> None:
        """Finalize the update rows that came back."""
        route, shards = leaving.route, leaving.shards
        with probe.phase("scatter_wait", route.wave):
            received = leaving.flight.wait()
            if not route.finals:
                return
            finite = torch.cat([route.returned.finite(received), leaving.finite])[route.flags]
            updates, into, parts = dict(shards), [], []
            for parcel, update in zip(route.returned.parcels, route.returned.in_buffer(received), strict=True):
                if parcel.index in shards:
                    into.append(parcel.in_shard(shards[parcel.index]))
                    parts.append(update)
                else:
                    updates[parcel.index] = update
            _copy(into, parts)
            rows.finalize(route.finals, [updates[index] for index in route.finals], finite)

    def _all_to_all(self, flight: InFlight, sent: Parcels, expected: Parcels, probe: Probe) -> None:
        """Start to send what `flight` has to send."""
        probe.received(expected.numel * self._nothing.itemsize)
        all_to_all(flight, expected.counts, sent.counts, self.group, by_pairs=self.plan.by_pairs)


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)
