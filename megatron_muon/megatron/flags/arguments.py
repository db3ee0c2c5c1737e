"""The command line: megatron.training's parser with our flags, the defaults that a run needs, and rules of any run.

Defaults are written as flags in front of the user's, so the user's win and the list of them can be shown. Rules of Muon
are in `refusals`. Nothing here changes megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_muon.core.numbers import check_numbers, flag_of
from megatron_muon.errors import UserError, install
from megatron_muon.megatron.flags import config_file, refusals
from megatron_muon.megatron.flags.path_checks import check_load, check_places, require_data
from megatron_muon.megatron.flags.refusals import MUONS, MuonRun, Rules
from megatron_muon.settings import TP_MODE, MuonSettings, RunSettings

MODEL_FLAGS = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--hybrid-layer-pattern"),
    *("--heterogeneous-layers-config-path", "--use-checkpoint-args", "--yaml-cfg"),
)
"""Flags that say that the user brings a model of their own."""

TENSOR_PARALLEL = ("--tensor-model-parallel-size", "--expert-tensor-parallel-size")
NO_FUSED_GRADIENTS = "--no-gradient-accumulation-fusion"
NO_FUSION = tuple(f"--no-{kernel}" for kernel in ("persist-layer-norm", "masked-softmax-fusion", "rope-fusion"))
"""Leave out kernels of Transformer Engine and Apex; megatron-core's plain implementations compute the same. The fusion
of bias and GELU needs neither, and computes GELU's tanh approximation, as without it nothing does."""
BY_PACKAGES = frozenset((NO_FUSED_GRADIENTS, "--transformer-impl", *NO_FUSION))
"""Of `missing_defaults` for "cuda": what a machine with Transformer Engine or Apex does not need."""

TE = "--transformer-impl transformer_engine"


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
    return args


def missing_defaults(parser: argparse.ArgumentParser, argv: Sequence[str], *, device: str) -> list[str]:
    """The flags that a run on "cuda" or "cpu" needs and that `argv` does not settle, as they would be typed."""
    actions = parser._option_string_actions
    chosen = {actions[flag].dest for token in argv if (flag := token.split("=")[0]) in actions}
    early = Parser(add_help=False, allow_abbrev=False)
    for flag in ("--muon-ns-device", "--optimizer", *TENSOR_PARALLEL):
        early.add_argument(flag)
    given = early.parse_known_args(list(argv))[0]
    sizes = [getattr(given, actions[flag].dest) for flag in TENSOR_PARALLEL]
    may_cut = "use_checkpoint_args" in chosen or any(size not in (None, "1") for size in sizes)

    wanted = [["--eval-interval", "1000"]]  # 0.19 has no default and divides by it
    if "use_megatron_fsdp" in chosen:
        wanted += [["--ckpt-format", "fsdp_dtensor"], ["--use-distributed-optimizer"]]
    if device == "cpu":
        wanted += [["--distributed-backend", "gloo"], ["--num-workers", "0"]]
    if "use_megatron_fsdp" in chosen and given.optimizer in MUONS and may_cut:
        wanted.append(["--muon-tp-mode", TP_MODE])
    if (device == "cpu" or given.muon_ns_device == "cpu") and not cpu_has_bf16():
        wanted.append(["--muon-fp32-matmul-prec", "highest"])
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        # An extension of Apex. megatron-core's own output layer wants it, beside Transformer Engine too.
        wanted.append([NO_FUSED_GRADIENTS])
    if device == "cpu" or not has_transformer_engine():
        wanted.append(["--transformer-impl", "local"])
        if device == "cpu" or importlib.util.find_spec("apex") is None:
            wanted += [[flag] for flag in NO_FUSION]
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

    def muon() -> None:
        refusals.check(MuonRun(settings=args, model=args, ddp=args, on_cpu=device == "cpu", has_model=False))
        if args.optimizer in MUONS and args.use_megatron_fsdp:
            check_places(args)

    world_size = int(environ.get("WORLD_SIZE", "1"))
    checks = [lambda: check_parallelism(args, world_size), lambda: refusals.apply(_of_models(args)), muon]
    if check_data:
        checks.append(lambda: require_data(args))
    if args.load and writes:
        checks.append(lambda: check_load(args))
    of_run = _of_run(args, on_cpu=device == "cpu", environ=environ, elsewhere=elsewhere)
    refusals.tell(*checks, lambda: refusals.apply(of_run))


def check_parallelism(args: argparse.Namespace, world_size: int) -> None:
    """Refuse parallel sizes that do not fit the number of ranks, or each other."""
    product = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        product *= getattr(args, name)
        if product > world_size or world_size % product:
            raise UserError(
                f"{flag_of(name)} {getattr(args, name)} does not fit {world_size} ranks, a multiple of the product of "
                f"tensor, pipeline and context parallel sizes; start a multiple of {product} (torchrun "
                "--nproc-per-node) or lower it"
            )
    refusals.apply(_of_parallelism(args))


def _of_parallelism(args: argparse.Namespace) -> Rules:
    context, pipeline = args.context_parallel_size, args.pipeline_model_parallel_size
    if context > 1 and args.transformer_impl == "local":
        yield f"--context-parallel-size {context} needs Transformer Engine's attention, and a GPU; use {TE}, or size 1"
    if args.use_megatron_fsdp and pipeline > 1:  # Megatron-FSDP of 0.19 builds its device mesh from all ranks
        yield f"--pipeline-model-parallel-size {pipeline} does not work with --use-megatron-fsdp; use 1"


def _of_models(args: argparse.Namespace) -> Rules:
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if pattern := getattr(args, name):
            yield f"{flag_of(name)} {pattern} makes a hybrid model, which `plan` takes and a run does not; leave it out"


def _of_run(args: argparse.Namespace, *, on_cpu: bool, environ: Mapping[str, str], elsewhere: bool) -> Rules:
    """Flags of Megatron that do nothing, or cannot be, in a run."""
    start, end, torchs = args.profile_step_start, args.profile_step_end, args.use_pytorch_profiler
    steps = f"--profile-step-start {start} --profile-step-end {end}"
    if torchs and not args.profile:
        yield "--use-pytorch-profiler does nothing without --profile; add it, or leave both out"
    if args.profile and start >= end:
        yield f"{steps}: no step lies between them; the second number must be larger"
    if args.profile and args.train_iters is not None and end > args.train_iters:
        late = f"{steps}: a trace is written when step {end} begins, and --train-iters {args.train_iters} ends before"
        yield f"{late}; give earlier steps (`train`: --profile-steps FIRST:END), or train longer"
    if args.profile and torchs and args.tensorboard_dir is None:
        yield "--use-pytorch-profiler writes its traces beside --tensorboard-dir; give that too"
    if args.profile and on_cpu and not torchs:
        yield "--profile alone is for nsys, on a GPU; add --use-pytorch-profiler on a CPU"
    if args.wandb_project and not elsewhere and importlib.util.find_spec("wandb") is None:
        yield f"--wandb-project {args.wandb_project}: wandb is not installed; {install('wandb')}, or leave the flag out"
    if args.transformer_impl == "transformer_engine":
        if not (elsewhere or has_transformer_engine()):
            yield f"{TE} is not installed; {install('te')} on a machine with a GPU, or use --transformer-impl local"
        elif on_cpu:
            yield f"{TE} needs a GPU; use --transformer-impl local on a CPU"
    if args.use_megatron_fsdp and environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        keeps = "CUDA_DEVICE_MAX_CONNECTIONS=1 keeps Megatron-FSDP from overlapping"
        yield f"{keeps}; type: unset CUDA_DEVICE_MAX_CONNECTIONS"
    if args.async_save and on_cpu:  # the saving process would share the tensors that training changes
        yield "--async-save does not work on the CPU; leave it out, and --use-persistent-ckpt-worker too"
    elif args.async_save and not args.use_persistent_ckpt_worker:  # 0.19 would warn, and save in the foreground
        yield "--async-save does nothing without --use-persistent-ckpt-worker; add that flag, or leave it out"
    if args.save and args.save_interval is None:
        yield f"--save {args.save} needs --save-interval N: after how many iterations to save"


def of_model(args: argparse.Namespace) -> Rules:
    """Sizes, completed by Megatron's validation, that megatron-core finds wrong in the first step alone."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    experts, top_k, width = args.num_experts, args.moe_router_topk, args.ffn_hidden_size
    if args.group_query_attention and heads % groups:
        yield f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; change one of them"
    if args.swiglu and width % 2:
        yield f"--ffn-hidden-size {width} is odd, and --swiglu pairs its columns; take an even one"
    if experts and top_k > experts:
        yield f"--moe-router-topk {top_k} is more than --num-experts {experts}; lower it"
    if experts and args.bias_gelu_fusion and not (args.swiglu or args.quick_geglu):
        yield "no fused GELU for the experts of --num-experts; give --swiglu, or --no-bias-gelu-fusion"
