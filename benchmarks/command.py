"""Shared by the benchmarks: arguments, provenance of figures, tables, child processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon import cli
from megatron_muon.errors import ExitStatus, RunFailedError, UserError
from megatron_muon.megatron.provenance import provenance
from megatron_muon.ranges import RANGES
from megatron_muon.tools.parser import CommandParser, write_json
from megatron_muon.tools.train import processes

if TYPE_CHECKING:
    from rich.table import Table

MODELS = ("llama3-8b", "llama3-70b", "moe-large")
TAIL_LINES = 40


def main(
    name: str,
    configure: Callable[[CommandParser], None],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    tables: Callable[[Mapping[str, Any]], Iterable[Table]],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs `python -m benchmarks.NAME`: measures, shows tables, writes --json."""
    program = f"python -m benchmarks.{name}"

    def run() -> int:
        parser = CommandParser(prog=program)
        configure(parser)
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write figures to FILE")
        args = parser.parse_args(argv)
        if args.json is not None and not args.json.resolve().parent.is_dir():
            raise UserError(f"cannot write {str(args.json)!r}: its directory does not exist")
        source = provenance(program)
        results = {"bench": name, **measure(args), **source}
        write_json(args.json, results)
        show(results, tables(results))
        return ExitStatus.OK

    return cli.reported(run)


def show(results: Mapping[str, Any], tables: Iterable[Table]) -> None:
    """Prints the tables, and the machine and commit of the figures."""
    from rich.console import Console

    console = Console(highlight=False)
    for one in tables:
        console.print(one)
    machine = results["machine"]
    load = machine["load_average_before"]
    dirty = "-dirty" if results.get("dirty") else ""
    source = f"{machine['processor']}, {machine['cores']} cores, load {load} before"
    console.print(f"{source}; commit {results['commit']}{dirty}", style="dim")


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None
) -> Table:
    """A column of names, and columns of numbers."""
    from rich.table import Table

    made = Table(title=title, caption=caption)
    made.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def parse_models(
    description: str | None, ranks: Sequence[int], argv: Sequence[str] | None
) -> argparse.Namespace:
    """Arguments of a benchmark of the shipped models: `configs` and `ranks`."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=plain)
    configs = [Path(f"configs/{model}.yaml") for model in MODELS]
    parser.add_argument("--configs", type=Path, nargs="+", default=configs)
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks)
    return parser.parse_args(argv)


def buffer_mb(text: str) -> float:
    """The size of a buffer in MiB, for argparse."""
    number = float(text)
    possible = RANGES["muon_exchange_buffer_mb"]
    if not possible.holds(number):
        raise argparse.ArgumentTypeError(f"{text} is out of range; choose {possible}")
    return number


def torchrun(ranks: int, *program: str) -> list[str]:
    """The command that runs `program` on `ranks` processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", *processes.torchrun(ranks, *program)]


def run_logged(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str],
    what: str,
) -> None:
    """Runs a command, named `what` in messages, with all output in `log`; see `processes.watch`.

    Raises:
        RunFailedError: its status is not 0; the end of its output has been printed.
        KeyboardInterrupt, SystemExit: a signal ended it.
    """
    ended = processes.watch(command, log, env=env)
    if ended.signal is not None:
        processes.unwind(ended.signal)
    if ended.status:
        lines = log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        print("\n".join(lines), file=sys.stderr)
        text = f"{what} ended with status {ended.status}"
        raise RunFailedError(f"{text}; the last {len(lines)} lines of its log are above")
