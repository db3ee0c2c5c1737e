"""`python -m benchmarks.step`: times one optimizer step of Muon, upstream's scheme and Adam.

This module has the arguments and the tables; `step_ranks.py` measures, on ranks started here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import buffer_mb, main, run_logged, table, torchrun
from megatron_muon.errors import UserError, install
from megatron_muon.settings import choices_of
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train.processes import environment

if TYPE_CHECKING:
    from rich.table import Table

METHODS = ("owner", "allgather", "adam")
TEAM_SIZES = choices_of("muon_team_size")[1:]  # without "auto"
VARIANTS = ("cautious", "hyperball")
PEERS = ("deepspeed",)

EXAMPLES = """\
examples:
  the optimizer step on the shards of a GPT of 8 layers:
    python -m benchmarks.step --ranks 4 --hidden-size 512 --num-layers 8 --json step.json
  a matrix larger than a rank's share, owned by a team and by one rank:
    python -m benchmarks.step --ranks 2 --matrices 8192x1024 --methods owner --team-size 1
"""

DESCRIPTION = """\
Time one optimizer step of each method, all in one run on the same shards and gradients: GPT blocks
with qkv 3H x H, proj H x H, fc1 4H x H and fc2 H x 4H, or the matrices of --matrices; rows are cut
evenly over the ranks. Times are those of the slowest rank.

owner      Muon as in training; teams may own large matrices. --team-size S and --variants V add it
           again, with teams of S ranks only, with cautious decay, or as hyperball.
allgather  the scheme of upstream's draft: each rank receives every matrix and runs
           emerging-optimizers' iteration on one after the other.
adam       the Adam that megatron-core uses.
deepspeed  (--peers, CPU only) the engine step of DeepSpeed's ZeRO-3 Muon, Newton-Schulz in bf16.
"""


def configure(parser: CommandParser) -> None:
    """Adds description, arguments and examples."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--ranks", type=positive, required=True, metavar="N", help="processes on this machine")
    add("--hidden-size", type=positive, metavar="H", help="columns of qkv, proj and fc1")
    add("--num-layers", type=positive, metavar="L", help="GPT blocks")
    add(
        "--matrices",
        type=_matrices,
        nargs="+",
        default=[],
        metavar="[COUNTx]ROWSxCOLS",
        help="instead of a GPT: 8192x1024, or 8x1024x1024 for eight of these",
    )
    add("--ns-dtype", choices=("bf16", "fp32"), default="bf16", help="dtype of products (bf16)")
    add("--repeat", type=positive, default=5, metavar="R", help="timed steps of each method (5)")
    add("--warmup", type=positive, default=1, metavar="W", help="untimed steps before these (1)")
    _add_several(parser, "--methods", METHODS, "what to time (all)", default=METHODS)
    _add_several(parser, "--team-size", TEAM_SIZES, "owner with teams of this size only")
    _add_several(parser, "--variants", VARIANTS, "owner with another rule")
    _add_several(parser, "--peers", PEERS, "other implementations")
    add("--buffer-mb", type=buffer_mb, metavar="MB", help="MiB that owner may take (256 or more)")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda if available",
    )


def _add_several(
    parser: CommandParser,
    flag: str,
    choices: Sequence[str],
    text: str,
    default: Sequence[str] = (),
) -> None:
    text = f"{text}: {', '.join(choices)}"
    parser.add_argument(flag, nargs="+", choices=choices, default=default, help=text)


def check(args: argparse.Namespace) -> None:
    """Raises UserError for arguments that do not go together, or a peer that is not installed."""
    sizes = (args.hidden_size, args.num_layers)
    if sizes.count(None) != (2 if args.matrices else 0):
        raise UserError("give --hidden-size H and --num-layers L, or --matrices ROWSxCOLS alone")
    for size in args.team_size:
        if int(size) > args.ranks:
            text = f"--team-size {size} is more than --ranks {args.ranks}"
            raise UserError(f"{text}; lower it, or raise --ranks")
    for peer in args.peers:
        if importlib.util.find_spec(peer) is None:
            raise UserError(f"--peers {peer}: it is not installed; {install('bench')}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks and returns their figures, with ratios to owner."""
    check(args)
    print("measuring optimizer steps", file=sys.stderr)
    spec = {key: value for key, value in vars(args).items() if key != "json"}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder, "log")
        output = Path(folder, "figures.json")
        worker = ("-m", "benchmarks.step_ranks", json.dumps(spec), str(output))
        command = torchrun(args.ranks, *worker)
        run_logged(command, log, env=environment(args.ranks), what="the measurement")
        figures: dict[str, Any] = json.loads(output.read_text("utf-8"))
    return figures | {"ratios": ratios(figures["methods"]), "setting": spec}


def ratios(methods: Mapping[str, Any]) -> dict[str, float]:
    """Medians of all methods to that of owner."""
    if "owner" not in methods:
        return {}
    owner = methods["owner"]["median_ms"]
    others = methods.keys() - {"owner"}
    return {f"{other}_over_owner": methods[other]["median_ms"] / owner for other in others}


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The methods' figures, then their time by phase."""
    methods, spec = results["methods"], results["setting"]
    rows = []
    for method, values in methods.items():
        ratio = results["ratios"].get(f"{method}_over_owner", 1.0)
        times = _ms(values["median_ms"]), _ms(values["min_ms"]), f"{ratio:.2f}"
        received = "" if method in PEERS else _mb(values["received_bytes"])
        sizes = received, _mb(values["peak_extra_bytes"])
        rows.append((method, *times, *sizes))
    title = f"Optimizer step, {_model(spec)}, {spec['ranks']} ranks, {spec['ns_dtype']}"
    columns = ("method", "median ms", "min ms", "/ owner", "received MB/rank", "peak extra MB")
    figures = table(title, columns, rows)
    phases = {method: values["phases_ms"] for method, values in methods.items()}
    names = {name: None for spent in phases.values() for name in spent}
    rows = []
    for name in names:
        cells = (_ms(spent[name]) if name in spent else "" for spent in phases.values())
        rows.append((name, *cells))
    title = "Phases in ms, mean over ranks, from steps of their own"
    return [figures, table(title, ("phase", *methods), rows)]


def _model(spec: Mapping[str, Any]) -> str:
    if not spec["matrices"]:
        return f"H {spec['hidden_size']}, L {spec['num_layers']}"
    found = []
    for count, rows, cols in spec["matrices"]:
        found.append(f"{count} of {rows}x{cols}")
    return ", ".join(found)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.1f}"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f}"


def _matrices(text: str) -> tuple[int, int, int]:
    """Count, rows and columns, for argparse."""
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        wanted = "ROWSxCOLS or COUNTxROWSxCOLS, such as 8192x1024"
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    count, rows, cols = found.groups()
    return int(count or 1), int(rows), int(cols)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default this process's, and returns the exit status."""
    return main("step", configure, measure, tables, argv)


if __name__ == "__main__":
    sys.exit(run())
