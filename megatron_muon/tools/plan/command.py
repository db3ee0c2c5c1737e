"""`megatron-muon plan`: makes the plan of a run on paper, and says whether it fits, and how long a step may take."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_muon import shipped
from megatron_muon.core.layout import MAX_RANKS, Layout, Matrix
from megatron_muon.core.memory import moment_bytes
from megatron_muon.errors import UserError, install, quiet_imports
from megatron_muon.megatron.flags.refusals import needs_whole_updates
from megatron_muon.settings import iteration_of
from megatron_muon.tools.parser import CommandParser, positive, write_json
from megatron_muon.tools.plan import page, training_step
from megatron_muon.tools.plan.estimate import HARDWARE, Group, Hardware, Settings, plan_kinds
from megatron_muon.tools.plan.training_step import Planned

EXAMPLES = """\
examples:
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64 --muon-exchange-buffer-mb 512 --muon-team-size 2
  megatron-muon plan --config configs/moe-large.yaml --world-size 4096 --hardware gb300 --details --json plan.json
  megatron-muon plan --hf configs/transformers/llama3-8b.json --world-size 64   (FSDP2, for megatron_muon.Muon)
"""

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
    model.add_argument("--hf", type=Path, metavar="MODEL",
        help="a transformers folder or config.json, under FSDP2 over all ranks with megatron_muon.Muon")  # fmt: skip
    add_run(parser, tuple(HARDWARE))
    add("--details", action="store_true", help="also show every figure of the JSON file")
    add("--mfu", type=float, default=training_step.MFU, metavar="SHARE",
        help=f"of the peak rate, that model FLOPs of forward and backward reach ({training_step.MFU:g})")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def add_run(parser: CommandParser, machines: Sequence[str]) -> None:
    """Adds the arguments that say what run is meant: its ranks, its machine, other flags than the file's."""
    add = parser.add_argument
    add("--world-size", type=positive, metavar="N", required=True, help="ranks of the run")
    add("--hardware", choices=machines, default=machines[0], metavar="NAME",
        help=f"machine to estimate for: {', '.join(machines)} (the first)")  # fmt: skip
    add("--node-ranks", type=positive, metavar="N",
        help="ranks of a node, the run's LOCAL_WORLD_SIZE (those of the machine; gb300: 72, a whole rack)")  # fmt: skip
    parser.take_megatron_flags("any flag of pretrain_gpt.py, instead of the file's: --global-batch-size 256")


def hardware_of(args: argparse.Namespace) -> Hardware:
    """The machine that is asked for, with nodes as the run has them."""
    if args.world_size > MAX_RANKS:
        raise UserError(f"--world-size must be at most {MAX_RANKS:,}, got {args.world_size}")
    hardware = HARDWARE[args.hardware]
    return hardware if args.node_ranks is None else replace(hardware, node_ranks=args.node_ranks)


def run(args: argparse.Namespace) -> int:
    """Plans, writes the figures as JSON where asked, and prints them."""
    hardware, model = hardware_of(args), None
    if not 0 < args.mfu <= 1:
        raise UserError(f"--mfu must be above 0 and at most 1, got {args.mfu:g}; {training_step.MFU:g} is usual")
    if args.config is not None:
        config, groups, model = read_config(args.config, args.world_size, hardware, args.flags)
        settings = settings_of(config, hardware)
    elif args.flags:
        raise UserError(f"--hf plans with the defaults of megatron_muon.Muon; leave {' '.join(args.flags)} out")
    else:
        settings, groups = read_transformers(args.hf, args.world_size, hardware)
    kinds, unmet = plan_kinds(groups, settings, hardware, args.world_size)
    figures = {**page.figures_of(kinds, args.world_size, settings, hardware), "notes": unmet}
    if model is not None and not hardware.processor:
        figures["memory"] = training_step.memory(model, config, figures["extra_bytes"], hardware)
        if model.global_batch is not None:
            figures["training_step"], warnings = training_step.simulate(
                model, figures, settings=settings, hardware=hardware, mfu=args.mfu
            )
            figures["notes"] += warnings
    write_json(args.json, figures)
    page.show(figures, str(args.config or args.hf), details=args.details)
    return 0


def read_config(config: Path, world_size: int, hardware: Hardware, flags: Sequence[str] = ()) -> Planned:
    """What is planned of an experiment file with other flags; leaves the CPU standing in for a GPU."""
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
    """The settings of a `MuonOptimizerConfig`, which `check_supported` has let pass, on a machine."""
    iteration = iteration_of(config)
    adaptive, cautious = config.optimizer == "adaptive_muon", config.muon_cautious_weight_decay
    exchanged = {"auto": "bf16" if iteration.half else "fp32"}
    return Settings(
        buffer_mb=config.muon_exchange_buffer_mb,
        exchange_dtype=exchanged.get(config.muon_exchange_dtype, config.muon_exchange_dtype),
        iteration=replace(iteration, products=hardware.products(half=iteration.half)),
        team_size="1" if needs_whole_updates(config) else config.muon_team_size,
        moment=moment_bytes(config.adaptive_muon_moment2_method if adaptive else None, cautious=cautious),
    )


def read_transformers(path: Path, world_size: int, hardware: Hardware) -> tuple[Settings, list[Group]]:
    """The matrices of the model that a `transformers` folder or config.json describes, by `fully_shard` over all ranks.

    The model is built on the meta device; nothing is downloaded. The settings are the defaults of `Muon`.

    Raises:
        UserError: transformers is not installed, or has no such model.
    """
    import numpy as np
    import torch
    from torch.distributed.tensor.placement_types import Shard

    from megatron_muon.fsdp import arguments
    from megatron_muon.fsdp.cuts import placed_shards
    from megatron_muon.fsdp.selection import select

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = shipped.find(path)
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"--hf needs transformers ({error}); {install('hf')}") from None
    if not path.exists():
        raise UserError(f"--hf {path}: there is no such folder or file; give a model's folder or its config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            automatic = transformers.AutoModelForCausalLM
            model = named(config) if named else automatic.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--hf {path}: transformers {transformers.__version__} cannot build it: {reason}") from None
    selection = select(model.named_parameters())
    shapes = {p: (p.shape[0], p.shape[1]) for group in selection.muon for p in group["params"]}
    cut = {shape: placed_shards(shape, np.arange(world_size), [Shard(0)]) for shape in set(shapes.values())}
    layout = Layout(world_size, tuple(Matrix(selection.names[p], shape, cut[shape]) for p, shape in shapes.items()))
    iteration = arguments.iteration_of()
    products = hardware.products(half=iteration.half)
    return Settings(None, "bf16", replace(iteration, products=products)), [Group("fully_shard", layout)]
