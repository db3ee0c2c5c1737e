"""Makes exchange, rules and store of a Muon, for `megatron_muon.Muon` and Megatron's factory."""

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
    """The exchange, the rules and the store of a `ShardedMuon`. Collective.

    Args:
        held: the matrices, and this rank's part of them.
        orthogonalizer: on the device where momentum and exchange compute; unscaled with `moment2`.
        moment2: the rule of the second moment, if any.
        decoupled: decay shrinks weights; other decay is added to the gradient.
        offload: keeps momentum off the device, or in another format than fp32.
        group: the layout's ranks, for an exchange on another device.
        plan: of the exchange, if it has been made before.
        scratch: buffers of another Muon, which steps before or after this one.
    """
    cautious = settings.muon_cautious_weight_decay
    device = orthogonalizer.device
    names = chosen_rules(
        moment2=moment2, cautious=cautious, hyperball=settings.muon_hyperball, decoupled=decoupled
    )
    scheme = scheme_of(settings, replicated=held.replicated)
    if any(RULES[name].unscaled for name in names):
        scales = [orthogonalizer.row_scales(matrix) for matrix in held.layout.matrices]
        held = replace(held, scales=[each.to(held.device) for each in scales])
    options = {
        "nesterov": nesterov,
        "beta2": settings.adaptive_muon_beta2,
        "eps": settings.adaptive_muon_eps,
    }
    rules = make_rules(names, replace(held, repeated=scheme in (LOCAL, GATHERED)), options)
    store = None
    if offload is not None:
        names_of_matrices = [matrix.name for matrix in held.layout.matrices]
        store = offload.make_records(names_of_matrices, held.shards, device)
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
    """The scheme of the exchange; replicated matrices need none, except to share the work."""
    if replicated:
        return SHARED if settings.muon_share_replicated else LOCAL
    return settings.muon_exchange


def offload_run(
    settings: MuonSettings, group: dist.ProcessGroup | None = None
) -> OffloadRun | None:
    """The stores of momentum, unless it is fp32 on the device. `group`: their ranks; None: all."""
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
