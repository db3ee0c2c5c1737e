"""The table of parity: which cases are trained, on how many ranks, and what runs again in other
circumstances.

Dimensions that are independent meet in pairs and not in a full product: `spread` has every case
under every strategy and on every number of ranks, each pair once, and every layout has every
variant under one of its strategies.
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
        steps: of each; weights and state are compared after the first and the last.
        same: labels of which weights and state are the same to the last bit.
        often: whether the usual run has the group; without it, only `-m ''`.
        again: `delayed`, `two_memories`: how `-m ''` runs it once more.
    """

    ranks: int
    cases: Mapping[str, Case]
    steps: int = 3
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
OVER_TP = {"muon_tp_mode": "duplicated"}
ADAMUON = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "adamuon"}
NORMUON = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"}
CAUTIOUS = {"muon_cautious_weight_decay": True, "weight_decay": 1.0}
HYPERBALL = {"muon_hyperball": True, "weight_decay": 0.0}
STEPS_FOR = {"muon_ns_steps_for": ["linear_fc*=3", "linear_fc2=8", "layers.0.*qkv=4"]}
CLIP = {"qk_clip": True, "qk_clip_threshold": 1.0, "qk_clip_alpha": 0.3}

SETTINGS = {
    label: Case(layers=1, optimizer=settings)
    for label, settings in {
        "decay in gradient": {"decoupled_weight_decay": False},
        "no nesterov": {"muon_nesterov": False},
        "no nesterov, decay in gradient": {"muon_nesterov": False, "decoupled_weight_decay": False},
        "muon's own rate": {"muon_lr": 0.04, "muon_min_lr": 0.02},
        "fused qkv": {"muon_split_qkv": False},
        "lion": {"muon_scalar_optimizer": "lion"},
        "unit rms norm": {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 1.0},
    }.items()
}

BY_NAME = Case(
    layers=1,
    ffn=47,
    optimizer=STEPS_FOR,
    steps_for=(("linear_fc", 3), ("linear_fc2", 8), ("layers.0.self_attention.linear_qkv", 4)),
)
"""Newton-Schulz steps of their own for some matrices."""

VARIANTS: dict[str, Case] = {
    label: BY_NAME if settings == STEPS_FOR else Case(layers=1, ffn=47, optimizer=settings)
    for label, settings in {
        "cautious": CAUTIOUS,
        "hyperball": HYPERBALL,
        "steps by name": STEPS_FOR,
        "adamuon": ADAMUON,
        "normuon": NORMUON,
    }.items()
}

ADAPTIVE_MODELS = {
    "wide and tall": Case(layers=1, ffn=7, query_groups=1),
    "small buffer": Case(layers=1, optimizer=TINY),
    "blocks": Case(layers=1, swiglu=True, optimizer={**GATED, **HEADS}),
    "stacked experts": Case(layers=1, stacked=3, trainable=(".experts.",)),
    "settings": Case(
        layers=1,
        optimizer={
            "adaptive_muon_beta2": 0.8,
            "adaptive_muon_eps": 1e-3,
            "muon_nesterov": False,
            "muon_scale_mode": "unit_rms_norm",
            "muon_lr": 0.02,
        },
    ),
}
ADAPTIVE = {
    f"{method}, {label}": but(case, **settings)
    for method, settings in (("adamuon", ADAMUON), ("normuon", NORMUON))
    for label, case in ADAPTIVE_MODELS.items()
} | {
    f"cautious {method}": VARIANTS["cautious"].but(optimizer={**CAUTIOUS, **settings})
    for method, settings in (("adamuon", ADAMUON), ("normuon", NORMUON))
}

# Models

BLOCKS = {
    "empty shards": Case(layers=1, ffn=47),
    "one query group": Case(layers=1, query_groups=1),
    "swiglu, tied": Case(layers=1, swiglu=True, tied=True),
    "gated mlp": Case(layers=1, swiglu=True, optimizer=GATED),
    "heads": Case(layers=1, optimizer=HEADS),
    "heads, one query group": Case(layers=1, query_groups=1, optimizer=HEADS),
    "gated attention": Case(layers=1, output_gate=True),
    "gated attention, heads": Case(layers=1, output_gate=True, optimizer=HEADS),
    "latent attention": Case(layers=1, latent=True),
    "latent attention, query latent, heads": Case(
        layers=1, latent=True, query_latent=True, optimizer=HEADS
    ),
    "latent attention, whole": Case(
        layers=1, latent=True, query_latent=True, optimizer={"muon_split_qkv": False}
    ),
    "latent attention, fused latents": Case(
        layers=1, latent=True, query_latent=True, fused_down=True
    ),
    "hybrid": Case(hybrid="MG*", output_gate=True),
    "hybrid, latent attention": Case(hybrid="M+", latent=True, query_latent=True),
    "hybrid, whole": Case(hybrid="MG", optimizer={"muon_split_qkv": False}),
    "experts": Case(layers=1, experts=3, swiglu=True, optimizer=GATED),
    "stacked experts": Case(layers=1, stacked=3, swiglu=True, optimizer=GATED),
    "stacked experts, whole": Case(layers=1, stacked=5, swiglu=True),
    "routers excluded": Case(
        layers=1, experts=3, optimizer={"muon_exclude": ["router"]}, excluded=("router",)
    ),
    "more excluded": Case(
        layers=1,
        optimizer={"muon_exclude": ["layers.0.*fc1", "linear_pro?."], "muon_lr": 0.03},
        excluded=("layers.0.mlp.linear_fc1", "linear_proj"),
    ),
}
"""Whatever is fused into a parameter, each part of it is a matrix of its own, however its rows are
cut.
"""

FROZEN = {
    "all but a layer and the embedding": Case(frozen=("layers.0", "word_embeddings")),
    "one norm weight": Case(trainable=("final_layernorm.weight",)),
    "one matrix": Case(trainable=("layers.1.mlp.linear_fc2.weight",)),
    "matrices": Case(
        trainable=("linear_qkv.weight", "linear_proj.weight", "fc1.weight", "fc2.weight")
    ),
    "all but matrices": Case(
        frozen=("linear_qkv.weight", "linear_proj.weight", "fc1.weight", "fc2.weight")
    ),
}

CLIPPED = {
    "grouped queries": Case(attention=CLIP),
    "one group": Case(query_groups=1, attention=CLIP),
    "no groups, odd heads": Case(hidden=35, heads=5, query_groups=5, attention=CLIP),
    "gated attention": Case(output_gate=True, attention=CLIP),
    "biases of QKV alone": Case(attention=CLIP | {"add_bias_linear": False, "add_qkv_bias": True}),
    "latent attention": Case(latent=True, attention=CLIP),
    "latent attention, query latent": Case(latent=True, query_latent=True, attention=CLIP),
    "projections with Adam": Case(
        optimizer={"muon_exclude": ["linear_qkv"]}, excluded=("linear_qkv",), attention=CLIP
    ),
}

# Layouts

TP = Case(vocabulary=132, ffn=46, query_groups=2, layers=1, tensor=2)
HSDP = Case(layers=1, instances=2)
MOE = Case(ffn=46, layers=1, experts=4)

LAYOUTS = {
    "tp2": (2, TP),
    "tp2 dp2": (4, TP),
    "tp4, fewer query groups": (
        4,
        TP.but(tensor=4, heads=4, hidden=32, ffn=44, query_groups=2),
    ),
    "tp2, one query group": (4, TP.but(query_groups=1)),
    "tp2, swiglu": (4, TP.but(swiglu=True)),
    "hsdp": (4, HSDP),
    "hsdp of single ranks": (3, HSDP.but(instances=3)),
    "hsdp tp2": (4, TP.but(instances=2)),
    "cp2": (4, Case(layers=1, context=2)),
    "ep2": (4, MOE.but(expert_parallel=2)),
    "ep4": (4, MOE.but(expert_parallel=4)),
    "more ranks than experts": (4, MOE.but(experts=2)),
    "expert tp2": (4, MOE.but(expert_tensor=2)),
    "ep2 hsdp": (4, MOE.but(expert_parallel=2, instances=2)),
}
LAYOUTS_OF_TABLE = LAYOUTS | {
    "tp2 dp2, latent": (4, TP.but(latent=True, query_latent=True)),
    "tp2, wide and tall": (4, TP.but(ffn=8, hidden=36)),
    "tp2, no row of a wide matrix cut by columns": (4, TP.but(ffn=128, hidden=32, heads=4)),
}

BLOCKS_OVER_LAYOUTS = {
    "tp2 dp2": TP.but(swiglu=True, optimizer={**GATED, **HEADS, **OVER_TP}),
    "hsdp": HSDP.but(swiglu=True, stacked=3, optimizer={**GATED, **HEADS}),
    "ep2": MOE.but(
        swiglu=True,
        expert_parallel=2,
        optimizer={**GATED, "muon_exclude": ["router"]},
        excluded=("router",),
    ),
    "hybrid tp2": TP.but(hybrid="MG*", output_gate=True, optimizer=OVER_TP),
    "hybrid, latent attention, tp2": TP.but(
        hybrid="M+", query_groups=3, latent=True, query_latent=True, optimizer=OVER_TP
    ),
    "expert tp2": MOE.but(swiglu=True, experts=2, expert_tensor=2, optimizer={**GATED, **OVER_TP}),
    "fewer query groups than tp4": TP.but(
        tensor=4, heads=4, hidden=32, ffn=44, query_groups=2, optimizer={**HEADS, **OVER_TP}
    ),
    "fused latents, tp2": TP.but(
        latent=True,
        query_latent=True,
        fused_down=True,
        optimizer={"muon_split_qkv": False, **OVER_TP},
    ),
}
"""Gate and up of every tensor-parallel rank lie one after the other, and make two blocks in all."""


def spread(cases: Mapping[str, Case], shift: int) -> dict[str, Case]:
    """Each case under one strategy; with four shifts, under each that has its settings."""
    found = {}
    for number, (label, case) in enumerate(cases.items()):
        strategy = STRATEGIES[(number + shift) % len(STRATEGIES)]
        # megatron-core's own Muon has one number of steps
        is_own = strategy == "no_shard" and case.steps_for
        found[label] = case.but(strategy="optim" if is_own else strategy)
    return found


def of_all(cases: Mapping[str, Case], **optimizer: Any) -> dict[str, Case]:
    """Every case with settings of the optimizer."""
    return {label: but(case, **optimizer) for label, case in cases.items()}


def of_layout(name: str, number: int) -> Group:
    """A layout's cases: plain Muon under every strategy and by both exchanges, every variant under
    one strategy.
    """
    ranks, case = LAYOUTS_OF_TABLE[name]
    cases = {strategy: case.but(strategy=strategy) for strategy in SHARDED}
    cases["allgather"] = but(case, **GATHERED)
    strategies = SHARDED if case.instances == 1 else (*SHARDED, OUTER)
    if case.instances > 1:
        cases[OUTER] = case.but(outer="optim")
    variants = {label: but(case, **variant.optimizer) for label, variant in VARIANTS.items()}
    if case.latent:  # it has no fused QKV, which one of the patterns names
        del variants["steps by name"]
    else:
        variants["steps by name"] = variants["steps by name"].but(steps_for=BY_NAME.steps_for)
    variants["clip"] = case.but(attention=CLIP)
    for place, (label, variant) in enumerate(variants.items(), number):
        strategy = strategies[place % len(strategies)]
        cases[label] = (
            variant.but(outer="optim") if strategy == OUTER else variant.but(strategy=strategy)
        )
    return Group(
        ranks,
        cases,
        steps=5,
        same=(("optim_grads_params", "allgather"),),
        often=name == "hsdp tp2",
        again=(
            ("delayed", "two_memories")
            if name in ("tp2 dp2", "hsdp tp2", "ep2 hsdp", "expert tp2")
            else ()
        ),
    )


def _strategies() -> dict[str, Case]:
    return {strategy: Case(strategy=strategy) for strategy in STRATEGIES} | {
        f"{strategy}, allgather": Case(strategy=strategy, optimizer=GATHERED)
        for strategy in SHARDED
    }


def _waves() -> Group:
    """Waves as small as they can be; either iteration for all blocks, alike whatever carries
    them.
    """
    case = Case(layers=1, ffn=47)
    iterations = {"auto": {}, "standard": {"muon_ns": "standard"}, "gram": {"muon_ns": "gram"}}
    cases = {f"owner, {label}": but(case, **settings) for label, settings in iterations.items()}
    cases |= {
        f"gathered, {label}": but(case, **settings, **GATHERED)
        for label, settings in iterations.items()
    }
    cases["tiny"] = but(case, **TINY)
    same = tuple((f"owner, {label}", f"gathered, {label}") for label in iterations)
    return Group(4, cases, same=(*same, ("tiny", "gathered, auto")), again=("delayed",))


def _teams(ranks: int, size: str) -> Group:
    """All matrices cut, each over `size` ranks; twice the same bits. NorMuon has no teams."""
    cases = {
        "plain": Case(layers=1, ffn=47),
        "again": Case(layers=1, ffn=47),
        **BLOCKS,
    }
    if ranks == 4 and size == "2":  # "ep2": groups of experts have one rank on some layouts
        cases |= {
            f"{name} layout": case for name, case in BLOCKS_OVER_LAYOUTS.items() if name != "ep2"
        }
    cases |= {
        name: VARIANTS[name].but(swiglu=True) for name in ("cautious", "hyperball", "steps by name")
    }
    if ranks < 4:
        cases = {
            label: cases[label]
            for label in ("plain", "again", "gated mlp", "heads", "stacked experts, whole")
        }
    return Group(
        ranks,
        of_all(cases, muon_team_size=size),
        steps=5,
        same=(("plain", "again"),),
        again=("delayed",) if size == "2" else (),
    )


def _variants_travel(ranks: int) -> Group:
    """How rows travel and where momentum lives changes no bit of a variant."""
    ways = {
        "owner": {},
        "waves": TINY,
        "allgather": GATHERED,
        "momentum on the host": {"muon_offload": "cpu"},
    }
    cases = {
        f"{label}, {way}": but(case, **settings)
        for label, case in VARIANTS.items()
        for way, settings in ways.items()
        if "muon_offload" not in settings or label in ("cautious", "hyperball")
    }
    same = tuple(
        tuple(label for label in cases if label.startswith(f"{variant}, ")) for variant in VARIANTS
    )
    shared = {
        f"shared {label}": but(case.but(strategy="no_shard"), **SHARED)
        for label, case in VARIANTS.items()
    }
    cases |= shared | {f"{label}, tiny": but(case, **TINY) for label, case in shared.items()}
    return Group(ranks, cases, steps=5, same=same, again=("delayed",) if ranks == 3 else ())


REPLICATED = Case(layers=1, strategy="no_shard", optimizer=SHARED)

TABLE: dict[str, Group] = {
    **{
        f"strategies on {n}": Group(
            n,
            _strategies(),
            steps=5,
            often=n == 3,
            again=("delayed",) if n > 2 else (),
            same=tuple((s, f"{s}, allgather") for s in SHARDED),
        )
        for n in (1, 2, 3, 4)
    },
    **{
        f"settings on {n}": Group(
            n,
            spread(SETTINGS, n),
            often=n == 2,
        )
        for n in (1, 2, 3, 4)
    },
    **{
        f"blocks on {n}": Group(
            n,
            spread(BLOCKS, n),
            often=n == 3,
        )
        for n in (1, 2, 3, 4)
    },
    **{
        f"variants on {n}": Group(n, spread(VARIANTS | ADAPTIVE, n), steps=5, often=n == 3)
        for n in (1, 2, 3, 4)
    },
    **{
        f"clip on {n}": Group(
            n, spread(CLIPPED, n), steps=5, again=("two_memories",) if n == 2 else ()
        )
        for n in (1, 2, 3, 4)
    },
    "waves and iterations": _waves(),
    **{
        f"shared on {n}": Group(
            n,
            {
                "plenty": REPLICATED,
                "tiny": but(REPLICATED, **TINY),
                # Not every rank has a row of a matrix of two, in the plan's
                # eyes.
                "narrow": REPLICATED.but(ffn=2),
            },
            same=(("plenty", "tiny"),),
            often=n == 3,
            again=("delayed",),
        )
        for n in (1, 2, 3, 4)
    },
    "settings and blocks, shared": Group(
        2,
        of_all(
            {label: case.but(strategy="no_shard") for label, case in (SETTINGS | BLOCKS).items()},
            **SHARED,
        ),
    ),
    "blocks, gathered": Group(2, of_all(BLOCKS, **GATHERED)),
    "blocks over layouts": Group(4, BLOCKS_OVER_LAYOUTS),
    "blocks over two ranks": Group(
        2, {label: case for label, case in BLOCKS_OVER_LAYOUTS.items() if case.hybrid}, often=True
    ),
    "blocks, hyperball": Group(3, of_all(BLOCKS, **HYPERBALL), steps=5),
    **{
        f"teams of {size} on {n}": _teams(n, size)
        for n, size in ((2, "2"), (3, "2"), (4, "2"), (4, "4"))
    },
    "variants travel on 3": _variants_travel(3),
    **{
        f"frozen on {n}": Group(
            n,
            spread(FROZEN, n),
            often=n == 2,
        )
        for n in (2, 3, 4)
    },
    # Adam has the weights; Megatron-FSDP does not note where a part begins
    "clip, replicated parts": Group(
        4,
        {
            label: (
                LAYOUTS_OF_TABLE[label][1].but(
                    strategy="no_shard",
                    attention=CLIP,
                    excluded=("weight",),
                    optimizer={"muon_exclude": ["weight"], "muon_tp_mode": "blockwise"},
                )
            )
            for label in ("tp2 dp2", "tp2, swiglu", "tp2 dp2, latent")
        },
    ),
    **{name: of_layout(name, number) for number, name in enumerate(LAYOUTS_OF_TABLE)},
}
