"""A plan's figures in the form of its JSON file, and the page that shows them: memory, time and Muon's step first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron_muon.core.plan import all_gather_bytes
from megatron_muon.tools.plan.estimate import GroupPlan, Hardware, KindPlan, Settings

Figures = dict[str, Any]

_SUMS = ("matrices", "parameters", "waves", "allgather_bytes", "ns_ms", "exchange_ms", "step_ms")
"""Figures that add up over a rank's groups, which step one by one; of the others the largest counts."""


def figures_of(kinds: Sequence[KindPlan], world_size: int, settings: Settings, hardware: Hardware) -> Figures:
    """The figures of rank 0's groups, and of all of them together."""
    plans = [kind.of(0) for kind in kinds]
    groups = [_of_group(item) for item in plans]
    loads = [item.plan.loads for item in plans]
    mean = sum(sum(each) / len(each) for each in loads)
    return {
        "digest": "-".join(item.digest for item in plans),
        "world_size": world_size,
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
        **{name: sum(group[name] for group in groups) for name in _SUMS},
        **{name: max(group[name] for group in groups) for name in ("extra_bytes", "buffer_bytes", "peers")},
        "exchange_bytes": _received(kinds, world_size),
        "max_over_mean": sum(map(max, loads)) / mean if mean else 1.0,
        "groups": groups,
    }


def _received(kinds: Sequence[KindPlan], world_size: int) -> int:
    """The most bytes that a rank receives in a step of all of its groups."""
    received = [0] * world_size
    for kind in kinds:
        left = set(range(world_size))
        while left:
            members = kind.members(min(left))
            left -= set(members)
            for rank, count in zip(members, kind.of(members[0]).received, strict=True):
                received[rank] += count
    return max(received, default=0)


def _of_group(item: GroupPlan) -> Figures:
    plan, layout = item.plan, item.plan.layout
    return {
        "name": item.group.name,
        "ranks": layout.world_size,
        **plan.figures(),
        "parameters": sum(matrix.numel for matrix in layout.matrices),
        "allgather_bytes": max(all_gather_bytes(layout, plan.memory.element_bytes)),
        "extra_bytes": int(item.extra.max(initial=0)),
        "ns_ms": item.ns_ms,
        "exchange_ms": item.exchange_ms,
        "step_ms": item.step_ms,
    }


def show(figures: Figures, source: str, *, details: bool) -> None:
    """Print memory, time and Muon's own step; with `details` every figure."""
    memory, step, settings = figures.get("memory"), figures.get("training_step"), figures["settings"]
    print_line(f"Plan of {source} at {figures['world_size']:,} ranks, {figures['hardware']}", "bold")
    if memory is not None:
        rows = [(label, *(size(memory[of][part]) for of in ("adam", "muon"))) for part, label in _MEMORY.items()]
        print_table(("memory of a GPU", "with Adam", "with Muon"), rows)
        has = "fits" if memory["fits"] else "DOES NOT FIT"
        print_line(f"with Muon it {has}: a GPU has {size(memory['capacity'])}\n", "green" if memory["fits"] else "red")
    if step is not None:
        both = [step["adam_ms"], step["muon_ms"]]
        rows = [
            ("training step", *(duration(each["total"]) for each in both)),
            ("share waiting for communication", *(f"{each['communication'] / each['total']:.0%}" for each in both)),
            ("Muon / Adam", "1", f"{step['muon_over_adam']:.4f}"),
        ]
        print_table((f"a step of {step['tokens']:,} tokens", "with Adam", "with Muon"), rows)
        print_line("")
    print_table(("Muon's step", "a rank"), [(label, shown(figures)) for label, shown in _ROWS.items()])
    print_line(
        f"Newton-Schulz {settings['ns']}, {settings['ns_dtype']}, {settings['ns_steps']} steps; exchange in "
        f"{settings['exchange_dtype']}; nodes of {figures['node_ranks']} ranks; digest {figures['digest']}"
    )
    for note in figures["notes"]:
        print_line(f"warning: {note}", "yellow")
    if details:
        print_table(("all figures", ""), _flat(figures))


def _flat(figures: Figures, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every figure by its path."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif name == "groups":
            for group in value:
                yield from _flat(group, f"{group['name']}.")
        elif isinstance(value, (int, float)):
            yield prefix + name, f"{value:,.7g}" if isinstance(value, float) else f"{value:,}"


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
_ROWS: dict[str, Callable[[Figures], str]] = {
    "step, overlapped": lambda of: duration(of["step_ms"]),
    "Newton-Schulz": lambda of: duration(of["ns_ms"]),
    "exchange": lambda of: duration(of["exchange_ms"]),
    "extra memory, at most": lambda of: size(of["extra_bytes"]),
    "most received by a rank": lambda of: size(of["exchange_bytes"]),
    "owners' load, max / mean": lambda of: f"{of['max_over_mean']:.3f}",
}
