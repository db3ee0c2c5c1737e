"""Whether a learning rate that is best at one width holds at others: a picture and a table of the runs of a sweep.

    python examples/lr_transfer.py runs/lr-transfer --out runs/lr-transfer/report

A panel for each value of --by, in it a line for each value of --setting: final loss against
learning rate, with a star at the best. The table has, for each line, the best rate and what it
costs to reuse the best rate of the first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from megatron_muon.tools.report.arms import find_runs, read_arms
from megatron_muon.tools.report.page import table

type Losses = dict[float, float]
"""Final loss by learning rate, of rates whose runs all finished."""


def read(runs: Path, by: str, setting: str) -> dict[str, dict[str, Losses]]:
    """Final losses by family (the value of `by`), line (the value of `setting`) and learning rate."""
    found: dict[str, dict[str, Losses]] = {}
    for arm in read_arms(find_runs([runs]))[0]:
        settings = dict(arm.settings)
        if setting not in settings:
            raise SystemExit(
                f"--setting {setting} is the same in all runs; they differ in {', '.join(settings)}"
            )
        if arm.counts and arm.final and arm.rate:
            family = found.setdefault(settings.get(by, "all"), {})
            family.setdefault(settings[setting], {})[arm.rate] = arm.final.mean
    if not found:
        raise SystemExit(f"{runs}: no run has finished")
    return {
        name: dict(sorted(lines.items(), key=lambda line: float(line[0])))
        for name, lines in found.items()
    }


def draw(file: Path, families: dict[str, dict[str, Losses]], setting: str) -> None:
    """Final loss against learning rate."""
    figure = Figure(figsize=(5.0 * len(families), 4.4), layout="constrained")
    panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    for panel, (name, lines) in zip(panels, families.items(), strict=True):
        for marker, (value, losses) in zip("os^DvPX" * len(lines), lines.items(), strict=False):
            rates = sorted(losses)
            (line,) = panel.plot(
                rates, [losses[rate] for rate in rates], marker=marker, label=f"{setting} {value}"
            )
            best = min(losses, key=losses.__getitem__)
            panel.plot(
                [best],
                [losses[best]],
                "*",
                markersize=15,
                markeredgecolor="black",
                color=line.get_color(),
            )
        panel.set(
            xscale="log", title=name, xlabel="learning rate of the matrices", ylabel="final loss"
        )
        panel.legend()
    figure.savefig(file, dpi=120)


def rows(families: dict[str, dict[str, Losses]]) -> list[list[str]]:
    """For each line its best rate, the loss there, and what the first line's best rate costs."""
    found = []
    for name, lines in families.items():
        first = next(iter(lines.values()))
        reused = min(first, key=first.__getitem__)
        for value, losses in lines.items():
            best = min(losses, key=losses.__getitem__)
            lost = f"{losses[reused] - losses[best]:+.4f}" if reused in losses else "-"
            edge = ", at the edge" if best in (min(losses), max(losses)) else ""
            found.append([name, value, f"{best:g}{edge}", f"{losses[best]:.4f}", lost])
    return found


def main() -> None:
    """Writes rate-transfer.png and rate-transfer.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="folder of a sweep, or of several")
    parser.add_argument("--out", type=Path, required=True, help="where picture and table go")
    parser.add_argument(
        "--setting", default="hidden_size", help="a line for each value of it (hidden_size)"
    )
    parser.add_argument(
        "--by", default="muon_scale_mode", help="a panel for each value of it (muon_scale_mode)"
    )
    args = parser.parse_args()
    families = read(args.runs, args.by, args.setting)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(args.out / "rate-transfer.png", families, args.setting)
    head = [args.by, args.setting, "best rate", "loss there", "more at the first's best rate"]
    text = table(head, rows(families), numbers=range(1, 5))
    (args.out / "rate-transfer.md").write_text(
        f"{text}\n\n![final loss against learning rate](rate-transfer.png)\n"
    )
    print(text)


if __name__ == "__main__":
    main()
