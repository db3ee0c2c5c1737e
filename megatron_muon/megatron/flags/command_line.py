"""The command line: megatron.training's parser with our flags, and the defaults that a run needs.

Defaults are written as flags in front of the user's, so the user's win and the defaults can be
shown. `refusals` has the rules for flags; the files that flags name, data and the checkpoint to
load, are checked here. Nothing here changes megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_muon.checkpoint.folders import TRACKER
from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import check_vocabulary, read_head
from megatron_muon.megatron.flags.config_file import refuse_unknown_flags
from megatron_muon.megatron.flags.named_optimizer import MUONS, is_class, settle_matrix_optimizer
from megatron_muon.megatron.flags.refusals import CheckedRun, check, has_transformer_engine
from megatron_muon.ranges import check_numbers, is_number
from megatron_muon.settings import TP_MODE, LoadSettings, MuonSettings, RunSettings, word_as_flags

MODEL_FLAGS = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--hybrid-layer-pattern",
    "--heterogeneous-layers-config-path",
    "--use-checkpoint-args",
    "--yaml-cfg",
)
"""Flags that define a model; without one of them a run takes the quickstart's."""

NO_FUSED_GRADIENTS = "--no-gradient-accumulation-fusion"
NO_FUSION = ("--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-rope-fusion")
"""Turn off kernels of Transformer Engine and Apex; megatron-core's plain implementations compute
the same. The fusion of bias and GELU needs neither, and only it computes GELU's tanh approximation.
"""


class Parser(argparse.ArgumentParser):
    """Raises UserError instead of printing megatron-core's 500 flags and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message."""
        raise UserError(message)


def add_run_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that pretrain_gpt.py has and no other script."""
    from megatron_muon.megatron.upstream import ArgumentGroupFactory

    ArgumentGroupFactory(RunSettings).build_group(parser, title="this package")
    return parser


def add_muon_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags for any script, and "highest", full fp32, to --muon-fp32-matmul-prec."""
    from megatron_muon.megatron.upstream import ArgumentGroupFactory

    ArgumentGroupFactory(LoadSettings).build_group(parser, title="loading under megatron-fsdp")
    ArgumentGroupFactory(MuonSettings).build_group(parser, title="muon under megatron-fsdp")
    precision = parser._option_string_actions["--muon-fp32-matmul-prec"]
    precision.choices = list(dict.fromkeys([*(precision.choices or ()), "highest"]))
    return parser


def build_parser() -> Parser:
    """megatron.training's parser with this package's flags, and help that argparse can format."""
    from megatron_muon.megatron.upstream import add_megatron_arguments

    # `launch` prints the help.
    parser = Parser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    inspect.unwrap(add_megatron_arguments)(parser)
    add_muon_arguments(add_run_arguments(parser))
    # One help text of 0.19 has a bare percent sign, which ended --help in a traceback.
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; refuse an unknown flag, naming the nearest known one, and an invalid value."""
    args, unknown = parser.parse_known_args(list(argv))
    refuse_unknown_flags(unknown, parser._option_string_actions)
    settle_matrix_optimizer(args)
    return args


def missing_defaults(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, device: str
) -> list[str]:
    """The flags that a run on "cuda" or "cpu" needs and `argv` does not set, as typed."""
    actions = parser._option_string_actions
    flags = [token.partition("=")[0] for token in argv]
    chosen = {actions[flag].dest for flag in flags if flag in actions}
    given = parser.parse_known_args(list(argv))[0]
    on_cpu = device == "cpu"
    has_class = bool(given.matrix_optimizer) or is_class(given.optimizer)
    wanted = ["--eval-interval 1000"]  # 0.19 has no default and divides by it
    if "use_megatron_fsdp" in chosen:
        wanted += ["--ckpt-format fsdp_dtensor", "--use-distributed-optimizer"]
        is_tp = given.tensor_model_parallel_size > 1 or (given.expert_tensor_parallel_size or 1) > 1
        if (has_class or given.optimizer in MUONS) and (given.use_checkpoint_args or is_tp):
            wanted.append(f"--muon-tp-mode {TP_MODE}")
    if on_cpu:
        wanted += ["--distributed-backend gloo", "--num-workers 0"]
    is_slow = (on_cpu or given.muon_ns_device == "cpu") and not cpu_has_bf16()
    if is_slow and not has_class:
        wanted.append("--muon-fp32-matmul-prec highest")
    # An extension of Apex. megatron-core's own output layer needs it even with Transformer Engine.
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        wanted.append(NO_FUSED_GRADIENTS)
    if on_cpu or not has_transformer_engine():
        wanted.append("--transformer-impl local")
        if on_cpu or importlib.util.find_spec("apex") is None:
            wanted += NO_FUSION
    lines = [line.split() for line in wanted]
    return [word for line in lines if actions[line[0]].dest not in chosen for word in line]


def cpu_has_bf16() -> bool:
    """True if this CPU multiplies bf16 matrices in hardware; else they take 800 times as long."""
    import torch

    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if any(getattr(torch.cpu, name, lambda: False)() for name in names):
        return True
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return any(line.startswith("Features") and "bf16" in line.split() for line in lines)


@word_as_flags()
def check_settings(
    args: argparse.Namespace,
    *,
    device: str,
    writes: bool = True,
    check_data: bool = True,
) -> None:
    """Refuse mistakes before torch.distributed starts, one per line.

    A run that `writes` needs its --load.
    What megatron-core refuses by itself is not repeated: see `prepare.validate`.
    """
    check_numbers(args)
    check(CheckedRun(args, on_cpu=device == "cpu"), is_training=True)
    if args.use_megatron_fsdp and is_class(args.optimizer):
        from megatron_muon.core.methods.rehearsal import approve
        from megatron_muon.megatron.matrix_optimizer import candidate_of

        approve(candidate_of(args))
    if check_data:
        require_data(args)
    if args.load and writes:
        _require_checkpoint(args)


def _require_checkpoint(args: argparse.Namespace) -> None:
    """Refuse a --load without checkpoint, with which megatron-core 0.19 trains from scratch."""
    folder = Path(args.load)
    # A run's own folder has none before its first start.
    is_own = args.save and Path(args.save).resolve() == folder.resolve()
    if not ((folder / TRACKER).exists() or args.pretrained_checkpoint or is_own):
        raise UserError(
            f"--load {folder} has no checkpoint: {TRACKER} is missing; give a run's --save"
            " directory"
        )


def require_data(args: argparse.Namespace) -> None:
    """Refuse missing or damaged data, and a split that leaves a set without documents."""
    if args.mock_data or args.skip_train:
        return
    prefixes = _prefixes(args)
    if not (prefixes or args.data_args_path or args.per_split_data_args_path):
        raise UserError(
            "no training data: give --data-path PREFIX (made by megatron-muon data prepare), or"
            " --mock-data for random tokens"
        )
    for prefix in prefixes:
        read_head(prefix)
        if prefix in (args.data_path or ()):
            _check_split(prefix, args.split or "969, 30, 1", needs_validation=bool(args.eval_iters))


def check_vocabularies(args: argparse.Namespace) -> None:
    """Refuse data whose token ids do not fit the vocabulary of the run's tokenizer."""
    if args.mock_data or args.skip_train:
        return
    for prefix in _prefixes(args):
        if Path(prefix + ".bin").exists():
            check_vocabulary(prefix, args)


def _prefixes(args: argparse.Namespace) -> list[str]:
    """The prefixes of the data, without the weights of blends."""
    flags = (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path)
    words = [word for paths in flags for word in paths or ()]
    return [word for word in dict.fromkeys(words) if not is_number(word)]


def _check_split(prefix: str, split: str, *, needs_validation: bool) -> None:
    """Refuse a set without documents.

    megatron-core 0.19 would count its epochs for ever, or skip training.
    """
    from megatron_muon.megatron.upstream import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    # Megatron ignores all other characters.
    if not re.fullmatch(r"[\d.]+(,[\d.]+){,2}", split.replace(" ", "")):
        raise UserError(
            f"--split {split}: write three numbers, such as 98,2,0 for training, validation and"
            " test"
        )
    _, documents = read_head(prefix)
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    needed = {"training": True, "validation": needs_validation, "test": False}
    for name, part in zip(needed, bounds, strict=True):
        first, end = part or (0.0, 0.0)
        is_empty = round(first * documents) == round(end * documents)
        if is_empty and (needed[name] or part is not None):
            raise UserError(
                f"--split {split} leaves no document of {prefix} for {name}: it has {documents:,}"
                " in all; prepare more (a text file or a line of JSONL is one), or give --split"
                " 100,0,0 --eval-iters 0 to train on all"
            )
