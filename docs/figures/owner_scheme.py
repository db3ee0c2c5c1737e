#!/usr/bin/env python3
"""Draws docs/figures/owner_scheme.svg: all-gather and owner schemes, four ranks.

    python docs/figures/owner_scheme.py [FILE]

A drawing of the idea and no measurement: every matrix is cut evenly here, which Megatron-FSDP does
not do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

RANKS = 4
MATRICES = "ABCD"
FILLS = ("#d6e6f5", "#fbe3c4", "#d9eed3", "#ead9f0")
HATCHES = ("", "///", "\\\\\\", "||||")
WIDTH, HEIGHT, GAP = 0.62, 1.0, 0.16
LEFT = {"rows": 1.3, "whole": 5.3, "update": 9.3}


def matrix(ax: Axes, x: float, y: float, index: int, rows: range) -> None:
    """Draw a matrix of four strips: a rank's own are filled, a whole matrix has a thick frame."""
    strip = HEIGHT / RANKS
    outline = {
        "fill": False,
        "edgecolor": "#999999",
        "linewidth": 0.7,
        "linestyle": (0, (2, 2)),
        "clip_on": False,
    }
    ax.add_patch(Rectangle((x, y), WIDTH, HEIGHT, **outline))
    if rows:
        whole = len(rows) == RANKS
        frame = {
            "edgecolor": "black" if whole else "#555555",
            "linewidth": 2.4 if whole else 0.9,
            "clip_on": False,
        }
        corner = (x, y + HEIGHT - rows.stop * strip)
        ax.add_patch(
            Rectangle(
                corner,
                WIDTH,
                len(rows) * strip,
                facecolor=FILLS[index],
                hatch=HATCHES[index],
                **frame,
            )
        )


def panel(ax: Axes, title: str, *, owner: bool) -> None:
    """One scheme: what each rank has before, in the middle and after a step."""
    ax.set_title(title, fontsize=13, fontweight="bold", loc="left")
    heads = {
        "rows": "1  its rows\n(momentum)",
        "whole": "2  whole matrices:\nNewton-Schulz",
        "update": "3  its rows\n(update)",
    }
    for stage, text in heads.items():
        ax.text(LEFT[stage], 6.65, text, fontsize=10.5, va="bottom")
    for rank in range(RANKS):
        y = 5.1 - rank * 1.5
        ax.text(0.0, y + HEIGHT / 2, f"rank {rank}", fontsize=11, va="center")
        for stage, left in LEFT.items():
            for index, name in enumerate(MATRICES):
                whole = stage == "whole" and (not owner or index == rank)
                rows = (
                    range(RANKS)
                    if whole
                    else range(0)
                    if stage == "whole"
                    else range(rank, rank + 1)
                )
                x = left + index * (WIDTH + GAP)
                matrix(ax, x, y, index, rows)
                if rank == 0:
                    ax.text(x + WIDTH / 2, 6.2, name, fontsize=11, ha="center", va="bottom")
        for start, text in ((4.5, "send"), (8.5, "send" if owner else "keep")):
            dashed = text == "keep"
            ax.annotate(
                "",
                xy=(start + 0.7, y + HEIGHT / 2),
                xytext=(start, y + HEIGHT / 2),
                arrowprops={"arrowstyle": "->", "lw": 1.6, "linestyle": ":" if dashed else "-"},
            )
            ax.text(start + 0.33, y + HEIGHT / 2 + 0.14, text, fontsize=9, ha="center")
    facts = (
        ("each rank receives 3 + 3 = 6 strips", "each rank orthogonalizes 1 matrix")
        if owner
        else ("each rank receives 12 strips", "each rank orthogonalizes all 4 matrices")
    )
    ax.text(1.3, 0.25, "\n".join(facts), fontsize=11.5, va="top", linespacing=1.5)
    ax.set_xlim(-0.1, 12.6)
    ax.set_ylim(-1.0, 7.7)
    ax.set_aspect("equal")
    ax.axis("off")


def main() -> None:
    """Write the figure, as SVG or as what the file's ending says."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    # Text stays text, and the same names in every run make the same file.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "owner scheme", "font.family": "DejaVu Sans"}
    )
    figure = Figure(figsize=(8.6, 12.2))
    above, below = figure.subplots(2, 1)
    panel(above, "All-gather: every rank gets everything", owner=False)
    panel(below, "Owner scheme: every matrix goes to one rank", owner=True)
    figure.subplots_adjust(left=0.02, right=0.98, top=0.96, bottom=0.01, hspace=0.06)
    extra = (
        {"metadata": {"Date": None, "Title": "All-gather and the owner scheme"}}
        if file.suffix == ".svg"
        else {}
    )
    figure.savefig(file, **extra)


if __name__ == "__main__":
    main()
