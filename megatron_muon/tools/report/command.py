"""`megatron-muon report`: a page with pictures on one run or many, and on how optimizers compare."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from megatron_muon.errors import UserError
from megatron_muon.tools.train.run_folder import write_json

DESCRIPTION = """\
Reads runs of `megatron-muon train` and whole folders of `megatron-muon sweep`, and writes DIR/report.html, one file
that any browser shows, and the same page as DIR/report.md with PNG pictures beside it: losses against steps, tokens and
seconds with seeds as bands, final loss against learning rate, time and memory, Muon and AdamW side by side, and the
commands, versions, commits and machines behind them. report.json has the figures. Runs that differ only in their
seed are grouped; each optimizer is represented by its best settings. Runs whose data, split or sequence length differ
are shown and not compared.
"""

EXAMPLES = """\
examples:
  megatron-muon report runs/compare --out runs/compare/report
  megatron-muon report runs/first runs/second --out runs/report
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon report`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run or of a sweep")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the page and pictures go")


def run(args: argparse.Namespace) -> int:
    """Writes the page."""
    from megatron_muon.tools.report.arms import find_runs, read_arms
    from megatron_muon.tools.report.html import html_page
    from megatron_muon.tools.report.page import FIGURES, HTML, PAGE, Report, count

    arms, empty = read_arms(find_runs(args.runs))
    report = Report(arms, empty)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        pictures = report.draw(args.out)
        command = shlex.join(("megatron-muon", *sys.argv[1:]))
        page = report.page(pictures, places=args.runs, command=command)
        (args.out / PAGE).write_text(page, "utf-8")
        inside = {name: (args.out / name).read_bytes() for name in pictures}
        (args.out / HTML).write_text(html_page(page, inside), "utf-8")
        write_json(args.out / FIGURES, report.figures())
    except OSError as error:
        raise UserError(f"cannot write to {str(args.out)!r}: {error.strerror}; give another --out DIR") from None
    print(f"{args.out / HTML}: {count(len(report.runs), 'run')} of {count(len(arms), 'setting')}")
    print(f"also written: {', '.join((PAGE, *pictures, FIGURES))}")
    for record in empty:
        print(f"left out (no step logged): {record.folder}")
    return 0
