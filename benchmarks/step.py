"""`python -m benchmarks.step`: times Muon's two exchanges and Adam on the shards of a GPT or of given matrices.

This module has arguments and tables; `step_ranks.py` measures, on ranks that this starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import buffer_mb, main, run_logged, table, torchrun
from megatron_muon.errors import UserError, install
from megatron_muon.settings import choices_of
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train.processes import environment

if TYPE_CHECKING:
    from rich.table import Table

OFFLOADS, DTYPES, TEAM_SIZES = map(
    choices_of, ("muon_offload", "muon_momentum_dtype", "muon_team_size")
)
METHODS = ("owner", "allgather", "allgather-tuned", "adam")
VARIANTS = ("cautious", "hyperball")
PEERS = {"deepspeed": "deepspeed", "deepspeed-gram": "deepspeed", "muon-fsdp2": "muon_fsdp2"}
"""The module that each imports; what they are stands in `benchmarks/peers.py` and `fsdp2.py`."""

CUDA_PEERS = {"muonium": "muonium 0.2.0", "dtensor-muon": "dtensor-muon 0.1.0"}
"""Peers that cannot be measured, with the version in which this was found: `zeropower` and `foreach_zeropower` choose
the Triton kernel unless told otherwise, no option of their optimizers tells them, and its `gram_` asserts `is_cuda`."""


@dataclass(frozen=True)
class StepSpec:
    """What `benchmarks.step` measures: its flags by name. Travels to the ranks as JSON."""

    ranks: int
    hidden_size: int | None
    num_layers: int | None
    matrices: Sequence[tuple[int, int, int]]  # (count, rows, cols), in place of a GPT's
    ns_dtype: str
    methods: Sequence[str]
    team_size: Sequence[str]
    variants: Sequence[str]
    peers: Sequence[str]
    repeat: int
    warmup: int
    buffer_mb: float | None
    device: str
    offload: Sequence[str]
    offload_dir: str | None
    offload_buffer_mb: float
    momentum_dtype: str


EXAMPLES = """\
examples:
  the optimizer step alone, on the shards of a GPT of 8 layers:
    python -m benchmarks.step --ranks 4 --hidden-size 512 --num-layers 8 --json step.json
  a matrix that is more than a rank's share, owned by a team and by one rank:
    python -m benchmarks.step --ranks 2 --matrices 8192x1024 --methods owner --team-size 1
  cautious decay and kept norms beside plain decay:
    python -m benchmarks.step --ranks 2 --hidden-size 512 --num-layers 8 --methods owner --variants cautious hyperball
  the optimizer step with momentum in host memory and on disk:
    python -m benchmarks.step --ranks 2 --hidden-size 512 --num-layers 8 --offload cpu nvme --offload-dir /local/nvme
"""

DESCRIPTION = """\
Times one optimizer step of each method, in one run on the same shards and gradients: GPT blocks with qkv 3H x H,
proj H x H, fc1 4H x H and fc2 H x 4H, or the matrices of --matrices; rows cut evenly over the ranks.

owner is what training does: where a matrix is more than a rank's share, a team of ranks may own it together.
--team-size 1 adds team-1, the same with one owner for every matrix; 2, 4 and 8 add teams of that size for all.

allgather is that scheme as upstream's draft has it: every rank receives every matrix and runs emerging-optimizers'
iteration on one after the other. allgather-tuned is the same with this package's iteration, so that its distance from
owner is the exchange's and the division of work alone.

Peers, on CPU alone: deepspeed is DeepSpeed's ZeRO-3 Muon with its standard Newton-Schulz in bf16, deepspeed-gram the
same with its own default. Only the engine's step is timed; a forward and a backward before it bring the gradients.
muon-fsdp2 is that package's optimizer on the shards of torch's FSDP2, in bf16; only its step is timed, too.

The floor is measured in the same run: Newton-Schulz FLOPs over the rate at which all ranks at once multiply matrices of
these shapes, plus the exchange's bytes over the measured bandwidth. Times are those of the slowest rank.
"""


def configure(parser: CommandParser) -> None:
    """Adds description, arguments and examples."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
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
        help="these in place of a GPT's, each one block: 8192x1024, or 8x1024x1024 for eight",
    )
    add(
        "--ns-dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="what Newton-Schulz's products run in (bf16)",
    )
    add("--repeat", type=positive, default=5, metavar="R", help="timed steps of each method (5)")
    add(
        "--warmup",
        type=positive,
        default=1,
        metavar="W",
        help="steps of each method before these (1)",
    )
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="M",
        help=f"of {', '.join(METHODS)} (all)",
    )
    add(
        "--team-size",
        nargs="+",
        choices=TEAM_SIZES[1:],
        default=[],
        metavar="S",
        help=f"owner again, as team-S, with teams of this size alone: {', '.join(TEAM_SIZES[1:])}",
    )
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=[],
        metavar="V",
        help=f"owner again with cautious decay or norms that are kept: {', '.join(VARIANTS)}",
    )
    add(
        "--peers",
        nargs="+",
        choices=(*PEERS, *CUDA_PEERS),
        default=[],
        metavar="P",
        help=f"other implementations: {', '.join(PEERS)}",
    )
    add(
        "--buffer-mb",
        type=buffer_mb,
        metavar="MB",
        help="MiB that the owner's step may take (256, or more)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where it is there",
    )
    add(
        "--offload",
        nargs="+",
        choices=OFFLOADS,
        default=[],
        metavar="O",
        help=f"owner again with momentum elsewhere: {', '.join(OFFLOADS)}, as --muon-offload",
    )
    add(
        "--offload-dir",
        metavar="DIR",
        help="with --offload nvme: a directory on the disk to be measured",
    )
    add(
        "--offload-buffer-mb",
        type=buffer_mb,
        default=24.0,
        metavar="MB",
        help="MiB for momentum on its way (24)",
    )
    add(
        "--momentum-dtype",
        choices=DTYPES,
        default="fp32",
        help="with --offload: how momentum is stored (fp32)",
    )


def step_spec(args: argparse.Namespace) -> StepSpec:
    """What the arguments of `benchmarks.step` ask for.

    Raises:
        UserError: a peer that is not installed or needs CUDA, or a device or shards that peers are
            not measured on.
    """
    if [args.hidden_size, args.num_layers].count(None) != (2 if args.matrices else 0):
        raise UserError(
            "what is to be measured? give --hidden-size H and --num-layers L, or --matrices"
            " ROWSxCOLS alone"
        )
    for size in args.team_size:
        if int(size) > args.ranks:
            raise UserError(
                f"--team-size {size} is more than --ranks {args.ranks}; lower it, or raise --ranks"
            )
    peers = args.peers
    for peer in peers:
        if peer in CUDA_PEERS:
            raise UserError(
                f"--peers {peer}: {CUDA_PEERS[peer]} iterates in a Triton kernel that takes CUDA"
                f" tensors alone, and peers are measured on CPU; leave {peer} out"
            )
        if importlib.util.find_spec(PEERS[peer]) is None:
            package = PEERS[peer].replace("_", "-")
            raise UserError(f"--peers {peer}: {package} is not installed; {install('bench')}")
    if peers and args.device == "cuda":
        raise UserError(
            f"--peers {' '.join(peers)} --device cuda: measured on CPU alone; type --device cpu"
        )
    rows = [rows for _, rows, _ in args.matrices] or [args.hidden_size]
    if "muon-fsdp2" in peers and any(number % args.ranks for number in rows):
        given = f"--hidden-size {args.hidden_size}" if args.hidden_size else "--matrices"
        raise UserError(
            f"--peers muon-fsdp2 --ranks {args.ranks} {given}: it takes shards of equal size alone;"
            f" take a multiple of {args.ranks} as"
            f" {'hidden size' if args.hidden_size else 'rows of each'}"
        )
    if ("nvme" in args.offload) != (args.offload_dir is not None):
        raise UserError("--offload nvme and --offload-dir DIR go together; give both, or neither")
    if args.momentum_dtype != "fp32" and not args.offload:
        raise UserError(
            f"--momentum-dtype {args.momentum_dtype} needs --offload; with none momentum stays in"
            " place"
        )
    if args.offload_dir is not None:
        try:
            tempfile.TemporaryFile(dir=args.offload_dir).close()
        except OSError as error:
            raise UserError(
                f"--offload-dir {args.offload_dir}: cannot write there: {error.strerror}"
            ) from None
    spec = {field.name: getattr(args, field.name) for field in dataclasses.fields(StepSpec)}
    for name in ("methods", "team_size", "variants", "peers", "offload"):
        spec[name] = list(dict.fromkeys(spec[name]))  # once each, in the order given
    return StepSpec(**spec)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks and returns their figures, with ratios."""
    spec = step_spec(args)
    print("measuring optimizer steps", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log, output = Path(folder, "log"), Path(folder, "figures.json")
        worker = ("-m", "benchmarks.step_ranks", json.dumps(dataclasses.asdict(spec)), str(output))
        run_logged(
            torchrun(spec.ranks, *worker), log, env=environment(spec.ranks), what="the measurement"
        )
        figures = json.loads(output.read_text("utf-8"))
    return {**_with_ratios(figures), "setting": dataclasses.asdict(spec)}


def _with_ratios(figures: dict[str, Any]) -> dict[str, Any]:
    """`figures` with `ratios` of medians, where both sides were measured."""
    medians = {method: values["median_ms"] for method, values in figures["methods"].items()}
    ratios = {}
    if "owner" in medians:
        ratios["owner_over_floor"] = medians["owner"] / figures["floor_ms"]["total"]
        ratios |= {
            f"{other}_over_owner": medians[other] / medians["owner"]
            for other in medians
            if other != "owner"
        }
    return {**figures, "ratios": ratios}


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The methods' figures, then where their time goes, from the figures."""
    methods, floor, rates, spec = (
        results[name] for name in ("methods", "floor_ms", "rates", "setting")
    )
    rows = []
    for method, values in methods.items():
        over_floor = f"{values['median_ms'] / floor['total']:.2f}" if method != "adam" else ""
        times = _ms(values["median_ms"]), _ms(values["min_ms"])
        rows.append(
            (
                method,
                *times,
                over_floor,
                *map(_mb, (values["exchange_bytes_per_rank"], values["peak_extra_bytes"])),
            )
        )
    rows.append(("floor", _ms(floor["total"]), "", "1.00", "", ""))
    caption = (
        f"floor: Newton-Schulz {_ms(floor['ns'])} ms ({rates['matmul_gflop_per_s']:,.0f} GFLOP/s,"
        f" all ranks) + exchange {_ms(floor['exchange'])} ms ({rates['bandwidth_gb_per_s']:.2f}"
        " GB/s per rank)"
    )
    if of_peers := [
        f"{name} in {values['ns_dtype']}"
        for name, values in methods.items()
        if "ns_dtype" in values
    ]:
        caption += f"\nNewton-Schulz of {', '.join(of_peers)}"
    if spec["team_size"] or results["plan"]["matrices_of_teams"]:
        caption += f"\n{_teams(methods)}"
    size = f"{_model(spec)}, {spec['ranks']} ranks, {spec['ns_dtype']}"
    columns = ("method", "median ms", "min ms", "/ floor", "exchanged MB/rank", "peak extra MB")
    figures = table(f"Optimizer step, {size}", columns, rows, caption)
    spent = [values["phases_ms"] for values in methods.values()]
    names = dict.fromkeys(phase for phases in spent for phase in phases)
    rows = [
        (name, *(_ms(phases[name]) if name in phases else "" for phases in spent)) for name in names
    ]
    phases = table(
        "Phases in ms, mean over ranks, from steps of their own", ("phase", *methods), rows
    )
    offloaded = {method: values for method, values in methods.items() if "momentum_bytes" in values}
    return [figures, phases, *([_offload_table(results, offloaded)] if offloaded else [])]


def _model(spec: Mapping[str, Any]) -> str:
    """What was measured, in short."""
    if spec["matrices"]:
        return ", ".join(
            f"{f'{count} of ' if count > 1 else ''}{rows}x{cols}"
            for count, rows, cols in spec["matrices"]
        )
    return f"H {spec['hidden_size']}, L {spec['num_layers']}"


def _teams(methods: Mapping[str, Any]) -> str:
    """How many matrices teams own, by method."""
    found = []
    for method, values in methods.items():
        if "plan" in values and "momentum_bytes" not in values:
            teams = [
                f"{count} by {size} ranks"
                for size, count in values["plan"]["matrices_of_teams"].items()
            ]
            found.append(f"{method} {' and '.join(teams) or 'none'}")
    return f"matrices owned by teams: {', '.join(found)}"


def _offload_table(results: Mapping[str, Any], offloaded: Mapping[str, Any]) -> Table:
    """Where momentum lies, of the fullest rank, and what the disk can do."""
    places = {"device": "device", "host": "host", "disk": "disk", "staging": "of these, staging"}
    caption = None
    if (disk := results.get("disk")) is not None:
        how = "direct I/O" if disk["direct_io"] else "through the page cache"
        caption = (
            f"disk, all ranks at once, {how}: reads {disk['read_gb_per_s']:.2f} GB/s, writes "
            f"{disk['write_gb_per_s']:.2f} GB/s"
        )
        if "transfer_ms" in disk:
            caption += f"; momentum there and back: {disk['transfer_ms']:,.0f} ms"
    rows = []
    for method, values in offloaded.items():
        ratio = results["ratios"].get(f"{method}_over_owner")
        cells = [_mb(values["momentum_bytes"][place]) for place in places]
        rows.append((method, *cells, "" if ratio is None else f"{ratio:.2f}"))
    title = f"Momentum as {results['setting']['momentum_dtype']}, MB on the fullest rank"
    return table(title, ("method", *places.values(), "/ owner"), rows, caption)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.1f}"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f}"


def _matrices(text: str) -> tuple[int, int, int]:
    """Count, rows and columns."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise argparse.ArgumentTypeError(
            f"{text} is not ROWSxCOLS or COUNTxROWSxCOLS, such as 8192x1024"
        )
    rows, cols = (int(side) for side in text.split("x")[-2:])
    return int(text.split("x")[0]) if text.count("x") > 1 else 1, rows, cols


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default this process's, and returns the exit status."""
    return main("step", configure, measure, tables, argv)


if __name__ == "__main__":
    sys.exit(run())
