"""Muon on sharded matrices: the step, on one page.

Each rank holds some rows of every matrix (ZeRO), with their gradients and momentum. A step has three phases; the
exchange runs them wave by wave, a wave being as many matrices as fit its buffer:

    prepare   each rank, its rows   momentum <- lerp(momentum, gradient), look-ahead; elementwise
    exchange  rows -> owner         all-to-all: a rank's rows of each matrix, (rows, cols), go to the rank that owns it,
                                    4 bytes an element, or 2 where the iteration runs in bf16
              owner                 Newton-Schulz on whole matrices, block by block; a team of owners adds up X X^T
              owner -> rows         all-to-all: the update's rows go to all ranks that hold them, as many bytes
    finalize  each rank, its rows   weight <- weight - lr * (weight_decay * weight + update); elementwise
                                    (`core.decay` has cautious decay, `core.hyperball` what keeps norms instead)

While wave k is orthogonalised, rows of wave k+1 and updates of wave k-1 are under way. `core.exchange` has the
exchanges: `OwnerExchange` as above, `AllGatherExchange` to read first, `SharedExchange` and `LocalExchange` for
matrices that every rank holds whole. Gradient reduction, clipping and installing weights are the caller's part.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.core.adaptive import SecondMoment
from megatron_muon.core.decay import decay_aligned
from megatron_muon.core.errors import UserError
from megatron_muon.core.exchange.repeated import LocalExchange
from megatron_muon.core.exchange.steps import Exchange
from megatron_muon.core.hyperball import Hyperball
from megatron_muon.core.momentum import Lender, MomentumStore
from megatron_muon.core.numbers import check_number
from megatron_muon.core.probe import SILENT, Probe

MOMENTUM = "momentum_buffer"
"""The momentum's slot of the optimizer state, upstream's name."""

MOMENT2 = "moment2_buffer"
"""The second moment's slot, upstream's name."""

STEPS = "rounding_steps"
"""A parameter group's count of steps where momentum is rounded for storage."""


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of `tensor` that this rank holds, without a copy: a DTensor's local tensor, or the tensor itself.

    Of a stack `(experts, rows, cols)` they are the rows of the experts that it holds, one below the other.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.view(local.shape[:-1].numel(), local.shape[-1]) if local.ndim == 3 else local


class ShardedMuon(torch.optim.Optimizer):
    """Muon whose parameters are row shards of matrices, or with `SharedExchange` whole replicas.

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
        cautious: of decoupled decay, only where it and the update have one sign.
        hyperball: keeps the norms of the matrices, which takes the place of decay; gradients are overwritten.
        moment: the second moment of an adaptive Muon; the batches of `exchange` have its `normalizer`.
        store: keeps momentum of the parameters, in their order; None keeps it as state, fp32.
        weights: lends this rank's rows of the parameters, which then hold none; None changes the parameters themselves.
        compute_device: where momentum and exchange compute, if not where the parameters are.
        skip_missing: a matrix without a gradient, or with one that is not finite, keeps weights and state on every rank
            of the exchange where one rank has none or such a one, instead of being an error. Costs one all-reduce of a
            number for each matrix in a step, which the host does not wait for on a GPU.

    Attributes:
        probe: is told of each step; `core.probe`.

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
        # With skip_missing, for each matrix: whether every rank has a finite gradient, and 0.0 if so, else NaN.
        self._usable: tuple[torch.Tensor, ...] = ()
        self._marks: tuple[torch.Tensor, ...] = ()
        self._held = [index for index, parameter in enumerate(self._matrices) if local_rows(parameter).numel()]
        self._to_prepare, self._to_finalize = set[int](), set[int]()
        self._skipped: torch.Tensor | None = None
        self._on_device: dict[tuple[int, ...], torch.Tensor] = {}  # what `_index` has made
        self._refuse_off_sphere()
        self.initialize_state()

    def initialize_state(self) -> None:
        """Give every parameter that has none its state of zeros, on every rank alike."""
        for index, parameter in enumerate(self._matrices):
            state = self.state[parameter]
            if MOMENTUM not in state and self.store is None:
                state[MOMENTUM] = torch.zeros_like(parameter.detach(), dtype=torch.float32)
            if MOMENT2 not in state and self.moment is not None:
                state[MOMENT2] = self.moment.zeros(index, parameter)

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
        self._to_prepare, self._to_finalize = set(self._held), set(self._held)
        if self.moment is not None:
            moments = [local_rows(self.state[parameter][MOMENT2]) for parameter in self._matrices]
            self.moment.begin(moments, [self.param_groups[number] for number in self._group_of])
        with self._momentum.step(self) as rows:
            self.exchange.run(rows, self.probe)  # prepare, exchange, finalize, wave by wave
        left = self._to_prepare | self._to_finalize
        assert not left, f"the exchange left out {len(left)} matrices"
        self._momentum.end_step()
        self._weights.end_step()
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

        Momentum advances before rows travel, so a rank that knew only its own gradients would advance the momentum of a
        matrix that another rank cannot update.
        """
        ready = [index for index in self._held if index not in self._missing]
        failed = torch.zeros(len(self._matrices), dtype=torch.int32, device=self._matrices[0].device)
        if self._missing:
            failed[sorted(self._missing)] = 1
        if ready:
            gradients = [local_rows(self._matrices[index].grad) for index in ready]
            largest = torch.stack(torch._foreach_norm(gradients, ord=float("inf"))).float()  # as momentum takes them
            failed.index_add_(0, self._index(ready, failed.device), (~largest.isfinite()).int())
        if not isinstance(self.exchange, LocalExchange) and self.exchange.group.size() > 1:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.exchange.group)
        self._usable = (failed == 0).unbind()
        self._marks = torch.where(failed == 0, 0.0, torch.nan).to(torch.float32).unbind()

    def prepare(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """First phase: momentum and look-ahead. Without Nesterov, what it returns may be the momentum itself.

        Of a matrix without a gradient, or with one that is not finite, it returns NaN, so that no rank updates it.
        """
        _take(self._to_prepare, indices)
        ahead: list[torch.Tensor] = []
        with self.probe.phase("momentum"):
            for part in self._momentum.parts(indices):
                momentum = self._momentum.lend(part)
                ahead_of_part = (
                    [torch.full_like(values, torch.nan) for values in momentum] if self._missing else list(momentum)
                )
                for group, parameters, places in self._by_group(part, but=self._missing):
                    gradients = self._gradients(group, parameters)
                    rows = [momentum[place] for place in places]
                    if self._skip_missing:
                        usable = [self._usable[part[place]] for place in places]
                        old = zip(usable, gradients, rows, strict=True)
                        gradients = [torch.where(keep, gradient, values) for keep, gradient, values in old]
                    torch._foreach_lerp_(rows, gradients, 1.0 - group["momentum"])
                    if self.nesterov:
                        rows = list(torch._foreach_lerp(gradients, rows, group["momentum"]))
                    elif self._momentum.staged:
                        rows = [values.clone() for values in rows]
                    if self._skip_missing:
                        rows = list(torch._foreach_add(rows, [self._marks[part[place]] for place in places]))
                    for place, values in zip(places, rows, strict=True):
                        ahead_of_part[place] = values
                self.probe.momentum(part, momentum, self.exchange)
                self._momentum.take_back(part)
                ahead += ahead_of_part
        return ahead

    def finalize(self, indices: Sequence[int], updates: Sequence[torch.Tensor], finite: torch.Tensor) -> None:
        """Last phase: weight <- weight - lr * (weight_decay * weight + update), on this rank's rows.

        A matrix whose update is not finite keeps its weights: the update is zero then, and so is the decay. Where norms
        are kept, updates wait for those of all shards.
        """
        _take(self._to_finalize, indices)
        with self.probe.phase("apply"):
            self._count_skipped(indices, finite)
            first = 0
            for part in self._weights.parts(indices):
                lent = self._weights.lend(part)
                for group, parameters, within in self._by_group(part):
                    weights, places = [lent[place] for place in within], [first + place for place in within]
                    if self.moment is not None:
                        rows = self.moment.scaled(indices, places, updates, finite)
                    else:
                        rows = [updates[place] for place in places]
                    self.probe.updates(rows)
                    if self._compute_device is not None:
                        rows = [update.to(weights[0].device) for update in rows]
                    if self.hyperball is not None:
                        self._hold(parameters, [indices[place] for place in places], rows)
                        continue
                    if group["weight_decay"] and self.decoupled_weight_decay:
                        self._decay(group, weights, rows, finite, places)
                    torch._foreach_add_(weights, rows, alpha=-group["lr"])
                self._weights.take_back(part)
                first += len(part)

    def _decay(
        self,
        group: dict[str, Any],
        weights: list[torch.Tensor],
        updates: list[torch.Tensor],
        finite: torch.Tensor,
        places: Sequence[int],
    ) -> None:
        """Decoupled decay of matrices of a group, whose places in `finite` are given; none without a finite update."""
        factor = -group["weight_decay"] * group["lr"]
        if self.cautious:
            least = torch.where(finite, 0.0, torch.inf).to(weights[0]).unbind()
            decay_aligned(weights, updates, [least[place] for place in places], factor)
        else:
            shares = finite.to(weights[0]).unbind()
            torch._foreach_addcmul_(weights, weights, [shares[place] for place in places], value=factor)

    def _hold(self, parameters: Sequence[torch.Tensor], indices: Sequence[int], updates: list[torch.Tensor]) -> None:
        """Give updates to the hyperball, but for matrices without a gradient, which keep their weights."""
        assert self.hyperball is not None
        present = [place for place, index in enumerate(indices) if index not in self._missing]
        self.hyperball.hold(
            [indices[place] for place in present],
            [local_rows(parameters[place]) for place in present],
            [local_rows(parameters[place].grad) for place in present],  # type: ignore[arg-type]
            [updates[place] for place in present],
        )

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

    def _gradients(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of the gradients, fp32, with the decay where it is not decoupled."""
        gradients = [local_rows(parameter.grad).float() for parameter in parameters]  # type: ignore[arg-type]
        if group["weight_decay"] and not self.decoupled_weight_decay:
            weights = [local_rows(parameter) for parameter in parameters]
            gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        if self._compute_device is not None:
            gradients = [rows.to(self._compute_device) for rows in gradients]
        return gradients

    def _by_group(
        self, indices: Sequence[int], *, but: Container[int] = ()
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor], list[int]]]:
        """The groups of these matrices, each with its parameters and their places in `indices`."""
        groups: dict[int, list[int]] = {}
        for place in (place for place, index in enumerate(indices) if index not in but):
            index = indices[place]
            groups.setdefault(self._group_of[index], []).append(place)
        for group, places in groups.items():
            yield self.param_groups[group], [self._matrices[indices[place]] for place in places], places

    def skipped_updates(self) -> dict[str, int]:
        """Updates that were not finite, or had no gradient, since the last call, by matrix, where this rank has rows.

        Waits for the device.
        """
        if self._skipped is None:
            return {}
        counts = self._skipped.tolist()
        self._skipped.zero_()
        return {self._names[self._matrices[index]]: count for index, count in enumerate(counts) if count}

    def _count_skipped(self, indices: Sequence[int], finite: torch.Tensor) -> None:
        if self._skipped is None:
            self._skipped = torch.zeros(len(self._matrices), dtype=torch.int32, device=finite.device)
        self._skipped.index_add_(0, self._index(indices, finite.device), (~finite).int())

    def _index(self, indices: Sequence[int], device: torch.device) -> torch.Tensor:
        """The indices as an int64 tensor on the device, made once for each sequence."""
        key = tuple(indices)
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(key, dtype=torch.int64, device=device)
        return self._on_device[key]

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


def _take(left: set[int], indices: Sequence[int]) -> None:
    """Check that the exchange takes each matrix of which this rank holds rows through a phase once in a step."""
    assert left.issuperset(indices), "the exchange takes a matrix twice, or one that this rank does not hold"
    left.difference_update(indices)


def sharded_like(other: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """`elements`, of the shape of this rank's rows, as a tensor that is sharded as `other` is, wherever they lie."""
    if not isinstance(other, DTensor):
        return elements.view(other.shape)
    return DTensor(elements.view(other._local_tensor.shape), other._spec, requires_grad=False)
