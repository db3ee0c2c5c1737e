"""`megatron-muon report`: a page with pictures on one run or many, and on how optimizers compare."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_muon.errors import UserError

DESCRIPTION = """\
Writes a page on runs of `megatron-muon train` and whole folders of `megatron-muon sweep`: DIR/report.html, one file for
any browser, and DIR/report.md with PNG pictures beside it. Runs that differ only in their seed are grouped, and each
optimizer is represented by its best settings. Runs whose data, split or sequence length differ are not compared.
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
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run or of a sweep"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the page and pictures go"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page."""
    from megatron_muon.tools.report.arms import find_runs, read_arms
    from megatron_muon.tools.report.page import HTML, PAGE, Report, html_page

    report = Report(*read_arms(find_runs(args.runs)))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        pictures = report.draw(args.out)
        page = report.page(pictures)
        (args.out / PAGE).write_text(page, "utf-8")
        inside = {name: (args.out / name).read_bytes() for name in pictures}
        (args.out / HTML).write_text(html_page(page, inside), "utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write to {str(args.out)!r}: {error.strerror}; give another --out DIR"
        ) from None
    print(
        f"{args.out / HTML}: {len(report.runs)} runs of {len(report.arms)} settings; {PAGE} has the"
        " same"
    )
    return 0
