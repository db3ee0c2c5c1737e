"""One step of Muon and the scalar optimizers together, as the training loop asks for it.

megatron-core's ChainedOptimizer does norm, clipping of gradients and zero counts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.core.probe import span
from megatron_muon.errors import OffloadError, UserError
from megatron_muon.fsdp.part import Part, refuse_copy
from megatron_muon.megatron.attention_logits import AttentionLogits
from megatron_muon.megatron.builder import ReplicatedMuon
from megatron_muon.megatron.main_weights import MainWeights
from megatron_muon.megatron.scalar_state import ScalarState, SlotsOf
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.megatron.upstream import ChainedOptimizer, MegatronOptimizer
from megatron_muon.metrics import Sampler
from megatron_muon.offload.store import RecordStore, first_failure
from megatron_muon.ranks import of_all_ranks_if_any, say
from megatron_muon.settings import word_as_flags


class MuonChainedOptimizer(ChainedOptimizer):
    """Muon and scalar optimizers of one model under Megatron-FSDP, as one optimizer for the loop.

    A step finishes the gradient reduction unless that is done, computes the norm over all
    parameters, clips, skips a step with non-finite gradients, steps every optimizer, clips queries
    and keys, and installs the weights once.

    Each optimizer is in a DistributedOptimizer of megatron-core, all with one config; a
    `metrics_interval` of 0 measures no step. `weights` and `scalar_state` have main weights and
    scalar state outside Megatron-FSDP's buffers.
    """

    def __init__(
        self,
        chained_optimizers: list[MegatronOptimizer],
        *,
        metrics_interval: int = 0,
        weights: MainWeights | None = None,
        scalar_state: Mapping[MegatronOptimizer, ScalarState] | None = None,
    ) -> None:
        super().__init__(chained_optimizers)
        self._members = [member for member in chained_optimizers if not member.is_stub_optimizer]
        self._muons: dict[MegatronOptimizer, Part | ReplicatedMuon] = {}
        self._sharded: dict[MegatronOptimizer, ShardedMuon] = {}
        for member in self._members:
            inner = member.optimizer
            if isinstance(inner, ReplicatedMuon):
                self._muons[member] = inner
            if isinstance(inner, ShardedMuon):
                self._muons[member] = inner.part
                self._sharded[member] = inner
        parts = [muon.part for muon in self._sharded.values()]
        self._audits = [part.audit for part in parts if part.audit]
        self.metrics = Sampler(list(self._muons.values()), interval=metrics_interval)
        self._grad_norm: float | torch.Tensor = 0.0
        self._weights = weights
        self._scalar_state = scalar_state or {}
        self.facts: dict[str, Any] = {}  # for facts.json
        self.iteration: int | None = None  # of the step, from 0, where the loop counts
        self.audit_faults: list[str] = []  # of the latest step
        self.qk_clip: AttentionLogits | None = None
        self._has_stepped = False

    @torch.no_grad()
    def step(self) -> tuple[bool, Any, Any]:
        """One step: `(updated, gradient norm, zeros in the gradient)`.

        `updated` is False where a gradient was not finite: weights and momentum are unchanged.
        Raises an OffloadError on every rank if one cannot read or write its state, before the model
        gets new weights.
        """
        self.audit_faults = []  # also where the step is skipped
        for store in self.stores:
            store.verify()
        self._look_for_failures()
        if not self._has_stepped:  # by now a checkpoint is loaded
            for muon in self._muons.values():
                if isinstance(muon, Part):
                    with word_as_flags():
                        muon.check_weights()
        self._has_stepped = True
        for chunk in self.model_chunks:
            # Megatron's training loop has finished the reduction (finalize_model_grads); a custom
            # loop may not have. Under `optim` without overlap Megatron-FSDP reduces in place, so a
            # second reduction would be wrong.
            if not chunk.module.is_param_fsdp_distributed:
                with span("finish_grad_sync"):
                    chunk.finish_grad_sync()
        with span("optimizer"):
            result: tuple[bool, Any, Any] = super().step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, and the attention logits of the forward passes that they came from."""
        super().zero_grad(set_to_none)
        if self.qk_clip is not None:
            self.qk_clip.forget()

    @torch.no_grad()
    def get_grad_norm(self) -> float | torch.Tensor:
        """The gradient norm over all parameters, kept for the finiteness check of the same step."""
        with span("grad-norm"):
            self._grad_norm = super().get_grad_norm()
        return self._grad_norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step every optimizer, clip queries and keys, then install all weights once."""
        if self.qk_clip is not None:
            self.qk_clip.measure()
        norms = [self._grad_norm, *self.grad_norms_by_group.values()]
        if not all(math.isfinite(norm) for norm in norms):
            self.metrics.skipped_steps += 1
            return False
        if self.iteration is not None:
            for audit in self._audits:
                audit.steps = self.iteration
        with span("optimizer-inner-step"), self.metrics.step():
            for member in self._members:
                with span("muon" if member in self._muons else self.config.muon_scalar_optimizer):
                    # the inner optimizer: the wrapper would install weights after each of them
                    inner = self._scalar_state.get(member, member.optimizer)
                    inner.step()
            self._look_for_failures()
            self._look_for_faults()
            if self.qk_clip is not None:
                with span("qk-clip"):
                    self.qk_clip.clip()
        with span("optimizer-copy-main-to-model-params"):
            if self._weights is None:  # else each record is copied when it goes back
                for chunk in self.model_chunks:
                    chunk.module.install_optimized_model_weights()
        with span("params-all-gather"):
            for chunk in self.model_chunks:
                chunk.start_param_sync()
        return True

    @contextlib.contextmanager
    def main_weights_at_hand(self, *, values: bool = True, write: bool = False) -> Iterator[None]:
        """Access to main weights between steps; see `MainWeights.at_hand`."""
        if self._weights is None:
            yield
            return
        with self._weights.at_hand(values=values, write=write):
            self._look_for_failures()
            yield

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of momentum, main weights and scalar state."""
        momentum = [muon.store for muon in self._sharded.values()]
        weights = [] if self._weights is None else self._weights.stores
        return [store for store in (*momentum, *weights) if isinstance(store, RecordStore)]

    def skipped_updates(self) -> dict[str, int]:
        """Non-finite updates since the last call, by matrix. Collective; waits for the device."""
        mine: dict[str, int] = {}
        for muon in self._muons.values():
            mine.update(muon.skipped_updates())
        skipped: dict[str, int] = {}
        for counts in of_all_ranks_if_any(mine):
            for name, count in counts.items():
                skipped[name] = max(count, skipped.get(name, 0))
        return dict(sorted(skipped.items()))

    def _look_for_failures(self) -> None:
        """Raise an OffloadError on every rank if one has lost state. Collective if it has files."""
        failure = first_failure(self.stores)
        if failure is not None:
            raise OffloadError(failure)

    def _look_for_faults(self) -> None:
        """Gather the faults that audits of this step have found. Collective then."""
        if any(audit.is_audited for audit in self._audits):
            mine = [line for audit in self._audits for line in audit.faults]
            found = itertools.chain(*of_all_ranks_if_any(mine))
            self.audit_faults = list(dict.fromkeys(found))

    def state_dict(self) -> Any:
        """Refused: megatron-core's has no momentum. `sharded_state_dict` has everything."""
        raise UserError(
            "state_dict() has no momentum under Megatron-FSDP; save"
            ' sharded_state_dict(model.state_dict(), metadata={"distrib_optim_sharding_type":'
            ' "fsdp_dtensor"}), which load_state_dict takes'
        )

    def __getstate__(self) -> Any:
        refuse_copy()

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One state dict of all optimizers, by parameter name, for the fsdp_dtensor format."""
        merged: dict[str, Any] = {"state": {}, "param_to_group_meta": {}}
        for member in self._members:
            part = member.sharded_state_dict(model_sharded_state_dict, False, metadata=metadata)
            # Copies: the optimizers' own dicts would keep the additions below.
            merged["state"].update((name, dict(slots)) for name, slots in part["state"].items())
            merged["param_to_group_meta"].update(part["param_to_group_meta"])
            for parameter, slots in self._offloaded_state(member, empty=is_loading).items():
                merged["state"].setdefault(member._param_name(parameter), {}).update(slots)
        self._look_for_failures()
        return merged

    def _offloaded_state(self, member: MegatronOptimizer, *, empty: bool) -> SlotsOf:
        if member in self._sharded:
            return self._sharded[member].kept_state(empty=empty)
        if member in self._scalar_state:
            return self._scalar_state[member].state(empty=empty)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `sharded_state_dict`; an OffloadError if a write fails."""
        for member in self._members:
            self._load_member(member, state_dict["state"], state_dict["param_to_group_meta"])
        self._look_for_failures()

    def _load_member(
        self, member: MegatronOptimizer, state: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        parameters = {member._param_name(p): p for p in member.get_parameters()}
        settings = {name: value for name, value in settings.items() if name in parameters}
        self._warn_of_other_momentum(member, settings)
        state = {name: dict(slots) for name, slots in state.items() if name in parameters}
        muon, scalars = self._sharded.get(member), self._scalar_state.get(member)
        kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for name, slots in state.items():
            p = parameters[name]
            offloaded: Sequence[str] = ()
            if muon is not None:
                offloaded = muon.part.kept_slots(p)
            elif scalars is not None:
                offloaded = scalars.slots
            kept[p] = {slot: slots.pop(slot) for slot in offloaded}
        member.load_state_dict({"state": state, "param_to_group_meta": settings})
        if muon is not None:
            muon.load_kept(kept)
        if scalars is not None:
            scalars.load(kept)

    @staticmethod
    def _warn_of_other_momentum(optimizer: MegatronOptimizer, settings: dict[str, Any]) -> None:
        """Warn if the checkpoint's momentum replaces the command line's, as Adam's betas do."""
        group = next(group for group in optimizer.optimizer.param_groups if group["params"])
        stored = settings[optimizer._param_name(group["params"][0])].get("momentum")
        if stored is not None and stored != group["momentum"]:
            say(
                f"megatron-muon: warning: using the checkpoint's momentum {stored:g}; ignoring"
                f" --muon-momentum {group['momentum']:g}; --no-load-optim starts afresh with it"
            )
