"""One step of Muon and the scalar optimizers together, as the training loop asks for it.

megatron-core's ChainedOptimizer does norm, clipping of gradients and zero counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_muon.core.errors import UserError
from megatron_muon.core.optimizer import MOMENTUM, ShardedMuon, refuse_copy
from megatron_muon.core.probe import Sampler, span
from megatron_muon.core.ranks import of_all_ranks_if_any, say
from megatron_muon.errors import OffloadError
from megatron_muon.megatron.attention_logits import AttentionLogits
from megatron_muon.megatron.builder import ReplicatedMuon
from megatron_muon.megatron.main_weights import MainWeights, ScalarState
from megatron_muon.offload.store import RecordStore, worst_failure
from megatron_muon.settings import word_as_flags


class MuonChainedOptimizer(ChainedOptimizer):
    """Muon and scalar optimizers on one model under Megatron-FSDP, seen by the training loop as one optimizer.

    A step finishes the gradient reduction unless that is done, computes the norm over all
    parameters, clips, skips where a gradient is not finite, steps every optimizer, clips queries
    and keys, and installs the weights once.

    Each optimizer is in a DistributedOptimizer of megatron-core, all with one config; 0 as
    `metrics_interval` measures no step. `weights` and `scalar_state` have main weights and scalar
    state that are out of Megatron-FSDP's buffers.
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
        inner = {member: member.optimizer for member in self._members}
        self._muons = {
            m: one for m, one in inner.items() if isinstance(one, (ShardedMuon, ReplicatedMuon))
        }
        self._sharded = {m: one for m, one in inner.items() if isinstance(one, ShardedMuon)}
        self._stored = {m: one for m, one in self._sharded.items() if one.store is not None}
        self.metrics = Sampler(list(self._muons.values()), interval=metrics_interval)
        self._grad_norm: float | torch.Tensor = 0.0
        self._weights, self._scalar_state = weights, scalar_state or {}
        self.facts: dict[str, Any] = {}  # for facts.json
        self.qk_clip: AttentionLogits | None = None
        self._has_stepped = False
        # noted once the step in which it happened is finished
        self.offload_failure: OffloadError | None = None

    @torch.no_grad()
    def step(self) -> tuple[bool, Any, Any]:
        """One step: `(updated, gradient norm, zeros in the gradient)`.

        `updated` is False where a gradient was not finite: weights and momentum are as before.
        Raises an OffloadError on every rank where one cannot read its state, before the model gets
        new weights. What could not be written is raised in the next step: this one is finished on
        every rank, so that a checkpoint can be saved.
        """
        if self.offload_failure is not None:
            raise self.offload_failure
        for store in self.stores:
            store.verify()
        self._look_for_failures()
        # by now a checkpoint is loaded
        if not self._has_stepped:
            with word_as_flags():
                for muon in self._sharded.values():
                    muon.check_weights()
        self._has_stepped = True
        for chunk in self.model_chunks:
            # Megatron's training loop has finished the reduction (finalize_model_grads); a script
            # of one's own may not have. Under `optim` without overlap Megatron-FSDP reduces in
            # place, so a second time would be wrong.
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
        """Step every optimizer, clip queries and keys, then install the weights once for all of them."""
        if self.qk_clip is not None:
            self.qk_clip.measure()
        norms = [self._grad_norm, *self.grad_norms_by_group.values()]
        if not all(math.isfinite(norm) for norm in norms):
            self.metrics.skipped_steps += 1
            return False
        with span("optimizer-inner-step"), self.metrics.step():
            for member in self._members:
                with span("muon" if member in self._muons else self.config.muon_scalar_optimizer):
                    self._scalar_state.get(member, member.optimizer).step()
            self._look_for_failures()
            if self.qk_clip is not None:
                with span("qk-clip"):
                    self.qk_clip.clip()
        with span("optimizer-copy-main-to-model-params"):
            # else they are copied as they go back
            for chunk in self.model_chunks if self._weights is None else ():
                chunk.module.install_optimized_model_weights()
        with span("params-all-gather"):
            for chunk in self.model_chunks:
                chunk.start_param_sync()
        return True

    @contextlib.contextmanager
    def main_weights_at_hand(self, *, values: bool = True, write: bool = False) -> Iterator[None]:
        """Around what reads main weights, or with `write` changes them, between steps; see `MainWeights.at_hand`."""
        if self._weights is None:  # they are there anyway
            yield
            return
        with self._weights.at_hand(values=values, write=write):
            self._look_for_failures()
            yield

    @property
    def stores(self) -> list[RecordStore]:
        """Whatever keeps state out of the optimizers."""
        of_muons = [
            store for muon in self._stored.values() if isinstance(store := muon.store, RecordStore)
        ]
        return [*of_muons, *(self._weights.stores if self._weights is not None else ())]

    def skipped_updates(self) -> dict[str, int]:
        """Updates that were not finite since the last call, by matrix. Collective; waits for the device."""
        mine = {
            name: count
            for muon in self._muons.values()
            for name, count in muon.skipped_updates().items()
        }
        everyone = of_all_ranks_if_any(mine)
        return {
            name: max(counts.get(name, 0) for counts in everyone)
            for name in sorted(set().union(*everyone))
        }

    def _look_for_failures(self) -> None:
        """Raise an OffloadError on every rank where one has lost state; note one that lost nothing, to end the run.

        Collective with files alone.
        """
        if (failure := worst_failure(self.stores)) is not None:
            nothing_is_lost, text = failure
            self.offload_failure = OffloadError(text)
            if not nothing_is_lost:
                raise self.offload_failure

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
        """One state dict for all optimizers, keyed by parameter name, for megatron-core's fsdp_dtensor format."""
        merged: dict[str, Any] = {"state": {}, "param_to_group_meta": {}}
        for member in self._members:
            part = member.sharded_state_dict(model_sharded_state_dict, False, metadata=metadata)
            # Copies of the dicts: those of the optimizers would keep what is added to them below.
            merged["state"].update((name, dict(slots)) for name, slots in part["state"].items())
            merged["param_to_group_meta"].update(part["param_to_group_meta"])
        for member, muon in self._stored.items():
            for parameter, momentum in muon.momentum_state(empty=is_loading).items():
                merged["state"].setdefault(member._param_name(parameter), {})[MOMENTUM] = momentum
        for member, scalars in self._scalar_state.items():
            for parameter, slots in scalars.state(empty=is_loading).items():
                merged["state"].setdefault(member._param_name(parameter), {}).update(slots)
        self._look_for_failures()
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` returned; an OffloadError where a rank could not write momentum."""
        for member in self._members:
            parameters = {
                member._param_name(parameter): parameter for parameter in member.get_parameters()
            }
            settings = {
                n: meta for n, meta in state_dict["param_to_group_meta"].items() if n in parameters
            }
            self._tell_of_other_momentum(member, settings)
            state = {
                name: dict(slots)
                for name, slots in state_dict["state"].items()
                if name in parameters
            }
            muon, scalars = self._stored.get(member), self._scalar_state.get(member)
            apart = (
                (MOMENTUM,) if muon is not None else scalars.slots if scalars is not None else ()
            )
            kept = {
                parameters[name]: {slot: slots.pop(slot) for slot in apart}
                for name, slots in state.items()
            }
            member.load_state_dict({"state": state, "param_to_group_meta": settings})
            if muon is not None:
                muon.load_momentum(
                    {parameter: slots[MOMENTUM] for parameter, slots in kept.items()}
                )
            if scalars is not None:
                scalars.load(kept)
        self._look_for_failures()
        if self.offload_failure is not None:
            raise self.offload_failure

    @staticmethod
    def _tell_of_other_momentum(optimizer: MegatronOptimizer, settings: dict[str, Any]) -> None:
        """Warn where a checkpoint's momentum takes the place of the command line's, as its betas do with Adam."""
        group = next(group for group in optimizer.optimizer.param_groups if group["params"])
        stored = settings[optimizer._param_name(group["params"][0])].get("momentum")
        if stored is not None and stored != group["momentum"]:
            going_on = (
                f"the checkpoint's momentum {stored:g} goes on, not --muon-momentum"
                f" {group['momentum']:g}"
            )
            say(f"megatron-muon: warning: {going_on}; --no-load-optim starts afresh with it")
