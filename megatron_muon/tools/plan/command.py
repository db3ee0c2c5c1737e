"""`megatron-muon plan`: makes the plan of a run on paper, and says whether it fits, and how long a step may take."""

from __future__ import annotations

import argparse
import gc
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_muon import shipped
from megatron_muon.core.cost import AUTO, Iteration
from megatron_muon.core.layout import MAX_RANKS, Layout, Matrix
from megatron_muon.core.memory import moment_bytes
from megatron_muon.core.numbers import check_number
from megatron_muon.errors import UserError, install, quiet_imports
from megatron_muon.megatron.flags.refusals import needs_whole_updates
from megatron_muon.megatron.layout_file import read_captured
from megatron_muon.settings import TEAM_SIZES, MuonSettings
from megatron_muon.tools.parser import positive, write_json
from megatron_muon.tools.plan import page, training_step
from megatron_muon.tools.plan.estimate import HARDWARE, Group, Hardware, Settings, plan_kinds
from megatron_muon.tools.plan.training_step import Planned

EXAMPLES = """\
examples:
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64
  megatron-muon plan --config configs/moe-large.yaml --world-size 4096 --hardware gb300 --details --json plan.json
  megatron-muon plan --hf configs/transformers/llama3-8b.json --world-size 64   (FSDP2, for megatron_muon.Muon)
  megatron-muon plan --layout layout.json   (of a run with --muon-dump-layout)
"""

DESCRIPTION = """\
Plan a run with Muon on paper: whether it fits a GPU, how long a step may take, who orthogonalises what.

With --config, memory and a training step of the config's batch (or --tokens) on GPUs come first, with Adam and with
Muon. Times are arithmetic on the hardware profile. They rank configurations; python -m benchmarks.train measures.
"""

_FIELDS = {
    "buffer_mb": "muon_exchange_buffer_mb",
    "exchange_dtype": "muon_exchange_dtype",
    "team_size": "muon_team_size",
    "ns": "muon_ns",
    "ns_dtype": "muon_fp32_matmul_prec",
}
"""The settings of a run that flags of this command replace."""
_PRECISIONS = {"bf16": "medium", "fp32": "highest"}
"""--muon-fp32-matmul-prec, by --ns-dtype."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon plan`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.yaml", help="experiment file; its model and parallel flags count")
    add("--world-size", type=int, metavar="N", help="ranks of the run; needed with --config and --hf")
    add("--hf", type=Path, metavar="MODEL",
        help="a transformers folder or config.json, under FSDP2 over all ranks with megatron_muon.Muon")  # fmt: skip
    add("--layout", type=Path, metavar="FILE.json", help="a captured layout instead of a model")
    add("--details", action="store_true", help="also show groups of ranks, the parts of a step, and all assumptions")
    add("--buffer-mb", type=float, metavar="MIB",
        help="what a step may take on a rank (the config's --muon-exchange-buffer-mb)")  # fmt: skip
    add("--exchange-dtype", choices=("auto", "fp32", "bf16"),
        help="what travels; auto: as Newton-Schulz starts (the config's --muon-exchange-dtype, or auto)")  # fmt: skip
    add("--team-size", choices=TEAM_SIZES,
        help="ranks that own a matrix together (the config's --muon-team-size, or auto)")  # fmt: skip
    add("--ns", choices=("auto", "standard", "gram"), help="the iteration (the config's --muon-ns, or auto)")
    add("--ns-dtype", choices=tuple(_PRECISIONS),
        help="its precision (the config's --muon-fp32-matmul-prec: bf16 for medium and without it)")  # fmt: skip
    add_machine(parser, tuple(HARDWARE))
    add("--tokens", type=positive, metavar="N",
        help="of a training step (the config's --global-batch-size times --seq-length)")  # fmt: skip
    add("--mfu", type=float, default=training_step.MFU, metavar="SHARE",
        help=f"of the peak rate, that model FLOPs of forward and backward reach ({training_step.MFU:g})")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def add_machine(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Adds the flags that `hardware_of` reads."""
    parser.add_argument("--hardware", choices=names, default=names[0], metavar="NAME",
        help=f"machine to estimate for: {', '.join(names)} (the first)")  # fmt: skip
    parser.add_argument("--node-ranks", type=positive, metavar="N",
        help="ranks of a node, the run's LOCAL_WORLD_SIZE (those of the machine; gb300: 72, a whole rack)")  # fmt: skip


def hardware_of(args: argparse.Namespace) -> Hardware:
    """The machine that is asked for, with nodes as the run has them."""
    hardware = HARDWARE[args.hardware]
    return hardware if args.node_ranks is None else replace(hardware, node_ranks=args.node_ranks)


def run(args: argparse.Namespace) -> int:
    """Plans, writes the figures as JSON where asked, and prints them."""
    hardware = hardware_of(args)
    _check_training_step(args, hardware)
    planned = _read(args)
    model, world_size = planned.model, args.world_size or planned.groups[0].layout.world_size
    try:
        settings = settings_of(_override(planned.settings, args), hardware)
        kinds, unmet = plan_kinds(planned.groups, settings, hardware, world_size, alone=bool(args.team_size))
    except UserError as error:
        raise UserError(_as_typed(str(error), args)) from None
    figures = {**page.figures_of(kinds, world_size, settings, hardware), "unmet": unmet}
    if model is not None and not hardware.processor:
        figures["memory"] = training_step.memory(model, planned.settings, figures["extra_bytes_max"], hardware)
        if (tokens := args.tokens or model.tokens) is not None:
            figures["training_step"] = training_step.simulate(
                model,
                tokens,
                world_size=world_size,
                muon_step_ms=figures["estimated_ms"]["step"],
                imbalance=figures["ns_load"]["max_over_mean"],
                settings=settings,
                hardware=hardware,
                mfu=args.mfu,
            )
    write_json(args.json, figures)
    page.show(figures, str(args.config or args.hf or args.layout), hardware, details=args.details)
    return 0


def _check_training_step(args: argparse.Namespace, hardware: Hardware) -> None:
    if not 0 < args.mfu <= 1:
        raise UserError(f"--mfu must be above 0 and at most 1, got {args.mfu:g}; {training_step.MFU:g} is usual")
    if args.tokens is not None and args.config is None:
        raise UserError(f"--tokens {args.tokens} needs --config FILE.yaml, which says what the whole model computes")
    if args.tokens is not None and hardware.processor:
        raise UserError(
            f"--tokens {args.tokens} with --hardware {hardware.name}: training steps are estimated for GPUs alone; "
            "measure with python -m benchmarks.train"
        )


def _read(args: argparse.Namespace) -> Planned:
    if [args.config, args.hf, args.layout].count(None) != 2:
        raise UserError("give --config FILE.yaml or --hf MODEL, with --world-size N, or --layout FILE.json")
    if args.layout is not None:
        layout, of_world = read_captured(args.layout)
        if args.world_size not in (None, layout.world_size):
            raise UserError(
                f"{args.layout} holds a layout of {layout.world_size} ranks, not {args.world_size}; leave --world-size "
                "out"
            )
        if not layout.matrices:
            raise UserError(f"{args.layout} holds no matrices")
        return Planned(MuonSettings(), [Group("layout", layout, ranks=of_world)], None)
    if args.world_size is None:
        source = f"--config {args.config}" if args.config else f"--hf {args.hf}"
        raise UserError(f"how many ranks? add --world-size, as in {source} --world-size 64")
    if not 1 <= args.world_size <= MAX_RANKS:
        raise UserError(f"--world-size must be at least 1 and at most {MAX_RANKS:,}, got {args.world_size}")
    if args.hf is not None:
        return read_transformers(args.hf, args.world_size)
    return read_config(args.config, args.world_size, HARDWARE[args.hardware])


def read_config(config: Path, world_size: int, hardware: Hardware) -> Planned:
    """What is planned of an experiment file; leaves the CPU standing in for a GPU."""
    shipped.require(config)
    gc.disable()  # to look again and again through what imports make takes it half a second
    try:
        with quiet_imports():
            from megatron_muon import cpu

            cpu.install(force=True)
            from megatron_muon.tools.plan.matrices import read_model
        return read_model(config, world_size, device="cpu" if hardware.processor else "cuda")
    finally:
        gc.enable()


def read_transformers(path: Path, world_size: int) -> Planned:
    """The matrices of the model that a `transformers` folder or config.json describes, by `fully_shard` over all ranks.

    The model is built on the meta device; nothing is downloaded. The settings are the defaults of `Muon`.

    Raises:
        UserError: transformers is not installed, or has no such model.
    """
    import numpy as np
    import torch
    from torch.distributed.tensor.placement_types import Shard

    from megatron_muon.fsdp.arguments import iteration_of
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
    parameters = [p for group in selection.muon for p in group["params"]]
    shapes = {p: (p.shape[0], p.shape[1]) for p in parameters}
    cut = {shape: placed_shards(shape, np.arange(world_size), [Shard(0)]) for shape in set(shapes.values())}
    layout = Layout(world_size, tuple(Matrix(selection.names[p], shape, cut[shape]) for p, shape in shapes.items()))
    settings, iteration = MuonSettings(), iteration_of()
    vars(settings).update(muon_coefficient_type=iteration.coefficient_type, muon_num_ns_steps=iteration.steps)
    return Planned(settings, [Group("fully_shard", layout)], None)


def _override(config: Any, args: argparse.Namespace) -> Any:
    for name, field in _FIELDS.items():
        if (value := getattr(args, name)) is not None:
            setattr(config, field, _PRECISIONS.get(value, value) if name == "ns_dtype" else value)
    return config


def _as_typed(text: str, args: argparse.Namespace) -> str:
    """An error with this command's flags in the place of the run's, where they were typed."""
    for name, field in _FIELDS.items():
        if name != "ns_dtype" and getattr(args, name) is not None:  # its values are other words
            text = re.sub(rf"--{field.replace('_', '-')}(?![a-z-])", f"--{name.replace('_', '-')}", text)
    return text


def settings_of(config: Any, hardware: Hardware) -> Settings:
    """A run's settings on a machine; `MuonSettings` alone lacks those that `OptimizerConfig` has."""
    if config.muon_exchange_buffer_mb is not None:
        check_number("muon_exchange_buffer_mb", config.muon_exchange_buffer_mb)
    iteration = Iteration(
        getattr(config, "muon_coefficient_type", Iteration.coefficient_type),
        getattr(config, "muon_num_ns_steps", Iteration.steps),
        getattr(config, "muon_fp32_matmul_prec", "medium"),
        config.muon_ns,
    )
    iteration.check()
    half, size = iteration.half, config.muon_team_size
    if hasattr(config, "optimizer") and needs_whole_updates(config):
        if size not in (AUTO, "1"):
            raise UserError(f"--muon-team-size {size}: NorMuon has no teams; use 1, or leave it out")
        size = "1"
    adaptive = getattr(config, "optimizer", "muon") == "adaptive_muon"
    cautious = config.muon_cautious_weight_decay
    return Settings(
        buffer_mb=config.muon_exchange_buffer_mb,
        exchange_dtype={"auto": "bf16" if half else "fp32"}.get(config.muon_exchange_dtype, config.muon_exchange_dtype),
        iteration=replace(iteration, products=hardware.products(half=half)),
        team_size=size,
        looks_ahead=getattr(config, "muon_nesterov", True),
        moment=moment_bytes(config.adaptive_muon_moment2_method if adaptive else None, cautious=cautious),
        cautious=cautious,
        hyperball=config.muon_hyperball,
    )
