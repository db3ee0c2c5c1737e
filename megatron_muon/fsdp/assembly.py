"""Builds the parts of a Muon from what a front end knows: exchange, rules and store.

`megatron_muon.Muon` and Megatron's factory find out which matrices there are and who holds what,
and give it here with their settings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_muon.core.build import make_exchange
from megatron_muon.core.exchange import GATHERED, LOCAL, SHARED, Buffers, Exchange
from megatron_muon.core.memory import moment_bytes
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import Plan
from megatron_muon.core.rules import RULES, chosen_rules, make_rules
from megatron_muon.core.rules.rule import Held, Rule
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore
from megatron_muon.settings import MuonSettings


def make_parts(
    held: Held,
    settings: MuonSettings,
    orthogonalizer: Orthogonalizer,
    *,
    moment2: str | None,
    nesterov: bool,
    decoupled: bool = True,
    offload: OffloadRun | None = None,
    group: dist.ProcessGroup | None = None,
    plan: Plan | None = None,
    scratch: Any = None,
) -> tuple[Exchange, list[Rule], RecordStore | None]:
    """What a `ShardedMuon` is made of. Collective.

    Args: held: the matrices, and what this rank has of them. settings: of the user. orthogonalizer:
    on the device where momentum and exchange compute; unscaled with `moment2`, the second moment's
    rule. moment2, nesterov,
    decoupled: which rules; `decoupled` decay shrinks weights, other decay is added to the gradient.
    offload: keeps momentum elsewhere, or in another format than fp32. group: the same ranks as the
    layout's, for an exchange on another device. plan: of the exchange, where it has been made
    before. scratch: buffers of another Muon, which steps before or after this one.
    """
    cautious, device = settings.muon_cautious_weight_decay, orthogonalizer.device
    names = chosen_rules(
        moment2=moment2, cautious=cautious, hyperball=settings.muon_hyperball, decoupled=decoupled
    )
    scheme = scheme_of(settings, replicated=held.replicated)
    if any(RULES[name].unscaled for name in names):
        held = replace(
            held,
            scales=[orthogonalizer.row_scales(one).to(held.device) for one in held.layout.matrices],
        )
    options = {
        "nesterov": nesterov,
        "beta2": settings.adaptive_muon_beta2,
        "eps": settings.adaptive_muon_eps,
    }
    rules = make_rules(names, replace(held, repeated=scheme in (LOCAL, GATHERED)), options)
    store = (
        offload.make_store(held.layout, held.group.rank(), device) if offload is not None else None
    )
    exchange = make_exchange(
        scheme,
        held.layout,
        group or held.group,
        orthogonalizer,
        Buffers(
            device,
            rows_apart=store is not None and store.prepare_stream is not None,
            scratch=scratch,
            free=settings.muon_free_buffers,
        ),
        rules=rules,
        beside=moment_bytes(moment2, cautious=cautious),
        buffer_mb=settings.muon_exchange_buffer_mb,
        wire=settings.muon_exchange_dtype,
        team_size=settings.muon_team_size,
        plan=plan,
    )
    return exchange, rules, store


def scheme_of(settings: MuonSettings, *, replicated: bool) -> str:
    """How matrices become whole: where every rank holds them, by sharing the work or doing all of it."""
    if replicated:
        return SHARED if settings.muon_share_replicated else LOCAL
    return settings.muon_exchange


def offload_run(
    settings: MuonSettings, group: dist.ProcessGroup | None = None
) -> OffloadRun | None:
    """What keeps momentum elsewhere, or in another format, than as fp32 on the device.

    Its stores are made by the ranks of `group`, None being all.
    """
    if settings.muon_offload == "none" and settings.muon_momentum_dtype == "fp32":
        return None
    return OffloadRun(
        settings.muon_offload,
        settings.muon_momentum_dtype,
        fraction=settings.muon_offload_fraction,
        directory=settings.muon_offload_dir,
        buffer_mb=settings.muon_offload_buffer_mb,
        group=group,
    )
