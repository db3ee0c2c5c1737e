"""`megatron-muon plan`: makes the plan of a run on paper, and says whether it fits, and how long a step may take.

Its figures have the form of the JSON file; the page shows memory, time and Muon's step first.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon import shipped
from megatron_muon.core.layout import MAX_RANKS, Layout, Matrix, Shard, whole
from megatron_muon.core.memory import Memory, moment_bytes
from megatron_muon.core.plan import all_gather_bytes
from megatron_muon.errors import UserError, install, quiet_imports
from megatron_muon.megatron.flags.refusals import needs_whole_updates
from megatron_muon.settings import iteration_of
from megatron_muon.tools.parser import CommandParser, positive, write_json
from megatron_muon.tools.plan import estimate, training_step
from megatron_muon.tools.plan.estimate import (
    HARDWARE,
    Group,
    GroupPlan,
    Hardware,
    KindPlan,
    Settings,
    plan_kinds,
)

if TYPE_CHECKING:
    from megatron_muon.fsdp.views import View

EXAMPLES = """\
examples:
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64 --muon-exchange-buffer-mb 512 --muon-team-size 2
  megatron-muon plan --config configs/moe-large.yaml --world-size 4096 --hardware gb300 --details --json plan.json
  megatron-muon plan --hf configs/transformers/llama3-8b.json --world-size 64   (FSDP2, for megatron_muon.Muon)
  megatron-muon plan --hf configs/transformers/qwen3-30b-a3b.json --world-size 64 --ep 8
"""

Figures = dict[str, Any]
_MEMORY = {
    "weights": "weights and fp32 main weights",
    "gradients": "gradients",
    "state": "optimizer state",
    "activations": "activations",
    "step": "Muon's step",
    "total": "in all",
}

DESCRIPTION = """\
Plan a run with Muon on paper: whether it fits a GPU, how long a step may take, who orthogonalises what.

With --config, memory and a training step of the config's batch on GPUs come first, with Adam and with Muon. Times are
arithmetic on the hardware profile. They rank configurations; python -m benchmarks.train measures.
"""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon plan`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", type=Path, metavar="FILE.yaml", help="experiment file")
    model.add_argument(
        "--hf",
        type=Path,
        metavar="MODEL",
        help=(
            "a transformers folder or config.json, under FSDP2 over all ranks with"
            " megatron_muon.Muon"
        ),
    )
    add(
        "--ep",
        type=positive,
        metavar="N",
        help="with --hf, ranks over which the experts of a layer are spread before fully_shard (1)",
    )
    add_run(parser, tuple(HARDWARE))
    add("--details", action="store_true", help="also show every figure of the JSON file")
    add(
        "--mfu",
        type=float,
        default=training_step.MFU,
        metavar="SHARE",
        help=(
            "of the peak rate, that model FLOPs of forward and backward reach"
            f" ({training_step.MFU:g})"
        ),
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def add_run(parser: CommandParser, machines: Sequence[str]) -> None:
    """Adds the arguments that name the run: its ranks, its machine, other flags than the file's."""
    add = parser.add_argument
    add("--world-size", type=positive, metavar="N", required=True, help="ranks of the run")
    add(
        "--hardware",
        type=functools.partial(_machine, machines),
        default=machines[0],
        metavar="NAME",
        help=(
            f"machine to estimate for: {', '.join(machines)} (the first), or the FILE.yaml that"
            " megatron-muon doctor --gpu --write-profile has written on it"
        ),
    )
    add(
        "--node-ranks",
        type=positive,
        metavar="N",
        help=(
            "ranks of a node, the run's LOCAL_WORLD_SIZE (those of the machine; gb300: 72, a whole"
            " rack)"
        ),
    )
    parser.take_megatron_flags(
        "any flag of pretrain_gpt.py, instead of the file's: --global-batch-size 256"
    )


def _machine(machines: Sequence[str], text: str) -> Hardware:
    """A machine by its name, or as a file describes it, for argparse."""
    if text in machines:
        return HARDWARE[text]
    if not text.endswith(".yaml"):
        raise argparse.ArgumentTypeError(
            f"unknown: {text!r}; choose from {', '.join(machines)}, or give a FILE.yaml"
        )
    import yaml

    try:
        found = yaml.safe_load(Path(text).read_text("utf-8"))
        usual = asdict(HARDWARE[machines[0]])
        for name, value in usual.items():
            least = 0 if name in ("memory_gb", "rack_ranks") else 1e-9
            is_right = (
                type(found[name]) is type(value)
                if isinstance(value, str | bool)
                else found[name] >= least
            )
            if not is_right:
                raise ValueError(f"{name} is {found[name]!r}")
        return Hardware(**{name: found[name] for name in usual})
    except (OSError, TypeError, KeyError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise argparse.ArgumentTypeError(
            f"{text} does not describe a machine ({type(error).__name__}: {why})"
        ) from None


def hardware_of(args: argparse.Namespace) -> Hardware:
    """The machine that `args` name, with nodes as the run has them."""
    if args.world_size > MAX_RANKS:
        raise UserError(f"--world-size must be at most {MAX_RANKS:,}, got {args.world_size}")
    hardware: Hardware = args.hardware
    return hardware if args.node_ranks is None else replace(hardware, node_ranks=args.node_ranks)


def run(args: argparse.Namespace) -> int:
    """Plans, writes the figures as JSON where asked, and prints them."""
    hardware, model = hardware_of(args), None
    if not 0 < args.mfu <= 1:
        raise UserError(
            f"--mfu must be above 0 and at most 1, got {args.mfu:g}; {training_step.MFU:g} is usual"
        )
    if args.ep is not None and args.config is not None:
        raise UserError(
            f"--ep is for --hf; with --config give --expert-model-parallel-size {args.ep}"
        )
    if args.config is not None:
        config, groups, model = read_config(args.config, args.world_size, hardware, args.flags)
        settings = settings_of(config, hardware)
    elif args.flags:
        raise UserError(
            f"--hf plans with the defaults of megatron_muon.Muon; leave {' '.join(args.flags)} out"
        )
    else:
        settings, groups = read_transformers(args.hf, args.world_size, hardware, args.ep or 1)
    kinds, unmet = plan_kinds(groups, settings, hardware)
    figures = {**figures_of(kinds, args.world_size, settings, hardware), "notes": unmet}
    if model is not None and not hardware.processor:
        figures["memory"] = training_step.memory(model, config, figures["extra_bytes"], hardware)
        if model.global_batch is not None:
            figures["training_step"], warnings = training_step.simulate(
                model, figures, settings=settings, hardware=hardware, mfu=args.mfu
            )
            figures["notes"] += warnings
    write_json(args.json, figures)
    show(figures, str(args.config or args.hf), details=args.details)
    return 0


def read_config(
    config: Path, world_size: int, hardware: Hardware, flags: Sequence[str] = ()
) -> tuple[Any, list[Group], training_step.Model]:
    """`matrices.read_model` of an experiment file with other flags; leaves the CPU standing in for a GPU."""
    shipped.require(config)
    gc.disable()  # to look again and again through what imports make takes it half a second
    try:
        with quiet_imports():
            from megatron_muon import cpu

            cpu.install(force=True)
            from megatron_muon.tools.plan.matrices import read_model
        return read_model(config, world_size, flags, device="cpu" if hardware.processor else "cuda")
    finally:
        gc.enable()


def settings_of(config: Any, hardware: Hardware) -> Settings:
    """The settings of a `MuonOptimizerConfig` that `check_supported` has let pass, on a machine."""
    iteration = hardware.iterate(iteration_of(config))
    adaptive, cautious = config.optimizer == "adaptive_muon", config.muon_cautious_weight_decay
    exchanged = {"auto": iteration.half, "bf16": True, "fp32": False}[config.muon_exchange_dtype]
    moment = moment_bytes(
        config.adaptive_muon_moment2_method if adaptive else None, cautious=cautious
    )
    team_size = "1" if needs_whole_updates(config) else config.muon_team_size
    return Settings(
        config.muon_exchange_buffer_mb, Memory(2 if exchanged else 4, iteration, moment), team_size
    )


def read_transformers(
    path: Path, world_size: int, hardware: Hardware, ep: int = 1
) -> tuple[Settings, list[Group]]:
    """The matrices of the model that a `transformers` folder or config.json describes, by `fully_shard` over all ranks.

    The experts of each layer are spread over `ep` ranks before that. The model is built on the meta
    device; nothing is downloaded. The settings are the defaults of `Muon`.

    Raises:
        UserError: transformers is not installed, or has no such model; its experts cannot be spread
            so.
    """
    import torch

    from megatron_muon.fsdp.selection import select

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = shipped.find(path)
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"--hf needs transformers ({error}); {install('hf')}") from None
    if not path.exists():
        raise UserError(
            f"--hf {path}: there is no such folder or file; give a model's folder or its"
            " config.json"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            automatic = transformers.AutoModelForCausalLM
            model = (
                named(config) if named else automatic.from_config(config, trust_remote_code=False)
            )
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"--hf {path}: transformers {transformers.__version__} cannot build it: {reason}"
        ) from None
    selection = select(model)
    views = selection.views
    if ep > 1 and not any(view.is_stack for view in views.values()):
        raise UserError(f"--hf {path} has no stacks of experts for Muon; leave --ep {ep} out")
    cut = {view: _shards_of(view, world_size, ep) for view in dict.fromkeys(views.values())}
    matrices = []
    for p, view in views.items():
        split = selection.choices[p].split or whole(view.matrix[0])
        for name, shards in zip(view.names(selection.name(p)), cut[view], strict=True):
            matrices.append(Matrix(name, view.matrix, shards, split))
    return _fully_sharded(world_size, matrices, hardware)


def _fully_sharded(
    ranks: int, matrices: Iterable[Matrix], hardware: Hardware
) -> tuple[Settings, list[Group]]:
    from megatron_muon.fsdp.options import iteration_of as iteration_of_arguments

    settings = Settings(None, Memory(2, hardware.iterate(iteration_of_arguments())))
    return settings, [Group("fully_shard", Layout(ranks, tuple(matrices)))]


def step_ms(shapes: Sequence[tuple[int, int]], ranks: int, hardware: Hardware) -> float:
    """Milliseconds of a step on matrices of these shapes under `fully_shard`, elementwise passes included."""
    from megatron_muon.fsdp.views import View

    cut = {shape: _shards_of(View(shape), ranks, 1)[0] for shape in dict.fromkeys(shapes)}
    matrices = [Matrix(str(number), shape, cut[shape]) for number, shape in enumerate(shapes)]
    settings, (group,) = _fully_sharded(ranks, matrices, hardware)
    held = sum(map(math.prod, shapes)) / ranks
    elementwise = training_step.elementwise_ms(held, held, settings, hardware)
    return estimate.plan_group(group, settings, hardware).step_ms + elementwise


def _shards_of(view: View, world_size: int, ep: int) -> list[tuple[Shard, ...]]:
    """The shards of each matrix of a parameter under `fully_shard`, stacks of experts over `ep` ranks before that.

    The mesh of experts is `(world_size / ep, ep)`: its first dimension shares the experts of an
    expert-parallel rank, or, where these are fewer, the rows of each, evenly, as `fully_shard`
    wants it.

    Source: torchtitan's layout, pytorch/torchtitan#1561.
    """
    import numpy as np
    from torch.distributed.tensor import placement_types

    from megatron_muon.fsdp.cuts import placed_shards

    ranks, cut = np.arange(world_size), placement_types.Shard
    if ep == 1 or not view.is_stack:
        return placed_shards(view, ranks, [cut(0)])
    experts, rows, few = view.count, view.shape[1], view.count < world_size
    both = [
        number for number in range(1, experts + 1) if experts % number == world_size % number == 0
    ]
    possible = [
        number for number in both if not few or rows % (world_size // number) == 0 or number == 1
    ]
    if ep not in possible:
        raise UserError(
            f"--ep {ep} does not spread {experts} experts of {rows} rows evenly over --world-size"
            f" {world_size}; use"
            f" {', '.join(map(str, possible[:-1]))}{' or ' * (len(possible) > 1)}{possible[-1]}"
        )
    over_data = cut(1) if few else placement_types._StridedShard(0, split_factor=ep)
    return placed_shards(view, ranks.reshape(-1, ep), [over_data, cut(0)])


def figures_of(
    kinds: Sequence[KindPlan], world_size: int, settings: Settings, hardware: Hardware
) -> Figures:
    """The figures of rank 0's groups, and of all of them together, which step one by one."""
    plans = [kind.of(0) for kind in kinds]
    groups = [_of_group(kind.group.name, item) for kind, item in zip(kinds, plans, strict=True)]
    loads = [item.plan.loads for item in plans]
    mean = sum(sum(each) / len(each) for each in loads)
    sums = (
        "matrices",
        "travelling",
        "parameters",
        "waves",
        "allgather_bytes",
        "ns_ms",
        "exchange_ms",
        "step_ms",
    )
    return {
        "digest": "-".join(item.digest for item in plans),
        "world_size": world_size,
        "hardware": hardware.name,
        "node_ranks": hardware.node_ranks,
        "settings": {
            "buffer_mb": settings.buffer_mb,
            "exchange_dtype": "bf16" if settings.memory.element_bytes == 2 else "fp32",
            "team_size": settings.team_size,
            "ns": settings.memory.iteration.method,
            "ns_dtype": "bf16" if settings.memory.iteration.half else "fp32",
            "ns_steps": settings.memory.iteration.steps,
        },
        **{name: sum(group[name] for group in groups) for name in sums},
        **{
            name: max(group[name] for group in groups)
            for name in ("extra_bytes", "buffer_bytes", "peers")
        },
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
            members = kind.group.members(min(left))
            left -= set(members)
            for rank, count in zip(members, kind.of(members[0]).received, strict=True):
                received[rank] += count
    return max(received, default=0)


def _of_group(name: str, item: GroupPlan) -> Figures:
    plan, layout = item.plan, item.plan.layout
    return {
        "name": name,
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
    """Print the page; with `details` every figure."""
    memory, step, settings = (
        figures.get("memory"),
        figures.get("training_step"),
        figures["settings"],
    )
    print_line(
        f"Plan of {source} at {figures['world_size']:,} ranks, {figures['hardware']}", "bold"
    )
    if memory is not None:
        rows = [
            (label, *(size(memory[of][part]) for of in ("adam", "muon")))
            for part, label in _MEMORY.items()
        ]
        print_table(("memory of a GPU", "with Adam", "with Muon"), rows)
        has = "fits" if memory["fits"] else "DOES NOT FIT"
        print_line(
            f"with Muon it {has}: a GPU has {size(memory['capacity'])}\n",
            "green" if memory["fits"] else "red",
        )
    if step is not None:
        both = [step["adam_ms"], step["muon_ms"]]
        rows = [
            ("training step", *(duration(each["total"]) for each in both)),
            (
                "share waiting for communication",
                *(f"{each['communication'] / each['total']:.0%}" for each in both),
            ),
            ("Muon / Adam", "1", f"{step['muon_over_adam']:.4f}"),
        ]
        print_table((f"a step of {step['tokens']:,} tokens", "with Adam", "with Muon"), rows)
        print_line("")
    rows = [
        ("step, overlapped", duration(figures["step_ms"])),
        ("Newton-Schulz", duration(figures["ns_ms"])),
        ("exchange", duration(figures["exchange_ms"])),
        ("extra memory, at most", size(figures["extra_bytes"])),
        ("matrices, of which travel", f"{figures['matrices']:,}, {figures['travelling']:,}"),
        ("most received by a rank", size(figures["exchange_bytes"])),
        ("owners' load, max / mean", f"{figures['max_over_mean']:.3f}"),
    ]
    print_table(("Muon's step", "a rank"), rows)
    print_line(
        f"Newton-Schulz {settings['ns']}, {settings['ns_dtype']}, {settings['ns_steps']} steps;"
        f" exchange in {settings['exchange_dtype']}; nodes of {figures['node_ranks']} ranks; digest"
        f" {figures['digest']}"
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
