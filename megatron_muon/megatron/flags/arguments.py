"""The command line: megatron.training's parser with our flags, and the defaults that a run needs.

Defaults are written as flags in front of the user's, so the user's win and the list of them can be shown. This module
checks what can be checked before torch.distributed starts; it changes nothing in megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_muon.core.numbers import check_numbers, flag_of
from megatron_muon.errors import Reasons, UserError, install
from megatron_muon.megatron.flags import config_file, refusals
from megatron_muon.megatron.flags.path_checks import check_load, check_places, require_data
from megatron_muon.megatron.flags.refusals import MUONS, MuonRun
from megatron_muon.settings import TP_MODE, MuonSettings, RunSettings

MODEL_FLAGS = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--hybrid-layer-pattern",
    "--heterogeneous-layers-config-path",
    "--use-checkpoint-args",
    "--yaml-cfg",
)
"""Flags that say that the user brings a model of their own."""

TENSOR_PARALLEL = ("--tensor-model-parallel-size", "--expert-tensor-parallel-size")

TE = "transformer_engine"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of printing megatron-core's 500 flags and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong."""
        raise UserError(message)


def add_muon_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this package's flags to megatron.training's parser."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(RunSettings).build_group(parser, title="this package")
    ArgumentGroupFactory(MuonSettings).build_group(parser, title="muon under megatron-fsdp")
    allow_full_precision(parser)
    return parser


def allow_full_precision(parser: argparse.ArgumentParser) -> None:
    """Add "highest", torch's name for products in full fp32, to the choices of --muon-fp32-matmul-prec."""
    precision = parser._option_string_actions["--muon-fp32-matmul-prec"]
    precision.choices = list(dict.fromkeys([*(precision.choices or ()), "highest"]))


def build_parser() -> Parser:
    """megatron.training's parser with this package's flags, and help texts that argparse can format."""
    from megatron.training.arguments import add_megatron_arguments

    parser = Parser(prog="pretrain_gpt.py", allow_abbrev=False)
    add_megatron_arguments(parser)
    add_muon_arguments(parser)
    for action in parser._actions:  # one of 0.19 has a bare percent sign, which ended --help in a traceback
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; refuse an unknown flag, with the nearest known one, and a value that a flag does not take."""
    if {"--help", "-h"} & set(argv):  # argparse would print it and exit, here in the middle of another command
        raise UserError("--help takes no other command's place; type: python -m megatron_muon.pretrain_gpt --help")
    args, unknown = parser.parse_known_args(list(argv))
    config_file.refuse_unknown_flags(unknown, parser._option_string_actions)
    if unknown:
        raise UserError(f"unexpected argument {unknown[0]!r}: flags begin with --")
    return args


BY_PACKAGES = frozenset(
    f"--{name}"
    for name in (
        "no-gradient-accumulation-fusion",
        "transformer-impl",
        "no-persist-layer-norm",
        "no-masked-softmax-fusion",
        "no-rope-fusion",
    )
)
"""Of `missing_defaults` for "cuda": what a machine with Transformer Engine or Apex does not need."""


def missing_defaults(parser: argparse.ArgumentParser, argv: Sequence[str], *, device: str) -> list[str]:
    """The flags that a run on "cuda" or "cpu" needs and that `argv` does not settle, as they would be typed."""
    actions = parser._option_string_actions
    chosen = {actions[flag].dest for token in argv if (flag := token.split("=")[0]) in actions}
    wanted = [["--eval-interval", "1000"]]  # 0.19 has no default and divides by it
    if "use_megatron_fsdp" in chosen:
        wanted += [["--ckpt-format", "fsdp_dtensor"], ["--use-distributed-optimizer"]]
    if device == "cpu":
        wanted += [["--distributed-backend", "gloo"], ["--num-workers", "0"]]
    early = Parser(add_help=False, allow_abbrev=False)
    for flag in ("--muon-ns-device", "--optimizer", *TENSOR_PARALLEL):
        early.add_argument(flag)
    given = early.parse_known_args(list(argv))[0]
    sizes = [getattr(given, actions[flag].dest) for flag in TENSOR_PARALLEL]
    may_cut = "use_checkpoint_args" in chosen or any(size not in (None, "1") for size in sizes)
    if "use_megatron_fsdp" in chosen and given.optimizer in MUONS and may_cut:
        wanted.append(["--muon-tp-mode", TP_MODE])
    if (device == "cpu" or given.muon_ns_device == "cpu") and not cpu_has_bf16():
        wanted.append(["--muon-fp32-matmul-prec", "highest"])
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        # An extension of Apex. megatron-core's own output layer wants it, beside Transformer Engine too.
        wanted.append(["--no-gradient-accumulation-fusion"])
    if device == "cpu" or not has_transformer_engine():
        wanted.append(["--transformer-impl", "local"])
        if device == "cpu" or importlib.util.find_spec("apex") is None:
            # Fused kernels of Transformer Engine and Apex; megatron-core's plain implementations compute the same. The
            # fusion of bias and GELU needs neither, and computes GELU's tanh approximation, as without it nothing does.
            fused = ("persist-layer-norm", "masked-softmax-fusion", "rope-fusion")
            wanted += [[f"--no-{kernel}"] for kernel in fused]
    return [token for flag in wanted if actions[flag[0]].dest not in chosen for token in flag]


def cpu_has_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices in hardware; without it they take up to 800 times fp32's time."""
    import torch

    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if any(getattr(torch.cpu, name, lambda: False)() for name in names):
        return True
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return any(line.startswith("Features") and "bf16" in line.split() for line in lines)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_settings(
    args: argparse.Namespace,
    *,
    device: str,
    environ: Mapping[str, str] = os.environ,
    writes: bool = True,
    check_data: bool = True,
    elsewhere: bool = False,
) -> None:
    """Refuse what a user can get wrong, before torch.distributed starts; of several mistakes each in a line of its own.

    A run that `writes` needs its --load; one for `elsewhere` may find Transformer Engine there.
    """
    check_numbers(args)
    on_cpu = device == "cpu"
    te_here, te_asked = elsewhere or has_transformer_engine(), args.transformer_impl == TE
    one_connection = environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    reasons = Reasons()
    with reasons:
        check_parallelism(args, int(environ.get("WORLD_SIZE", "1")))
    with reasons:
        refuse_hybrid(args)
    with reasons:
        refusals.check(MuonRun(settings=args, model=args, ddp=args, on_cpu=on_cpu, has_model=False))
        if args.optimizer in MUONS and args.use_megatron_fsdp:
            check_places(args, first_rank=environ.get("RANK", "0") == "0")
    with reasons:
        if check_data:
            require_data(args)
    with reasons:
        if args.load and writes:
            check_load(args)
    start, end = args.profile_step_start, args.profile_step_end
    steps = f"--profile-step-start {start} --profile-step-end {end}"
    independent = (
        (
            args.use_pytorch_profiler and not args.profile,
            "--use-pytorch-profiler does nothing without --profile; add it, or leave both out",
        ),
        (
            args.profile and start >= end,
            f"{steps}: no step lies between them; the second number must be larger",
        ),
        (
            args.profile and args.train_iters is not None and end > args.train_iters,
            f"{steps}: a trace is written when step {end} begins, and --train-iters {args.train_iters} ends before; "
            "give earlier steps (`train`: --profile-steps FIRST:END), or train longer",
        ),
        (
            args.profile and args.use_pytorch_profiler and args.tensorboard_dir is None,
            "--use-pytorch-profiler writes its traces beside --tensorboard-dir; give that too, such as "
            "--tensorboard-dir runs/profiled/tensorboard",
        ),
        (
            args.profile and on_cpu and not args.use_pytorch_profiler,
            "--profile alone is for nsys, on a GPU; add --use-pytorch-profiler on a CPU",
        ),
        (
            args.wandb_project and not elsewhere and importlib.util.find_spec("wandb") is None,
            f"--wandb-project {args.wandb_project}: wandb is not installed; {install('wandb')}, or leave the flag out",
        ),
        (
            te_asked and not te_here,
            f"--transformer-impl {TE}: Transformer Engine is not installed; {install('te')} on a "
            "machine with a GPU, or use --transformer-impl local",
        ),
        (
            te_asked and te_here and on_cpu,
            f"--transformer-impl {TE} needs a GPU; use --transformer-impl local on a CPU",
        ),
        (
            args.use_megatron_fsdp and one_connection,
            "CUDA_DEVICE_MAX_CONNECTIONS=1 keeps Megatron-FSDP from overlapping; type: unset "
            "CUDA_DEVICE_MAX_CONNECTIONS",
        ),
        (
            args.async_save and on_cpu,
            "--async-save does not work on the CPU, where the saving process would share the tensors that training "
            "changes; leave it out, and --use-persistent-ckpt-worker too",
        ),
        (
            args.async_save and not on_cpu and not args.use_persistent_ckpt_worker,  # 0.19 would warn, and do so
            "--async-save does nothing without --use-persistent-ckpt-worker: megatron-core would save in the "
            "foreground; add that flag, or leave --async-save out",
        ),
        (
            args.save and args.save_interval is None,
            f"--save {args.save} needs --save-interval N: after how many iterations to save",
        ),
    )
    reasons.lines += [message for is_wrong, message in independent if is_wrong]
    reasons.tell()


def refuse_hybrid(args: argparse.Namespace) -> None:
    """Refuse layers of a HybridModel: a run builds a GPT, and would ignore them."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if pattern := getattr(args, name):
            raise UserError(
                f"{flag_of(name)} {pattern} makes a hybrid model, and a run builds only GPTs; leave it out "
                "(megatron-muon plan takes it)"
            )


def check_parallelism(args: argparse.Namespace, world_size: int) -> None:
    """Refuse parallel sizes that do not fit the number of ranks, or each other."""
    product = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        flag, size = flag_of(name), getattr(args, name)
        product *= size
        if product > world_size or world_size % product:
            raise UserError(
                f"{flag} {size} does not fit {world_size} rank{'s' * (world_size != 1)}: the product of tensor, "
                "pipeline and context parallel sizes must divide the number of ranks; start a multiple of "
                f"{product} ranks (torchrun --nproc-per-node) or lower {flag}"
            )
    if args.context_parallel_size > 1 and args.transformer_impl == "local":
        raise UserError(
            f"--context-parallel-size {args.context_parallel_size} needs Transformer Engine's attention, and a GPU; "
            f"use --transformer-impl {TE} there, or --context-parallel-size 1"
        )
    if args.use_megatron_fsdp and args.pipeline_model_parallel_size > 1:
        raise UserError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} does not work with "
            "--use-megatron-fsdp: Megatron-FSDP of megatron-core 0.19 builds its device mesh from all ranks; use 1"
        )
