"""Muon on sharded matrices: the step, on one page.

Each rank holds some rows of every matrix (ZeRO), with their gradients and momentum. A step walks
the waves of its exchange, a wave being as many matrices as fit its buffer;
`exchange.Exchange._wave` is the life of one:

    prepare   each rank, its rows   momentum <- lerp(momentum, gradient), look-ahead; elementwise
    exchange  rows -> owner         all-to-all: a rank's rows of each matrix, (rows, cols), go to the rank that owns it,
                                    4 bytes an element, or 2 where the iteration runs in bf16
              owner                 Newton-Schulz on whole matrices, block by block; a team of owners adds up X X^T
              owner -> rows         all-to-all: the update's rows go to all ranks that hold them, as many bytes
    apply     each rank, its rows   weight <- weight - lr * (weight_decay * weight + update); elementwise
                                    (`core.rules` has what variants do otherwise)

A wave's rows on a rank are one flat tensor, and momentum lies in its order: a parameter's state is
a view of it. Gradient reduction, clipping and installing weights are the caller's part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_muon.core.exchange import LOCAL, Exchange
from megatron_muon.core.group_numbers import read_group
from megatron_muon.core.numbers import number_of
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.rows import local_rows, sharded_like
from megatron_muon.core.rules.rule import Part, Rule, Step
from megatron_muon.core.storage import MomentumStore, Storage
from megatron_muon.core.wave import Chunk

MOMENTUM = "momentum_buffer"
"""The momentum's slot of the optimizer state, upstream's name."""

STEPS = "rounding_steps"
"""A parameter group's count of steps where momentum is rounded for storage."""


def refuse_copy() -> NoReturn:
    """Raise a TypeError: what pickle and `copy.deepcopy` meet when they are given an optimizer."""
    raise TypeError(
        "Muon holds process groups and cannot be copied or pickled; make another one and give it"
        " the state_dict"
    )


class ShardedMuon(torch.optim.Optimizer):
    """Muon whose parameters are row shards of matrices, or whole replicas.

    The update of a matrix depends on its gradient alone, never on how many ranks hold it; how many
    own it changes its rounding. State is one `momentum_buffer` for each parameter, fp32, of the
    shard's shape, and what the rules keep; it exists from construction on every rank, also for
    empty shards. With `store` momentum is kept there instead.

    Args:
        params: parameter groups of 2D parameters, or 3D stacks, DTensors or plain; all of them on
            every rank.
        exchange: makes the matrices of the parameters whole, in their order, and has the rules'
            `normalize`.
        rules: what a step does to rows, in order; `core.rules`.
        defaults: of parameter groups: `lr`, `momentum` (the share of the old one that is kept) and
            `weight_decay`.
        names: a name for each parameter, for messages.
        store: keeps momentum of the parameters, in their order; None keeps it as state, fp32.
        weights: this rank's rows of the parameters, which then hold none; None changes the
            parameters themselves.
        momentum: this rank's rows of it, fp32, of parameters that have it elsewhere than in a
            wave's order, by place.
        skip_missing: a matrix that some rank has no gradient for, or one that is not finite, keeps
            weights and state on every rank, instead of being an error. Costs one all-reduce of a
            number for each matrix in a step.

    Raises:
        ValueError: a parameter is neither 2D nor 3D, or a rule refuses a group.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        exchange: Exchange,
        rules: Sequence[Rule],
        *,
        defaults: Mapping[str, float],
        names: Mapping[torch.Tensor, str],
        store: MomentumStore | None = None,
        weights: Storage | None = None,
        momentum: Mapping[int, torch.Tensor] | None = None,
        skip_missing: bool = False,
    ) -> None:
        super().__init__(list(params), {name: number_of(value) for name, value in defaults.items()})
        self._matrices = [parameter for group in self.param_groups for parameter in group["params"]]
        self._group_of = [
            number for number, group in enumerate(self.param_groups) for _ in group["params"]
        ]
        self._names, self._matrix_names = names, [names[parameter] for parameter in self._matrices]
        for parameter, name in zip(self._matrices, self._matrix_names, strict=True):
            if parameter.ndim not in (2, 3):
                found = tuple(parameter.shape)
                raise ValueError(
                    f"{name}: Muon takes 2D parameters and 3D stacks of them, got shape {found}"
                )
        self.exchange, self.rules, self.store = exchange, rules, store
        self.probe: Probe = SILENT
        added: dict[str, float] = {STEPS: 0} if store is not None and store.rounds else {}
        for rule in rules:
            added |= rule.settings
        self._number_names = (*defaults, *(name for name in added if name != STEPS))
        for group in self.param_groups:
            group.update(added | group)
        self._weights = weights or Storage(lambda index: local_rows(self._matrices[index]))
        self._skip_missing = skip_missing
        self._missing = set[int]()
        # with skip_missing: NaN for matrices that some rank cannot update
        self._failed: torch.Tensor | None = None
        self._held = [
            index for index, parameter in enumerate(self._matrices) if local_rows(parameter).numel()
        ]
        chunks, device = exchange.chunks, exchange.arena.memory.device
        in_order = [index for chunk in chunks for index in chunk.indices]
        assert sorted(in_order) == self._held, (
            "the exchange leaves out matrices, or takes some that are not held"
        )
        own, self._flat_momentum = dict(momentum or {}), list[torch.Tensor | None]()
        for chunk in chunks:
            rows = [held for held in chunk.rows if store is None and held.of not in own]
            sizes = [held.shard.numel for held in rows]
            flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
            self._flat_momentum.append(flat if len(rows) == len(chunk.rows) else None)
            own |= {
                each.of: view.view(each.shard.rows, -1)
                for each, view in zip(rows, flat.split(sizes), strict=True)
            }
        self._shown = {
            index: sharded_like(self._matrices[index], view) for index, view in own.items()
        }
        self._momentum = store or Storage(own.__getitem__)
        self._in_order, self._held_on_device = (
            torch.tensor(indices, dtype=torch.int64, device=device)
            for indices in (in_order, self._held)
        )
        self._skipped = torch.zeros(len(self._matrices), dtype=torch.int32, device=device)
        self._first_elements = torch.zeros(len(in_order), dtype=torch.float32, device=device)
        self._first_of = self._first_elements.split([len(chunk.indices) for chunk in chunks])
        self._check_groups()
        self.initialize_state()
        exchange.free_buffers()

    def initialize_state(self) -> None:
        """Give every parameter that has none its state of zeros, on every rank alike."""
        for index, parameter in enumerate(self._matrices):
            state = self.state[parameter]
            if MOMENTUM not in state and self.store is None:
                if index in self._shown:
                    local_rows(self._shown[index]).zero_()
                    state[MOMENTUM] = self._shown[index]
                else:
                    state[MOMENTUM] = torch.zeros_like(parameter.detach(), dtype=torch.float32)
            for rule in self.rules:
                for slot in rule.slots:
                    if slot not in state:
                        state[slot] = rule.zeros(slot, index, parameter)

    def _take_up_loaded(self) -> None:
        """Take momentum that a checkpoint has put in the place of this optimizer's own into its rows."""
        for index, shown in self._shown.items():
            state = self.state[self._matrices[index]]
            if state[MOMENTUM] is not shown:
                local_rows(shown).copy_(local_rows(state[MOMENTUM]))
                state[MOMENTUM] = shown

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every matrix from its gradient. Collective, unless the exchange is local.

        Raises:
            RuntimeError: a shard with rows has no gradient.
        """
        self.update_matrices()

    def update_matrices(self) -> None:
        """The step of the matrices, outside of any autocast; subclasses override `step` to add other parameters."""
        device = self._matrices[0].device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.update_matrices()
        self._check_groups()  # schedules change them
        self._missing = {index for index in self._held if self._matrices[index].grad is None}
        if self._missing and not self._skip_missing:
            raise RuntimeError(
                f"{self._matrix_names[min(self._missing)]} has no gradient at the optimizer step;"
                " was finish_grad_sync() called?"
            )
        self._take_up_loaded()
        self._enqueue()
        self._momentum.end_step()
        self._weights.end_step()
        for group in self.param_groups:
            if STEPS in group:
                group[STEPS] += 1

    def _enqueue(self) -> None:
        """All that the device does in a step."""
        if self._skip_missing:
            self._agree_on_gradients()
        step = Step(self._groups, self._slot, self.probe)
        for rule in self.rules:
            rule.begin(step)
        with nullcontext(self) if self.store is None else self.store.step(self) as phases:
            self.exchange.run(phases, self.probe)  # prepare, exchange, apply, wave by wave
        self._skipped.index_add_(0, self._in_order, self._first_elements.isnan().int())
        with self.probe.phase("apply"):
            for rule in self.rules:
                rule.end()

    def __getstate__(self) -> dict[str, Any]:
        refuse_copy()

    def _slot(self, name: str) -> list[torch.Tensor]:
        return [local_rows(self.state[parameter][name]) for parameter in self._matrices]

    def _agree_on_gradients(self) -> None:
        """Find the matrices whose gradient is there and finite on every rank. Collective, unless the exchange is local.

        Momentum advances before rows travel, so a rank that knew only its own gradients would
        advance the momentum of a matrix that another rank cannot update.
        """
        device = self._skipped.device
        failed = torch.zeros(len(self._matrices), dtype=torch.float32, device=device)
        ready = [index for index in self._held if index not in self._missing]
        if self._missing:
            failed[sorted(self._missing)] = torch.nan
        if ready:
            gradients = [local_rows(self._matrices[index].grad) for index in ready]
            norms = _finite_norms(gradients).to(device, torch.float32)
            at = torch.tensor(ready, device=device) if self._missing else self._held_on_device
            failed.index_add_(0, at, norms.mul_(0.0))  # NaN where it is not finite
        if self.exchange.scheme != LOCAL and self.exchange.group.size() > 1:
            dist.all_reduce(failed, group=self.exchange.group)
        self._failed = failed
        # where nothing waits for a device to tell
        if device.type == "cpu" and not failed.isnan().any():
            self._failed = None

    def prepare(self, chunk: Chunk) -> None:
        """First phase: this rank's rows of the gradients, fp32, to `chunk.prepared`, where rules change them.

        Of a matrix that some rank cannot update each shard's first element becomes NaN, so that no
        rank updates it.
        """
        with self.probe.phase("momentum"):
            self._collect_gradients(chunk)
            marks = None if self._failed is None else self._failed[chunk.index]
            failed = None if marks is None else marks.isnan()
            flat = self._flat_momentum[chunk.number]
            for places, momentum in self._momentum.borrow(chunk.indices):
                part = self._part(
                    chunk, places, chunk.prepared, chunk.prepared_rows, momentum, flat, failed
                )
                for rule in self.rules:
                    rule.before(part)
                self.probe.momentum(part.indices, momentum, self.exchange.replicas)
            if marks is not None:
                chunk.prepared.index_add_(0, chunk.firsts, marks)

    def packed(self, chunk: Chunk) -> None:
        """Nothing to do: prepared rows are read in the order of the stream."""

    def apply(self, chunk: Chunk) -> None:
        """Last phase: rules change updates and weights, on this rank's rows; where an update is NaN weights stay."""
        with self.probe.phase("apply"):
            torch.index_select(chunk.updates, 0, chunk.firsts, out=self._first_of[chunk.number])
            for places, weights in self._weights.borrow(chunk.indices):
                part = self._part(chunk, places, chunk.updates, chunk.updated_rows, weights)
                for rule in self.rules:
                    rule.after(part)

    def _part(
        self,
        chunk: Chunk,
        places: range,
        flat: torch.Tensor,
        rows: list[torch.Tensor],
        state: list[torch.Tensor],
        flat_state: torch.Tensor | None = None,
        failed: torch.Tensor | None = None,
    ) -> Part:
        """Some of a chunk's matrices, as rules see them; rows go where the state is."""
        chosen = slice(places.start, places.stop)
        indices = chunk.indices[chosen]
        if len(places) < len(chunk.indices):
            cut = slice(chunk.starts[places.start], chunk.starts[places.stop])
            flat, rows, failed = flat[cut], rows[chosen], None if failed is None else failed[chosen]
        if flat.device != state[0].device:
            flat = flat.to(state[0].device)
            parts = flat.split([one.numel() for one in rows])
            rows = [part.view(one.shape) for part, one in zip(parts, rows, strict=True)]
        parameters, groups = (
            [self._matrices[index] for index in indices],
            [self._groups[index] for index in indices],
        )
        return Part(indices, parameters, groups, flat, rows, state, flat_state, failed)

    def _collect_gradients(self, chunk: Chunk) -> None:
        """Copy this rank's rows of the gradients to where they are prepared, of matrices that have one."""
        present = [
            (view, index)
            for view, index in zip(chunk.prepared_rows, chunk.indices, strict=True)
            if index not in self._missing
        ]
        if present:
            gradients = [local_rows(self._matrices[index].grad) for _, index in present]
            torch._foreach_copy_([view for view, _ in present], gradients)

    def check_weights(self) -> None:
        """Refuse weights that a rule cannot work with. Collective; may wait for the device."""
        for rule in self.rules:
            rule.check_weights(
                [local_rows(parameter) for parameter in self._matrices], self._matrix_names
            )

    def _check_groups(self) -> None:
        """Read the numbers of the parameter groups, and have the rules look at those of each matrix."""
        device = self._matrices[0].device
        groups = [read_group(group, self._number_names, device) for group in self.param_groups]
        self._groups = [groups[number] for number in self._group_of]
        for rule in self.rules:
            rule.check(self._groups, self._matrix_names)

    def skipped_updates(self) -> dict[str, int]:
        """Updates skipped since the last call, by matrix, where this rank has rows. Waits for the device."""
        counts = self._skipped.tolist()
        self._skipped.zero_()
        return {self._matrix_names[index]: count for index, count in enumerate(counts) if count}

    def momentum_state(self, *, empty: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """Momentum of each parameter as the state that a checkpoint holds: fp32, of the shard's shape, sharded alike.

        Of a store they are copies, outside of the process's own memory where momentum is on disk;
        `empty` leaves out the values, as they will be loaded.
        """
        if self.store is None:
            return {parameter: self.state[parameter][MOMENTUM] for parameter in self._matrices}
        shards = [local_rows(parameter) for parameter in self._matrices]
        state = {}
        memory = self.store.scratch([rows.numel() for rows in shards])
        for index, (parameter, rows, flat) in enumerate(
            zip(self._matrices, shards, memory, strict=True)
        ):
            if rows.numel() and not empty:
                flat.view(rows.shape).copy_(self.store.read(index))
            state[parameter] = sharded_like(parameter, flat)
        return state

    def load_momentum(self, state: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take the momentum of a checkpoint, as `momentum_state` gives it, into the store."""
        assert self.store is not None
        for index in self._held:
            if self._matrices[index] in state:
                self.store.write(index, local_rows(state[self._matrices[index]]))
        self.store.steps = max((group.get(STEPS, 0) for group in self.param_groups), default=0)


def _finite_norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    """A norm of each gradient, `(count,)`, which is finite if and only if all its elements are.

    Of the largest magnitude, as a sum of finite numbers may overflow.
    """
    return torch.stack(torch._foreach_norm(gradients, ord=math.inf))
