"""The table of parity: which cases are trained, on how many ranks, and what runs again in other
circumstances.

Dimensions that are independent meet in pairs and not in a full product: `spread` has every case
under another strategy or exchange on each number of ranks, and every layout has half of the
variants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.case import STRATEGIES, Case

SHARDED = STRATEGIES[1:]
OUTER = "optim_grads_params, outer optim"


def but(case: Case, **optimizer: Any) -> Case:
    """A case with other settings of the optimizer."""
    return case.but(optimizer={**case.optimizer, **optimizer})


@dataclass(frozen=True)
class Group:
    """Cases that one call of the workers trains, one after the other.

    Attributes:
        ranks: number of ranks.
        cases: by their labels.
        same: labels of which weights and state are the same to the last bit.
        often: whether the usual run has the group; without it, only `-m ''`.
        again: `delayed`, `two_memories`: how `-m ''` runs it once more.
    """

    ranks: int
    cases: Mapping[str, Case]
    same: tuple[tuple[str, ...], ...] = ()
    often: bool = False
    again: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------
# settings and variants

TINY = {"muon_exchange_buffer_mb": 0.07}
"""A buffer for one matrix: many waves."""
SHARED = {"muon_share_replicated": True}
GATHERED = {"muon_exchange": "allgather"}
HEADS = {"muon_split_heads": True}
GATED = {"muon_split_gated_mlp": True}
WHOLE = {"muon_split_qkv": False}
OVER_TP = {"muon_tp_mode": "duplicated"}
ADAMUON = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "adamuon"}
NORMUON = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"}
CAUTIOUS = {"muon_cautious_weight_decay": True, "weight_decay": 1.0}
HYPERBALL = {"muon_hyperball": True, "weight_decay": 0.0}
STEPS_FOR = {"muon_ns_steps_for": ["linear_fc*=3", "linear_fc2=8", "layers.0.*qkv=4"]}
CLIP = {"qk_clip": True, "qk_clip_threshold": 1.0, "qk_clip_alpha": 0.3}

PLAIN = Case(layers=1)
EMPTY = Case(layers=1, ffn=47)
"""Some ranks hold no row of a matrix."""

SETTINGS = {
    "decay in gradient": but(PLAIN, decoupled_weight_decay=False),
    "no nesterov": but(PLAIN, muon_nesterov=False),
    "muon's own rate": but(PLAIN, muon_lr=0.04, muon_min_lr=0.02),
    "lion": but(PLAIN, muon_scalar_optimizer="lion"),
    "unit rms norm": but(PLAIN, muon_scale_mode="unit_rms_norm", muon_extra_scale_factor=1.0),
}

VARIANTS = {
    "cautious": but(EMPTY, **CAUTIOUS),
    "hyperball": but(EMPTY, **HYPERBALL),
    "steps by name": but(EMPTY, **STEPS_FOR).but(
        steps_for=(("linear_fc", 3), ("linear_fc2", 8), ("layers.0.self_attention.linear_qkv", 4))
    ),
    "adamuon": but(EMPTY, **ADAMUON),
    "normuon": but(EMPTY, **NORMUON),
}

_SETTINGS = {
    "adaptive_muon_beta2": 0.8,
    "adaptive_muon_eps": 1e-3,
    "muon_nesterov": False,
    "muon_scale_mode": "unit_rms_norm",
}
MORE_VARIANTS = {
    "normuon, wide and tall": but(Case(layers=1, ffn=7, query_groups=1), **NORMUON),
    "normuon, blocks": but(Case(layers=1, swiglu=True), **GATED, **HEADS, **NORMUON),
    "normuon, stacked experts": but(Case(layers=1, stacked=3), **NORMUON),
    "normuon, settings": but(PLAIN, **_SETTINGS, **NORMUON),
    "adamuon, settings": but(PLAIN, **_SETTINGS, **ADAMUON),
    "adamuon, stacked experts": but(Case(layers=1, stacked=3), **ADAMUON),
    "cautious normuon": but(EMPTY, **CAUTIOUS, **NORMUON),
    "hyperball, blocks": but(Case(layers=1, swiglu=True), **GATED, **HEADS, **HYPERBALL),
    "hyperball, stacked experts": but(Case(layers=1, stacked=3), **HYPERBALL),
}

# Models

_LATENT = Case(layers=1, latent=True, query_latent=True)
BLOCKS = {
    "empty shards": EMPTY,
    "one query group": Case(layers=1, query_groups=1),
    "swiglu, tied": Case(layers=1, swiglu=True, tied=True),
    "fused qkv": but(PLAIN, **WHOLE),
    "gated mlp": but(Case(layers=1, swiglu=True), **GATED),
    "heads": but(PLAIN, **HEADS),
    "gated attention": Case(layers=1, output_gate=True),
    "gated attention, heads": but(Case(layers=1, output_gate=True), **HEADS),
    "latent attention": Case(layers=1, latent=True),
    "latent attention, query latent, heads": but(_LATENT, **HEADS),
    "latent attention, whole": but(_LATENT, **WHOLE),
    "latent attention, fused latents": _LATENT.but(fused_down=True),
    "hybrid": Case(hybrid="MG*", output_gate=True),
    "hybrid, latent attention": Case(hybrid="M+", latent=True, query_latent=True),
    "hybrid, whole": but(Case(hybrid="MG"), **WHOLE),
    "experts": but(Case(layers=1, experts=3, swiglu=True), **GATED),
    "stacked experts": but(Case(layers=1, stacked=3, swiglu=True), **GATED),
    "stacked experts, whole": Case(layers=1, stacked=5, swiglu=True),
    "excluded": but(
        Case(layers=1, experts=3, excluded=("router", "linear_proj")),
        muon_exclude=["router", "layers.0.*linear_pro?."],
        muon_lr=0.03,
    ),
}
"""Each part of a fused parameter is a separate matrix, however its rows are
cut.
"""

_MATRICES = ("linear_qkv.weight", "linear_proj.weight", "fc1.weight", "fc2.weight")
FROZEN = {
    "all but a layer and the embedding": Case(frozen=("layers.0", "word_embeddings")),
    "one norm weight": Case(trainable=("final_layernorm.weight",)),
    "one matrix": Case(trainable=("layers.1.mlp.linear_fc2.weight",)),
    "matrices": Case(trainable=_MATRICES),
    "all but matrices": Case(frozen=_MATRICES),
}

CLIPPED = {
    "grouped queries": Case(attention=CLIP),
    "no groups, odd heads": Case(hidden=35, heads=5, query_groups=5, attention=CLIP),
    "gated attention": Case(output_gate=True, attention=CLIP),
    "biases of QKV alone": Case(attention=CLIP | {"add_bias_linear": False, "add_qkv_bias": True}),
    "latent attention": Case(latent=True, attention=CLIP),
    "latent attention, query latent": Case(latent=True, query_latent=True, attention=CLIP),
    "projections with Adam": but(
        Case(excluded=("linear_qkv",), attention=CLIP), muon_exclude=["linear_qkv"]
    ),
}

# Layouts

TP = Case(vocabulary=132, ffn=46, query_groups=2, layers=1, tensor=2)
HSDP = Case(layers=1, instances=2)
MOE = Case(ffn=46, layers=1, experts=4)
TP4 = TP.but(tensor=4, heads=4, hidden=32, ffn=44, query_groups=2)

LAYOUTS = {
    "tp2": (2, TP),  # nothing is cut for data parallelism
    "tp2 dp2": (4, TP),  # rows are cut twice, columns and rows once
    "tp4, fewer query groups": (4, TP4),  # a rank has queries of half a group
    "tp2, one query group": (4, TP.but(query_groups=1)),  # its key and value are on one rank
    "hsdp": (4, HSDP),  # two ranks hold the same rows
    "hsdp of single ranks": (3, HSDP.but(instances=3)),  # all ranks do
    "hsdp tp2": (4, TP.but(instances=2)),  # groups of three kinds
    "cp2": (4, Case(layers=1, context=2)),  # weights are cut over more ranks than batches
    "ep2": (4, MOE.but(expert_parallel=2)),  # experts are cut over fewer ranks than the rest
    "ep4": (4, MOE.but(expert_parallel=4)),  # not at all
    "expert tp2": (4, MOE.but(expert_tensor=2)),  # experts alone are cut by columns
    "ep2 hsdp": (4, MOE.but(expert_parallel=2, instances=2)),  # and replicated alone
}
LAYOUTS_OF_TABLE = LAYOUTS | {
    "tp2 dp2, latent": (4, TP.but(latent=True, query_latent=True)),
    # a cut by columns makes a wide matrix tall, or cuts none of its rows
    "tp2, wide and tall": (4, TP.but(ffn=8, hidden=36)),
    "tp2, no row of a wide matrix cut by columns": (4, TP.but(ffn=128, hidden=32, heads=4)),
}

BLOCKS_OVER_LAYOUTS = {
    "tp2 dp2": but(TP.but(swiglu=True), **GATED, **HEADS, **OVER_TP),
    "hsdp": but(HSDP.but(swiglu=True, stacked=3), **GATED, **HEADS),
    "ep2": but(
        MOE.but(swiglu=True, expert_parallel=2, excluded=("router",)),
        **GATED,
        muon_exclude=["router"],
    ),
    "hybrid tp2": but(TP.but(hybrid="MG*", output_gate=True), **OVER_TP),
    "hybrid, latent attention, tp2": but(
        TP.but(hybrid="M+", query_groups=3, latent=True, query_latent=True), **OVER_TP
    ),
    "expert tp2": but(
        MOE.but(swiglu=True, experts=2, expert_tensor=2),
        **GATED,
        **OVER_TP,
    ),
    "fewer query groups than tp4": but(TP4, **HEADS, **OVER_TP),
    "fused latents, tp2": but(
        TP.but(latent=True, query_latent=True, fused_down=True), **WHOLE, **OVER_TP
    ),
}
"""Gate and up of every tensor-parallel rank lie one after the other, and make two blocks in all."""

WAYS = (
    *(Case(strategy=strategy) for strategy in STRATEGIES),
    Case(optimizer=GATHERED),
    Case(strategy="no_shard", optimizer=SHARED),
)
"""Strategies, and how blocks reach who orthogonalizes them."""


def spread(cases: Mapping[str, Case], shift: int) -> dict[str, Case]:
    """Each case in one of the ways; with six shifts, in each."""
    found = {}
    for number, (label, case) in enumerate(cases.items()):
        way = WAYS[(number + shift) % len(WAYS)]
        if way == WAYS[0] and case.steps_for:  # megatron-core's own Muon has one number of steps
            way = WAYS[1]
        found[label] = but(case, **way.optimizer).but(strategy=way.strategy)
    return found


def of_all(cases: Mapping[str, Case], **optimizer: Any) -> dict[str, Case]:
    """Every case with settings of the optimizer."""
    return {label: but(case, **optimizer) for label, case in cases.items()}


def of_layout(name: str, number: int) -> Group:
    """A layout's cases: plain Muon under two strategies and by both exchanges, and every second
    variant.
    """
    ranks, case = LAYOUTS_OF_TABLE[name]
    other = SHARDED[number % 2]
    cases = {
        SHARDED[2]: case,
        other: case.but(strategy=other),
        "allgather": but(case, **GATHERED),
    }
    if case.instances > 1:
        cases[OUTER] = case.but(outer="optim")
    variants = [*VARIANTS.items(), ("clip", Case(attention=CLIP))]
    for label, variant in variants[number % 2 :: 2]:
        if case.latent and variant.steps_for:  # it has no fused QKV, which a pattern names
            continue
        strategy = SHARDED[len(cases) % 3]
        is_shared = case.instances > 1 and strategy == SHARDED[2]
        cases[label] = but(case, **variant.optimizer).but(
            strategy=strategy,
            outer="optim" if is_shared else "no_shard",
            steps_for=variant.steps_for,
            attention=variant.attention,
        )
    is_often = name == "hsdp tp2"
    again = ("delayed", "two_memories") if is_often or name == "expert tp2" else ()
    return Group(ranks, cases, ((SHARDED[2], "allgather"),), is_often, again)


def _strategies() -> dict[str, Case]:
    return {strategy: Case(strategy=strategy) for strategy in STRATEGIES} | {
        f"{strategy}, allgather": Case(strategy=strategy, optimizer=GATHERED)
        for strategy in SHARDED
    }


def _travel() -> Group:
    """How rows travel, in waves as small as they can be or to every rank, and where momentum lives
    changes no bit of an iteration or a variant.
    """
    ways = {"owner": {}, "waves": TINY, "allgather": GATHERED}
    cases = {"host": but(VARIANTS["hyperball"], muon_offload="cpu")}
    same = [("hyperball, owner", "host")]
    travelers = {
        "standard": but(EMPTY, muon_ns="standard"),
        "gram": but(EMPTY, muon_ns="gram"),
        **{label: VARIANTS[label] for label in ("cautious", "hyperball", "normuon")},
    }
    for label, case in travelers.items():
        names = []
        for way, settings in ways.items():
            names.append(f"{label}, {way}")
            cases[names[-1]] = but(case, **settings)
        same.append(tuple(names))
    return Group(3, cases, tuple(same), again=("delayed",))


def _teams(ranks: int, size: str, *labels: str) -> Group:
    """All matrices cut, each over `size` ranks; twice the same bits. NorMuon has no teams."""
    cases = {"plain": EMPTY, "again": EMPTY, **{label: BLOCKS[label] for label in labels}}
    if ranks == 4:
        cases |= {label: VARIANTS[label] for label in ("cautious", "hyperball", "steps by name")}
        cases["tp2"] = BLOCKS_OVER_LAYOUTS["tp2 dp2"]
    again = ("delayed",) if ranks == 3 else ()
    return Group(
        ranks,
        of_all(cases, muon_team_size=size),
        (("plain", "again"),),
        again=again,
    )


REPLICATED = Case(layers=1, strategy="no_shard", optimizer=SHARED)
_SHARED = {
    "plenty": REPLICATED,
    "tiny": but(REPLICATED, **TINY),
    # Not every rank has a row of a matrix of two, in the plan's eyes.
    "narrow": REPLICATED.but(ffn=2),
}

TABLE: dict[str, Group] = {
    "strategies on 1": Group(1, _strategies()),
    "strategies on 3": Group(
        3,
        _strategies(),
        same=tuple((s, f"{s}, allgather") for s in SHARDED),
        again=("delayed",),
    ),
    **{
        f"settings on {n}": Group(
            n,
            spread(SETTINGS, n),
            often=n == 2,
        )
        for n in (2, 3)
    },
    **{
        f"blocks on {n}": Group(
            n,
            spread(BLOCKS, n),
            often=n == 2,
        )
        for n in (2, 3, 4)
    },
    **{
        f"variants on {n}": Group(
            n,
            spread(VARIANTS | MORE_VARIANTS, n + 3),
            often=n == 3,
        )
        for n in (2, 3)
    },
    "clip on 2": Group(2, spread(CLIPPED, 2), again=("two_memories",)),
    "clip on 3": Group(3, spread(CLIPPED, 3)),
    "how rows travel": _travel(),
    **{
        f"shared on {n}": Group(
            n,
            _SHARED,
            (("plenty", "tiny"),),
            n == 3,
            ("delayed",),
        )
        for n in (2, 3)
    },
    "blocks over layouts": Group(4, BLOCKS_OVER_LAYOUTS),
    "blocks over two ranks": Group(
        2, {label: case for label, case in BLOCKS_OVER_LAYOUTS.items() if case.hybrid}, often=True
    ),
    "teams of 2 on 3": _teams(3, "2", "heads"),
    "teams of 2 on 4": _teams(4, "2", "gated mlp", "heads", "latent attention", "hybrid"),
    "teams of 4 on 4": _teams(4, "4", "experts", "stacked experts", "stacked experts, whole"),
    **{
        f"frozen on {n}": Group(
            n,
            spread(FROZEN, n),
            often=n == 2,
        )
        for n in (2, 3)
    },
    # Adam has the weights; Megatron-FSDP does not note where a part begins
    "clip, replicated parts": Group(
        4,
        {
            label: but(
                LAYOUTS_OF_TABLE[label][1].but(
                    strategy="no_shard", attention=CLIP, excluded=("weight",)
                ),
                muon_exclude=["weight"],
                muon_tp_mode="blockwise",
            )
            for label in ("tp2 dp2", "tp2 dp2, latent")
        },
    ),
    **{name: of_layout(name, number) for number, name in enumerate(LAYOUTS_OF_TABLE)},
}
