"""The command line: megatron.training's parser with our flags, the defaults that a run needs, and rules of any run.

Defaults are written as flags in front of the user's, so the user's win and the list of them can be
shown. Rules of Muon are in `refusals`; what flags name on disk, data and the checkpoint to load, is
looked at here. Nothing here changes megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_muon.checkpoint.files import TRACKER
from megatron_muon.core.numbers import check_numbers, is_number
from megatron_muon.errors import UserError, install
from megatron_muon.megatron.data.corpus import check_vocabulary, read_head
from megatron_muon.megatron.flags.config_file import refuse_unknown_flags
from megatron_muon.megatron.flags.refusals import MUONS, MuonRun, Rules, muon_rules, refuse
from megatron_muon.settings import TP_MODE, LoadSettings, MuonSettings, RunSettings, word_as_flags

MODEL_FLAGS = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--hybrid-layer-pattern"),
    *("--heterogeneous-layers-config-path", "--use-checkpoint-args", "--yaml-cfg"),
)
"""Flags that say that the user brings a model of their own."""

NO_FUSED_GRADIENTS = "--no-gradient-accumulation-fusion"
NO_FUSION = tuple(
    f"--no-{kernel}" for kernel in ("persist-layer-norm", "masked-softmax-fusion", "rope-fusion")
)
"""Leave out kernels of Transformer Engine and Apex; megatron-core's plain implementations compute the same. The fusion
of bias and GELU needs neither, and computes GELU's tanh approximation, as without it nothing does."""
BY_PACKAGES = frozenset((NO_FUSED_GRADIENTS, "--transformer-impl", *NO_FUSION))
"""Of `missing_defaults` for "cuda": what a machine with Transformer Engine or Apex does not need."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of printing megatron-core's 500 flags and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong."""
        raise UserError(message)


def add_run_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that pretrain_gpt.py has and no other script."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(RunSettings).build_group(parser, title="this package")
    return parser


def add_muon_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that any script has, and "highest", torch's full fp32, to those of --muon-fp32-matmul-prec."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(LoadSettings).build_group(parser, title="loading under megatron-fsdp")
    ArgumentGroupFactory(MuonSettings).build_group(parser, title="muon under megatron-fsdp")
    precision = parser._option_string_actions["--muon-fp32-matmul-prec"]
    precision.choices = list(dict.fromkeys([*(precision.choices or ()), "highest"]))
    return parser


def build_parser() -> Parser:
    """megatron.training's parser with this package's flags, and help texts that argparse can format."""
    from megatron.training.arguments import add_megatron_arguments

    # `launch` shows help
    parser = Parser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    inspect.unwrap(add_megatron_arguments)(parser)
    add_muon_arguments(add_run_arguments(parser))
    # one of 0.19 has a bare percent sign, which ended --help in a traceback
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; refuse an unknown flag, with the nearest known one, and a value that a flag does not take."""
    args, unknown = parser.parse_known_args(list(argv))
    refuse_unknown_flags(unknown, parser._option_string_actions)
    return args


def missing_defaults(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, device: str
) -> list[str]:
    """The flags that a run on "cuda" or "cpu" needs and that `argv` does not settle, as they would be typed."""
    actions = parser._option_string_actions
    chosen = {actions[flag].dest for token in argv if (flag := token.split("=")[0]) in actions}
    given = parser.parse_known_args(list(argv))[0]
    sizes = (given.tensor_model_parallel_size, given.expert_tensor_parallel_size or 1)

    wanted = [["--eval-interval", "1000"]]  # 0.19 has no default and divides by it
    if "use_megatron_fsdp" in chosen:
        wanted += [["--ckpt-format", "fsdp_dtensor"], ["--use-distributed-optimizer"]]
    if device == "cpu":
        wanted += [["--distributed-backend", "gloo"], ["--num-workers", "0"]]
    if (
        "use_megatron_fsdp" in chosen
        and given.optimizer in MUONS
        and (given.use_checkpoint_args or sizes != (1, 1))
    ):
        wanted.append(["--muon-tp-mode", TP_MODE])
    if (device == "cpu" or given.muon_ns_device == "cpu") and not cpu_has_bf16():
        wanted.append(["--muon-fp32-matmul-prec", "highest"])
    # An extension of Apex. megatron-core's own output layer wants it, beside Transformer Engine
    # too.
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
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


@word_as_flags()
def check_settings(
    args: argparse.Namespace,
    *,
    device: str,
    writes: bool = True,
    check_data: bool = True,
    elsewhere: bool = False,
) -> None:
    """Refuse what a user can get wrong, before torch.distributed starts; of several mistakes each in a line of its own.

    A run that `writes` needs its --load; one for `elsewhere` may find Transformer Engine there.
    What megatron-core refuses by itself is not repeated: see `prepare.validate`.
    """
    check_numbers(args)
    on_cpu = device == "cpu"
    of_muon = muon_rules(MuonRun(values=args, on_cpu=on_cpu, has_model=False))
    refuse([*_of_run(args, on_cpu=on_cpu, elsewhere=elsewhere), *of_muon])
    if check_data:
        require_data(args)
    # else megatron-core 0.19 would train from scratch, after a line in the log
    if args.load and writes:
        folder = Path(args.load)
        # has none before its first start
        is_own = args.save and Path(args.save).resolve() == folder.resolve()
        if not ((folder / TRACKER).exists() or args.pretrained_checkpoint or is_own):
            none = f"--load {folder} holds no checkpoint, as it has no {TRACKER}"
            raise UserError(f"{none}; give a run's --save directory")


def _of_run(args: argparse.Namespace, *, on_cpu: bool, elsewhere: bool) -> Rules:
    """Flags of Megatron that do nothing, or something else, in a run."""
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern
    yield (
        pattern,
        (
            f"--hybrid-layer-pattern {pattern} makes a hybrid model, which a run does not train;"
            " leave it out"
        ),
    )
    torchs, first, end = args.use_pytorch_profiler, args.profile_step_start, args.profile_step_end
    written = args.profile and (args.tensorboard_dir if torchs else not on_cpu)
    yield (
        (args.profile or torchs) and not (written and first < end <= (args.train_iters or end)),
        (
            "no profile would be written: give --profile, --use-pytorch-profiler with"
            f" --tensorboard-dir (or nsys, on a GPU), and --profile-step-start, now {first}, below"
            f" --profile-step-end, now {end}, of at most --train-iters"
        ),
    )
    te = "--transformer-impl transformer_engine"
    missing = (
        f"{te} needs a GPU and Transformer Engine; {install('te')}, or use --transformer-impl local"
    )
    wanted = args.transformer_impl == "transformer_engine" and not elsewhere
    yield wanted and (on_cpu or not has_transformer_engine()), missing
    if not args.use_checkpoint_args:  # what megatron-core finds wrong in the first step alone
        heads, groups = args.num_attention_heads, args.num_query_groups
        uneven = (
            f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}; change"
            " one of them"
        )
        yield args.group_query_attention and heads and groups and heads % groups, uneven
        experts, top_k = args.num_experts, args.moe_router_topk
        yield (
            experts and top_k > experts,
            f"--moe-router-topk {top_k} is more than --num-experts {experts}; lower it",
        )
        is_fused = (
            args.bias_gelu_fusion and args.add_bias_linear and not (args.swiglu or args.quick_geglu)
        )
        not_there = (
            "no fused GELU for the experts of --num-experts; give --swiglu, or"
            " --no-bias-gelu-fusion"
        )
        yield experts and is_fused, not_there
    # The saving process would share the tensors that training changes.
    yield args.async_save and on_cpu, "--async-save does not work on the CPU; leave it out"
    # Megatron would save in the foreground, with a warning.
    alone = args.async_save and not args.use_persistent_ckpt_worker and not on_cpu
    yield alone, "--async-save needs --use-persistent-ckpt-worker; add it"


def require_data(args: argparse.Namespace) -> None:
    """Refuse missing or damaged data, and a split that leaves a set without documents."""
    if args.mock_data or args.skip_train:
        return
    prefixes = _prefixes(args)
    if not (prefixes or args.data_args_path or args.per_split_data_args_path):
        made = "(made by megatron-muon data prepare)"
        raise UserError(
            f"no training data: give --data-path PREFIX {made}, or --mock-data for random tokens"
        )
    for prefix in prefixes:
        read_head(prefix)
        if prefix in (args.data_path or ()):
            _check_split(prefix, args.split or "969, 30, 1", needs_validation=bool(args.eval_iters))


def check_vocabularies(args: argparse.Namespace) -> None:
    """Refuse data whose token ids are not of the vocabulary of a run, of which the tokenizer is built."""
    for prefix in _prefixes(args) if not (args.mock_data or args.skip_train) else ():
        if Path(prefix + ".bin").exists():
            check_vocabulary(prefix, args)


def _prefixes(args: argparse.Namespace) -> list[str]:
    """The prefixes of the data, without the weights of blends."""
    given = (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path)
    tokens = dict.fromkeys(token for paths in given for token in paths or ())
    return [token for token in tokens if not is_number(token)]


def _check_split(prefix: str, split: str, *, needs_validation: bool) -> None:
    """Refuse a set without documents: megatron-core 0.19 would count its epochs for ever, or leave training out."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    # Megatron ignores all other letters
    if not re.fullmatch(r"[\d.]+(,[\d.]+){,2}", split.replace(" ", "")):
        raise UserError(
            f"--split {split}: write three numbers, such as 98,2,0 for training, validation and"
            " test"
        )
    _, documents = read_head(prefix)
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, part in zip(("training", "validation", "test"), bounds, strict=True):
        needed = name == "training" or (name == "validation" and needs_validation)
        first, end = part or (0.0, 0.0)
        if (needed or part is not None) and round(first * documents) == round(end * documents):
            raise UserError(
                f"--split {split} leaves no document of {prefix} for {name}: it has {documents:,}"
                " in all; prepare more (a text file or a line of JSONL is one), or give --split"
                " 100,0,0 --eval-iters 0 to train on all"
            )
