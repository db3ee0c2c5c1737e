"""Makes the matrices' part of an optimizer, for `megatron_muon.Muon` and for Megatron's factory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_muon.core.build import GATHERED, LOCAL, OWNER, SHARED, StepOptions, make_waves
from megatron_muon.core.methods.method import Method
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.methods.owner import OwnerMethod
from megatron_muon.core.passes import BY_RULE, DECOUPLED
from megatron_muon.core.plan import Plan
from megatron_muon.core.rows import Storage
from megatron_muon.core.rules import RULES, make_rules
from megatron_muon.core.rules.held import Held
from megatron_muon.core.rules.rule import Rule
from megatron_muon.fsdp.audit import Audit
from megatron_muon.fsdp.part import Part, ViewedParameter
from megatron_muon.fsdp.whole_step import WholeStep
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore
from megatron_muon.settings import MuonSettings


@dataclass(frozen=True)
class Variant:
    """The variant of Muon, beside what `MuonSettings` have.

    Attributes:
        moment2: rule of the second moment, if any.
        decay: DECOUPLED, or COUPLED; cautious decay takes its place.
        skip_missing: as for `Rows`.
    """

    moment2: str | None = None
    nesterov: bool = True
    decay: str = DECOUPLED
    skip_missing: bool = False


@dataclass(frozen=True)
class Beside:
    """What a part shares with others, or has elsewhere.

    Attributes:
        offload: keeps momentum off the device, or in another format than fp32.
        keep_weights: moves the weights of the part's matrices to a store beside their momentum's.
        group: the layout's ranks, for an exchange on another device.
        plan: owners and waves, if they have been planned before.
        memory: buffers of another part, which steps before or after this one.
    """

    offload: OffloadRun | None = None
    keep_weights: Callable[[RecordStore, Sequence[ViewedParameter]], Storage] | None = None
    group: dist.ProcessGroup | None = None
    plan: Plan | None = None
    memory: torch.Tensor | None = None


def make_part(
    viewed: Sequence[ViewedParameter],
    held: Held,
    settings: MuonSettings,
    method: Method,
    variant: Variant,
    beside: Beside,
) -> Part:
    """The part of an optimizer for the matrices of a layout. Collective.

    Args:
        viewed: parameters in the order of the layout.
        held: the matrices, and this rank's part of them.
        method: on the device of momentum and iteration; unscaled with a second moment.
    """
    names = [matrix.name for matrix in held.layout.matrices]
    scheme = _scheme_of(settings, held)
    held = replace(held, repeated=scheme in (LOCAL, GATHERED))
    rules = _rules(held, settings, method, variant.moment2)
    offload = beside.offload
    store = offload.make_records(names, held.shards, method.device) if offload else None
    options = StepOptions(
        method.device,
        settings.muon_exchange_dtype,
        settings.muon_exchange_buffer_mb,
        settings.muon_team_size,
        shared=beside.memory,
        is_freed=settings.muon_free_buffers,
        is_apart=store is not None and store.is_apart,
    )
    waves = make_waves(
        scheme, held.layout, beside.group or held.group, method, options, rules, beside.plan
    )
    outside = beside.keep_weights(store, viewed) if beside.keep_weights and store else None
    decay = BY_RULE if settings.muon_cautious_weight_decay else variant.decay
    part = Part(
        viewed,
        waves,
        rules,
        {"nesterov": variant.nesterov, "decay": decay},
        store=store,
        outside=outside,
        skip_missing=variant.skip_missing,
    )
    if scheme == LOCAL:
        part.copies = held.group.size()
    if settings.muon_audit_interval and isinstance(method, NewtonSchulz | OwnerMethod):
        whole_step = WholeStep(
            method,
            rules,
            nesterov=variant.nesterov,
            decay=variant.decay,
            half=settings.muon_exchange_dtype == "bf16" and scheme in (OWNER, SHARED),
            rounds=store is not None and store.rounds,
        )
        part.audit = Audit(part, held, settings.muon_audit_interval, whole_step)
    return part


def _scheme_of(settings: MuonSettings, held: Held) -> str:
    if held.replicated:  # no exchange, except to share the work
        return SHARED if settings.muon_share_replicated else LOCAL
    return settings.muon_exchange


def _rules(held: Held, settings: MuonSettings, method: Method, moment2: str | None) -> list[Rule]:
    names = [moment2] if moment2 else []
    if settings.muon_cautious_weight_decay:
        names.append("cautious")
    if settings.muon_hyperball:
        names.append("hyperball")
    if any(RULES[name].unscaled for name in names):
        matrices = held.layout.matrices
        scales = [method.row_scales(matrix).to(held.device) for matrix in matrices]
        held = replace(held, scales=scales)
    options = {"beta2": settings.adaptive_muon_beta2, "eps": settings.adaptive_muon_eps}
    return make_rules(names, held, options)
