"""Muon on sharded matrices: the step, on one page.

Each rank holds some rows of every matrix (ZeRO), with their gradients and momentum. A step walks the waves of its
exchange, a wave being as many matrices as fit its buffer; `exchange.Exchange._wave` is the life of one:

    prepare   each rank, its rows   momentum <- lerp(momentum, gradient), look-ahead; elementwise
    exchange  rows -> owner         all-to-all: a rank's rows of each matrix, (rows, cols), go to the rank that owns it,
                                    4 bytes an element, or 2 where the iteration runs in bf16
              owner                 Newton-Schulz on whole matrices, block by block; a team of owners adds up X X^T
              owner -> rows         all-to-all: the update's rows go to all ranks that hold them, as many bytes
    apply     each rank, its rows   weight <- weight - lr * (weight_decay * weight + update); elementwise
                                    (`core.decay` has cautious decay, `core.hyperball` what keeps norms instead)

A wave's rows on a rank are one flat tensor in the order in which updates come back, and momentum lies in that order: a
parameter's state is a view of it. So most of `prepare` and `apply` is a few operations on a flat tensor, not on lists.
Gradient reduction, clipping and installing weights are the caller's part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.adaptive import SecondMoment
from megatron_muon.core.decay import decay_aligned
from megatron_muon.core.errors import UserError
from megatron_muon.core.exchange import LOCAL, Exchange
from megatron_muon.core.hyperball import Hyperball
from megatron_muon.core.momentum import Lender, MomentumStore
from megatron_muon.core.numbers import check_number
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.rows import Rows, local_rows, sharded_like
from megatron_muon.core.wave import Chunk

MOMENTUM = "momentum_buffer"
"""The momentum's slot of the optimizer state, upstream's name."""

MOMENT2 = "moment2_buffer"
"""The second moment's slot, upstream's name."""

STEPS = "rounding_steps"
"""A parameter group's count of steps where momentum is rounded for storage."""


class ShardedMuon(torch.optim.Optimizer):
    """Muon whose parameters are row shards of matrices, or whole replicas.

    The update of a matrix depends on its gradient alone, never on how many ranks hold it; how many own it changes its
    rounding. State is one `momentum_buffer` for each parameter, fp32, of the shard's shape; it exists from construction
    on every rank, also for empty shards. With `store` momentum is kept there instead, and `momentum_state` shows it as
    such state.

    Args:
        params: parameter groups; every parameter is 2D, or 3D for a stack of matrices, a DTensor or a plain tensor, and
            takes part on every rank.
        exchange: makes the matrices of the parameters whole, in their order.
        lr: learning rate.
        momentum: the exponential moving average keeps this share of the old momentum.
        nesterov: look ahead by mixing the gradient with the new momentum.
        weight_decay: decay rate, per unit of learning rate.
        decoupled_weight_decay: shrink the weights (True, AdamW's way) or add the decay to the gradient.
        names: a name for each parameter, for messages.
        cautious: decoupled decay only where weight and update have the same sign.
        hyperball: keeps the norms of the matrices, which takes the place of decay; gradients are overwritten.
        moment: the second moment of an adaptive Muon; `exchange` has its `normalize`.
        store: keeps momentum of the parameters, in their order; None keeps it as state, fp32.
        weights: lends this rank's rows of the parameters, which then hold none; None changes the parameters themselves.
        compute_device: where momentum and exchange compute, if not where the parameters are.
        skip_missing: a matrix without a gradient, or with one that is not finite, keeps weights and state on every rank
            of the exchange where one rank has none or such a one, instead of being an error. Costs one all-reduce of a
            number for each matrix in a step, which the host does not wait for on a GPU.

    Attributes:
        probe: receives timings and tensors of each step; `core.probe`.

    Raises:
        ValueError: a hyper-parameter is out of range, a parameter is neither 2D nor 3D, norms are kept and a group has
            weight decay, or decay that is not decoupled would need weights that are not there.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        exchange: Exchange,
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        decoupled_weight_decay: bool,
        names: Mapping[torch.Tensor, str],
        cautious: bool = False,
        hyperball: Hyperball | None = None,
        moment: SecondMoment | None = None,
        store: MomentumStore | None = None,
        weights: Lender | None = None,
        compute_device: torch.device | None = None,
        skip_missing: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("muon_momentum", momentum), ("weight_decay", weight_decay)):
            check_number(name, value)
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._matrices = [parameter for group in self.param_groups for parameter in group["params"]]
        self._group_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        self._names = names
        for parameter in self._matrices:
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"{names[parameter]}: Muon takes 2D parameters and 3D stacks of them, "
                    f"got shape {tuple(parameter.shape)}"
                )
        if weights is not None and not decoupled_weight_decay:
            raise ValueError("decoupled_weight_decay=False needs the weights where the gradients are; leave it at True")
        self.nesterov = nesterov
        self.decoupled_weight_decay = decoupled_weight_decay
        self.cautious = cautious
        self.exchange = exchange
        self.hyperball = hyperball
        self.moment = moment
        self.store = store
        self.probe: Probe = SILENT
        added: dict[str, float] = {STEPS: 0} if store is not None and store.rounds else {}
        added |= moment.settings if moment is not None else {}
        for group in self.param_groups:
            group.update({name: value for name, value in added.items() if name not in group})
        self._momentum = store or Lender(lambda index: local_rows(self.state[self._matrices[index]][MOMENTUM]))
        self._weights = weights or Lender(lambda index: local_rows(self._matrices[index]))
        self._compute_device = compute_device
        self._skip_missing = skip_missing
        self._missing = set[int]()
        self._failed: torch.Tensor | None = None  # with skip_missing: which matrices some rank cannot update, bool
        self._held = [index for index, parameter in enumerate(self._matrices) if local_rows(parameter).numel()]
        self._rows = [Rows(chunk, has_momentum=store is None) for chunk in exchange.chunks]
        in_order = [index for rows in self._rows for index in rows.indices]
        assert sorted(in_order) == self._held, "the exchange leaves out matrices, or takes some that are not held"
        self._shown: dict[int, torch.Tensor] = {}  # momentum as state: views of the rows'
        for rows in self._rows:
            for index, values in zip(rows.indices, rows.momentum, strict=False):
                self._shown[index] = sharded_like(self._matrices[index], values)
        device = exchange.arena.memory.device
        self._in_order, self._held_on_device = (
            torch.tensor(indices, dtype=torch.int64, device=device) for indices in (in_order, self._held)
        )
        self._skipped = torch.zeros(len(self._matrices), dtype=torch.int32, device=device)
        self._first_elements = torch.zeros(len(in_order), dtype=torch.float32, device=device)
        starts = itertools.accumulate((len(rows.indices) for rows in self._rows), initial=0)
        self._first_of = [
            self._first_elements[start : start + len(rows.indices)]
            for rows, start in zip(self._rows, starts, strict=False)
        ]
        self._refuse_off_sphere()
        self.initialize_state()

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
            if MOMENT2 not in state and self.moment is not None:
                state[MOMENT2] = self.moment.zeros(index, parameter)

    def _take_up_loaded(self) -> None:
        """Take momentum that a checkpoint has put in the place of this optimizer's own into its rows."""
        for index, shown in self._shown.items():
            state = self.state[self._matrices[index]]
            if state[MOMENTUM] is not shown:
                local_rows(shown).copy_(local_rows(state[MOMENTUM]))
                state[MOMENTUM] = shown

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix from its gradient. Collective, unless the exchange is local.

        Raises:
            RuntimeError: a shard with rows has no gradient.
        """
        if closure is not None:
            raise ValueError("Muon takes no closure")
        self.update_matrices()

    def update_matrices(self) -> None:
        """The step of the matrices, outside of any autocast; subclasses override `step` to add other parameters."""
        device = self._matrices[0].device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.update_matrices()
        self._refuse_off_sphere()  # schedules change it
        self._missing = {index for index in self._held if self._matrices[index].grad is None}
        if self._missing and not self._skip_missing:
            raise RuntimeError(
                f"{self._names[self._matrices[min(self._missing)]]} has no gradient at the optimizer step; was "
                "finish_grad_sync() called?"
            )
        if self._skip_missing:
            self._agree_on_gradients()
        self._take_up_loaded()
        if self.moment is not None:
            moments = [local_rows(self.state[parameter][MOMENT2]) for parameter in self._matrices]
            self.moment.begin(moments, [self.param_groups[number] for number in self._group_of])
        with self._momentum.step(self) as rows:
            self.exchange.run(rows, self.probe)  # prepare, exchange, apply, wave by wave
        self._momentum.end_step()
        self._weights.end_step()
        self._skipped.index_add_(0, self._in_order, self._first_elements.isnan().int())
        if self.moment is not None:
            self.moment.end()
        if self.hyperball is not None:
            with self.probe.phase("apply"):
                self.hyperball.apply([self.param_groups[number]["lr"] for number in self._group_of])
        for group in self.param_groups:
            if STEPS in group:
                group[STEPS] += 1

    def _agree_on_gradients(self) -> None:
        """Find the matrices whose gradient is there and finite on every rank. Collective, unless the exchange is local.

        A gradient of which magnitudes add up to more than fp32 has counts as not finite.

        Momentum advances before rows travel, so a rank that knew only its own gradients would advance the momentum of a
        matrix that another rank cannot update.
        """
        device = self._skipped.device
        failed = torch.zeros(len(self._matrices), dtype=torch.float32, device=device)
        ready = [index for index in self._held if index not in self._missing]
        if self._missing:
            failed[sorted(self._missing)] = torch.nan
        if ready:
            gradients = [local_rows(self._matrices[index].grad) for index in ready]
            sums = torch.stack(torch._foreach_norm(gradients, ord=1)).to(device, torch.float32)
            at = torch.tensor(ready, device=device) if self._missing else self._held_on_device
            failed.index_add_(0, at, sums.mul_(0.0))
        if self.exchange.scheme != LOCAL and self.exchange.group.size() > 1:
            dist.all_reduce(failed, group=self.exchange.group)
        self._failed = failed.isnan()
        if device.type == "cpu" and not self._failed.any():  # where nothing waits for a device to tell
            self._failed = None

    def prepare(self, chunk: Chunk) -> None:
        """First phase: momentum and look-ahead of this rank's rows, fp32, into `chunk.prepared`.

        Rows of a matrix that some rank has no gradient for, or one that is not finite, become NaN, so that no rank
        updates it.
        """
        rows = self._rows[chunk.number]
        with self.probe.phase("momentum"):
            self._collect_gradients(rows)
            failed = None
            if self._failed is not None:
                failed = self._failed[rows.index].repeat_interleave(rows.sizes, output_size=chunk.numel)
            if self.store is None:
                if failed is not None:
                    torch.where(failed, rows.flat_momentum, chunk.prepared, out=chunk.prepared)
                shares = [self._group(index)["momentum"] for index in rows.indices]
                if len(set(shares)) == 1:
                    self._look_ahead([rows.flat_momentum], [chunk.prepared], shares[0])
                else:
                    self._look_ahead_by_group(rows, rows.momentum, range(len(rows.indices)))
                self.probe.momentum(rows.indices, rows.momentum, self.exchange)
            else:
                self._prepare_stored(rows, failed)
            if failed is not None:
                chunk.prepared.masked_fill_(failed, torch.nan)

    def packed(self, chunk: Chunk) -> None:
        """The exchange has enqueued all that reads `chunk.prepared`."""

    def _prepare_stored(self, rows: Rows, failed: torch.Tensor | None) -> None:
        """The same with momentum from a store, part by part."""
        assert self.store is not None
        first = 0
        masks = None if failed is None else failed.split([view.numel() for view in rows.prepared])
        for part in self.store.parts(rows.indices):
            momentum, places = self.store.lend(part), range(first, first + len(part))
            for place, values in zip(places, momentum, strict=True):
                if masks is not None:
                    view = rows.prepared[place]
                    torch.where(masks[place].view(view.shape), values, view, out=view)
            self._look_ahead_by_group(rows, momentum, places)
            self.probe.momentum(part, momentum, self.exchange)
            self.store.take_back(part)
            first += len(part)

    def _look_ahead_by_group(self, rows: Rows, momentum: Sequence[torch.Tensor], places: range) -> None:
        for group, chosen in self._by_group(rows, places):
            of_group = [momentum[place - places.start] for place in chosen]
            self._look_ahead(of_group, [rows.prepared[place] for place in chosen], group["momentum"])

    def _look_ahead(self, momentum: list[torch.Tensor], rows: list[torch.Tensor], share: float) -> None:
        """Advance momentum by the gradients in `rows`, and put what is orthogonalised in their place."""
        if len(rows) == 1 and self.nesterov:  # one tensor may be more than a launch of the calls on lists takes
            momentum[0].lerp_(rows[0], 1.0 - share)
            rows[0].lerp_(momentum[0], share)
            return
        torch._foreach_lerp_(momentum, rows, 1.0 - share)
        if self.nesterov:
            torch._foreach_lerp_(rows, momentum, share)
        else:
            torch._foreach_copy_(rows, momentum)

    def _collect_gradients(self, rows: Rows) -> None:
        """Copy this rank's rows of the gradients, with the decay where it is not decoupled, to where they are prepared.

        Of a matrix without a gradient nothing is copied.
        """
        views, indices = rows.prepared, rows.indices
        if self._missing:
            present = [place for place, index in enumerate(indices) if index not in self._missing]
            views, indices = [views[place] for place in present], [indices[place] for place in present]
        if not views:
            return
        gradients = [local_rows(self._matrices[index].grad) for index in indices]
        torch._foreach_copy_(views, gradients)
        if self.decoupled_weight_decay:
            return
        for view, index in zip(views, indices, strict=True):
            if decay := self._group(index)["weight_decay"]:
                view.add_(local_rows(self._matrices[index]).to(view.device), alpha=decay)

    def apply(self, chunk: Chunk) -> None:
        """Last phase: weight <- weight - lr * (weight_decay * weight + update), on this rank's rows.

        An update that is not finite is NaN: then weights, their decay included, stay. Where norms are kept, updates
        wait for those of all shards.
        """
        rows, updates = self._rows[chunk.number], chunk.updates
        with self.probe.phase("apply"):
            torch.index_select(updates, 0, rows.firsts, out=self._first_of[chunk.number])
            if self.moment is not None:
                self.moment.apply(rows.indices, rows.updates)
            self.probe.updates(rows.updates)
            if self.hyperball is not None:
                _zero_nan(updates)
                self._hold(rows)
                return
            first = 0
            for part in self._weights.parts(rows.indices):
                weights, places = self._weights.lend(part), range(first, first + len(part))
                by_group = [
                    (group, [weights[place - first] for place in chosen], [rows.updates[place] for place in chosen])
                    for group, chosen in self._by_group(rows, places)
                ]
                if self._compute_device is not None:
                    by_group = [
                        (
                            group,
                            of_group,
                            [delta.to(weight.device) for delta, weight in zip(deltas, of_group, strict=True)],
                        )
                        for group, of_group, deltas in by_group
                    ]
                for group, of_group, deltas in by_group:
                    if group["weight_decay"] and self.decoupled_weight_decay:
                        if self.cautious:
                            decay_aligned(of_group, deltas, -group["weight_decay"] * group["lr"])
                        else:
                            torch._foreach_add_(deltas, of_group, alpha=group["weight_decay"])
                if len(part) == len(rows.indices) and self._compute_device is None:
                    _zero_nan(updates)
                else:
                    for delta in itertools.chain(*(deltas for _, _, deltas in by_group)):
                        _zero_nan(delta)
                for group, of_group, deltas in by_group:
                    torch._foreach_add_(of_group, deltas, alpha=-group["lr"])
                self._weights.take_back(part)
                first += len(part)

    def _hold(self, rows: Rows) -> None:
        """Give updates to the hyperball, but for matrices without a gradient, which keep their weights."""
        assert self.hyperball is not None
        present = [place for place, index in enumerate(rows.indices) if index not in self._missing]
        matrices = [self._matrices[rows.indices[place]] for place in present]
        self.hyperball.hold(
            [rows.indices[place] for place in present],
            [local_rows(parameter) for parameter in matrices],
            [local_rows(parameter.grad) for parameter in matrices],
            [rows.updates[place].to(parameter.device) for place, parameter in zip(present, matrices, strict=True)],
        )

    def _group(self, index: int) -> dict[str, Any]:
        return self.param_groups[self._group_of[index]]

    def _by_group(self, rows: Rows, places: range) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """The groups of some of a chunk's matrices, each with their places in the chunk."""
        groups: dict[int, list[int]] = {}
        for place in places:
            groups.setdefault(self._group_of[rows.indices[place]], []).append(place)
        for number, chosen in groups.items():
            yield self.param_groups[number], chosen

    def refuse_zero_norms(self) -> None:
        """Refuse matrices that are zero, where norms are kept. Collective; waits for the device."""
        if self.hyperball is not None:
            shards = [local_rows(parameter) for parameter in self._matrices]
            self.hyperball.refuse_zeros(shards, [self._names[parameter] for parameter in self._matrices])

    def _refuse_off_sphere(self) -> None:
        """Refuse decay where norms are kept, and steps that are as long as a matrix."""
        for number in sorted(set(self._group_of)) if self.hyperball is not None else ():
            group = self.param_groups[number]
            if group["lr"] >= 1.0:
                raise UserError(
                    f"the learning rate {group['lr']:g} of {self._names[group['params'][0]]} is not below 1: with "
                    "MuonHyperball it is the size of a step relative to the matrix; begin with 0.02"
                )
            if group["weight_decay"]:
                raise UserError(
                    f"weight decay {group['weight_decay']:g} of {self._names[group['params'][0]]} has no effect with "
                    "MuonHyperball, which keeps the norm that decay would shrink; use 0 for its matrices"
                )

    def skipped_updates(self) -> dict[str, int]:
        """Updates that were not finite, or had no gradient, since the last call, by matrix, where this rank has rows.

        Waits for the device.
        """
        counts = self._skipped.tolist()
        self._skipped.zero_()
        return {self._names[self._matrices[index]]: count for index, count in enumerate(counts) if count}

    def momentum_state(self, *, empty: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """Momentum of each parameter as the state that a checkpoint holds: fp32, of the shard's shape, sharded alike.

        Of a store they are copies, outside of the process's own memory where momentum is on disk.

        Args:
            empty: leave out the values, as they will be loaded.
        """
        if self.store is None:
            return {parameter: self.state[parameter][MOMENTUM] for parameter in self._matrices}
        shards = [local_rows(parameter) for parameter in self._matrices]
        state = {}
        rooms = self.store.scratch([rows.numel() for rows in shards])
        for index, (parameter, rows, room) in enumerate(zip(self._matrices, shards, rooms, strict=True)):
            if rows.numel() and not empty:
                room.view(rows.shape).copy_(self.store.read(index))
            state[parameter] = sharded_like(parameter, room)
        return state

    def load_momentum(self, state: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take the momentum of a checkpoint, as `momentum_state` gives it, into the store."""
        assert self.store is not None
        for index in self._held:
            if self._matrices[index] in state:
                self.store.write(index, local_rows(state[self._matrices[index]]))
        self.store.set_step_count(max((group.get(STEPS, 0) for group in self.param_groups), default=0))


def _zero_nan(tensor: torch.Tensor) -> None:
    tensor.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
