"""A plan's figures in the form of its JSON file, and the page that shows them: memory, time and Muon's step first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from megatron_muon.core.plan import Plan, all_gather_bytes
from megatron_muon.tools.plan.estimate import GroupPlan, Hardware, KindPlan, Settings

EVEN = 1.05
"""Loads whose maximum is within this factor of the mean count as even."""

Figures = dict[str, Any]


def figures_of(kinds: Sequence[KindPlan], world_size: int, settings: Settings, hardware: Hardware) -> Figures:
    """The figures of a rank, which is in one group of each kind, and of each group, as the JSON file has them.

    Where groups of a kind have several plans, the slowest is shown; the digest is rank 0's.
    """
    steps = Counter(matrix.steps for kind in kinds for matrix in kind.group.layout.matrices if matrix.steps)
    return {
        "digest": "-".join(kind.of(0).digest for kind in kinds),
        "world_size": world_size,
        **_figures([kind.worst for kind in kinds], lambda figure: sum(kind.of_ranks(figure) for kind in kinds)),
        "hardware": hardware.name,
        "node_ranks": hardware.node_ranks,
        "settings": {
            "buffer_mb": settings.buffer_mb,
            "exchange_dtype": settings.exchange_dtype,
            "team_size": settings.team_size,
            "ns": settings.iteration.method,
            "ns_dtype": "bf16" if settings.iteration.half else "fp32",
            "ns_steps": settings.iteration.steps,
        },
        "matrices_of_steps": {str(number): count for number, count in sorted(steps.items())},
        "groups": [_of_group(kind) for kind in kinds],
    }


def _of_group(kind: KindPlan) -> Figures:
    worst = kind.worst
    return {
        "name": kind.group.name,
        "ranks": kind.group.layout.world_size,
        "plans": len(kind.plans),
        **_figures([worst], lambda figure: np.array(figure(worst))),
    }


def _figures(items: Sequence[GroupPlan], total: Callable[[Callable[[GroupPlan], Sequence[float]]], Any]) -> Figures:
    """Figures of ranks that step groups one by one: times add up, buffers do not.

    `total` adds up, for each rank, a figure that each group's plan has for its ranks.
    """

    def of_plans(figure: Callable[[Plan], Sequence[float]]) -> Any:
        return total(lambda item: figure(item.plan))

    matrices = [matrix for item in items for matrix in item.plan.layout.matrices]
    teams = Counter(len(team.ranks) for item in items for team in item.plan.teams)
    loads, largest = of_plans(lambda plan: plan.loads), max(item.largest for item in items)
    mean = float(loads.mean()) or 1.0
    return {
        "matrices": len(matrices),
        "parameters": sum(matrix.numel for matrix in matrices),
        "ns_load": {
            "max_over_mean": float(loads.max()) / mean if loads.any() else 1.0,
            "least_possible": max(largest / mean, 1.0),  # with these teams, for the sake of the costliest matrix
        },
        "matrices_of_teams": {str(size): count for size, count in sorted(teams.items()) if size > 1},
        "exchange_bytes": {
            "max_per_rank": int(of_plans(lambda plan: plan.exchanged_bytes()).max()),
            "allgather_per_rank": int(
                of_plans(lambda plan: all_gather_bytes(plan.layout, plan.memory.element_bytes)).max()
            ),
        },
        "peers": max(item.plan.peers() for item in items),
        "extra_bytes_max": max(int(item.extra.max(initial=0)) for item in items),
        "waves": sum(len(item.plan.waves) for item in items),
        "buffer_bytes": max(item.plan.buffer_bytes for item in items),
        "estimated_ms": {
            name: sum(getattr(item, f"{name}_ms") for item in items) for name in ("step", "ns", "exchange", "host")
        },
    }


def show(figures: Figures, source: str, hardware: Hardware, *, details: bool) -> None:
    """Print memory, time and Muon's own step; with `details` each group's, every part and what is assumed."""
    step, memory = figures.get("training_step"), figures.get("memory")
    rows: list[tuple[str, ...]]
    print_line(f"Plan of {source} at {figures['world_size']:,} ranks, {hardware.name}", "bold")
    if memory is not None:
        rows = [(label, *(size(memory[of][part]) for of in ("adam", "muon"))) for part, label in _MEMORY.items()]
        has = "fits" if memory["fits"] else "DOES NOT FIT"
        print_table(("memory of a GPU", "with Adam", "with Muon"), rows)
        print_line(f"with Muon it {has}: a GPU has {size(memory['capacity'])}\n", "green" if memory["fits"] else "red")
        if not memory["muon"]["activations"]:
            print_line("warning: activations are not in it: Megatron has no formula for hybrid models", "yellow")
    if step is not None:
        parts = _PARTS if details else {"total": _PARTS["total"]}
        rows = [(label, *(_part(step[of], part) for of in ("adam_ms", "muon_ms"))) for part, label in parts.items()]
        waits = (f"{step[of]['exposed_communication'] / step[of]['total']:.0%}" for of in ("adam_ms", "muon_ms"))
        rows += [("share waiting for communication", *waits), ("Muon / Adam", "1", f"{step['muon_over_adam']:.4f}")]
        print_table((f"a step of {step['tokens']:,} tokens", "with Adam", "with Muon"), rows)
        if details:
            assumed = {name: value for name, value in step["assumptions"].items() if value is not None}
            print_table(("assumed", ""), [(name, f"{value:,.7g}") for name, value in assumed.items()])
        for note in step["notes"]:
            print_line(f"warning: {note}", "yellow")
        print_line("")
    columns = {f"{group['name']}, {group['ranks']:,} ranks": group for group in figures["groups"] if details}
    if len(columns) != 1:
        columns["a rank in all" if details else "a rank"] = figures
    rows = [(label, *map(shown, columns.values())) for label, shown in _ROWS.items()]
    print_table(("Muon's step", *columns), rows if details else rows[:_SHORT])
    settings = figures["settings"]
    others = "".join(f", {count:,} matrices {steps}" for steps, count in figures["matrices_of_steps"].items())
    print_line(
        f"Newton-Schulz {settings['ns']}, {settings['ns_dtype']}, {settings['ns_steps']} steps{others}; exchange in "
        f"{settings['exchange_dtype']}; nodes of {hardware.node_ranks} ranks; digest {figures['digest']}"
    )
    more = _notes(figures, hardware) if details else ["--details shows groups, parts and assumptions"]
    for line in (*figures["unmet"], *more):
        print_line(line)


def _part(of: dict[str, float], part: str) -> str:
    return f"{of[part]:,.2f} ms" if part in of else "-"


def _notes(figures: Figures, hardware: Hardware) -> Iterator[str]:
    """What the figures do not say by themselves."""
    yield f"{hardware.name}: {hardware.source}; --node-ranks as the run's LOCAL_WORLD_SIZE"
    for group in figures["groups"]:
        if group["ns_load"]["max_over_mean"] > EVEN:
            few, least = group["matrices"] / group["ranks"], group["ns_load"]["least_possible"]
            yield (
                f"{group['name']}, uneven: {few:.1f} matrices a rank; the largest, or a team's part of it, "
                f"is {least:.2f} times a rank's even share"
            )
        if group["plans"] > 1:
            yield f"{group['name']}: {group['plans']} plans by place in nodes; the slowest is shown"
    if "memory" in figures:
        yield (
            "not counted: launches but Muon's, latency of FSDP's collectives, data and logs; layers that FSDP has "
            "gathered, NCCL's buffers (NCCL_MAX_P2P_NCHANNELS bounds them) and fragmentation. --mfu has experts' "
            "all-to-alls; activations are by Megatron's formula, with full recomputation one layer's and all inputs"
        )


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column has labels, the others figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def print_line(text: str, style: str = "dim") -> None:
    """Print a line, which is not folded."""
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text, style=style), soft_wrap=True)


def size(count: float) -> str:
    """Bytes for people."""
    power = min((max(int(count), 1).bit_length() - 1) // 10, 3)
    return f"{count / 1024**power:,.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def duration(ms: float) -> str:
    """Milliseconds for people."""
    return f"{ms / 1e3:,.2f} s" if ms >= 1e4 else f"{ms:,.1f} ms"


_MEMORY = {
    "weights": "weights and fp32 main weights",
    "gradients": "gradients",
    "state": "optimizer state",
    "activations": "activations",
    "step": "Muon's step",
    "total": "in all",
}
_PARTS = {
    "forward_backward": "forward and backward",
    "exposed_communication": "FSDP's communication beyond them",
    "norm_clip_install": "norm, clipping, weights installed",
    "adam": "Adam, elementwise",
    "muon_elementwise": "Muon, elementwise",
    "muon_step": "Muon, Newton-Schulz and exchange",
    "total": "training step",
}
_SHORT = 7
"""Rows that the page has without `--details`."""
_ROWS: dict[str, Callable[[Figures], str]] = {
    "step, overlapped": lambda c: duration(c["estimated_ms"]["step"]),
    "Newton-Schulz": lambda c: duration(c["estimated_ms"]["ns"]),
    "exchange": lambda c: duration(c["estimated_ms"]["exchange"]),
    "host, enqueuing": lambda c: duration(c["estimated_ms"]["host"]),
    "extra memory, at most": lambda c: size(c["extra_bytes_max"]),
    "most received by a rank": lambda c: size(c["exchange_bytes"]["max_per_rank"]),
    "owners' load, max / mean": lambda c: f"{c['ns_load']['max_over_mean']:.3f}",
    "a step may take": lambda c: size(c["buffer_bytes"]),
    "received by all-gather": lambda c: size(c["exchange_bytes"]["allgather_per_rank"]),
    "matrices": lambda c: f"{c['matrices']:,}",
    "parameters in them": lambda c: f"{c['parameters'] / 1e6:,.1f} M",
    "matrices that teams own": lambda c: (
        ", ".join(f"{count:,} of {members} ranks" for members, count in c["matrices_of_teams"].items()) or "none"
    ),
    "peers in an all-to-all, at most": lambda c: f"{c['peers']:,}",
    "waves": lambda c: f"{c['waves']:,}",
}
"""The rows of Muon's step, from the figures of a group or of a rank in all."""
