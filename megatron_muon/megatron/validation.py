"""Megatron's own validation of a command line, before any rank is started.

megatron-core refuses settings by assertions on the way from flags to a training: in the validation of all flags, the
batch-size calculator, the configurations of model and optimizer, the scheduler, the tokenizer. None of them needs a
process group or a device. `check` goes that way on a copy of the arguments; `explained` turns what stops it into one
line, with the flags and values that the condition depends on.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import io
import linecache
import os
import re
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any

from megatron_muon.errors import Reasons, UserError, quiet_imports, reason_of
from megatron_muon.megatron.flags.refusals import MUONS
from megatron_muon.patching import Patches

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What validation takes for arguments that nobody gave."""

_OF_PACKAGES = re.compile(
    r"\binstall(ed|ation)?\b|\b(is_\w+_min_version|has_\w+_support|HAVE_\w+|get_device_capability)\b"
)
"""What a refusal says, or its condition asks, that depends on packages and device and not on settings."""

_FLAG_OF = {
    "max_lr": "lr",
    "init_lr": "lr_warmup_init",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "lr_decay_steps": "lr_decay_iters",
    "lr_warmup_steps": "lr_warmup_iters",
    "wsd_decay_steps": "lr_wsd_decay_iters",
    "num_moe_experts": "num_experts",
}
"""Names in megatron-core's conditions whose flag has another."""

_RANKS = {"world_size": "rank", "data_parallel_size": "data-parallel rank"}
_OURS = ("config", "device")
"""Names that mean something else in megatron-core than the flags of this package."""

_MOST_SHOWN = 6
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def check(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    *,
    world_size: int,
    elsewhere: list[str] | None = None,
    refused: Sequence[str] = (),
) -> argparse.Namespace:
    """Take a command line through everything by which megatron-core validates it; no process group, nothing written.

    A run with `--yaml-cfg`, whose settings are not those of the flags, is left to its start. For a run that starts
    `elsewhere` no tokenizer is looked for: package and files may be there, and a hub that cannot be reached is waited
    for a minute. That list then takes what packages of this machine refuse, which only the other machine can know.
    `args` stay as they are; returned are those that validation has completed, with the padded size of the vocabulary.

    Raises a UserError with the reasons of all parts that do not depend on each other, one a line, but for those that
    are about the same flags as lines of `refused`.
    """
    settled = copy.deepcopy(args)
    settled.rank, settled.world_size = 0, world_size
    settled._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    if args.yaml_cfg is not None:
        return settled
    if settled.save and settled.save_interval is None:
        settled.save_interval = 1  # refused by check_settings; what comes after it is told, too
    reasons = Reasons()

    def passes(*parts: Callable[[argparse.Namespace], object]) -> bool:
        """Whether nothing is refused by parts of which each needs the one before."""
        with reasons:
            try:
                with explained(settled, parser):
                    for part in parts:
                        part(settled)
                return True
            except UserError as error:
                if elsewhere is None or not _is_of_packages(error.__cause__):
                    raise
                elsewhere.append(f"not known here, and checked no further: {error}")
        return False

    with silent(), _as_in_training(args.use_megatron_fsdp and args.optimizer in MUONS):
        passes(_check_batches)
        is_valid = passes(_validate, _count_micro_batches)
        passes(functools.partial(_build_tokenizer, elsewhere=elsewhere is not None))
        if is_valid:
            passes(_schedule)
            if settled.padded_vocab_size is None:  # the rest of the model does not depend on it
                settled.padded_vocab_size = settled.make_vocab_size_divisible_by * settled.tensor_model_parallel_size
            passes(_check_heads, _build_model)
    if about := _subjects(refused):
        reasons.lines = [line for line in reasons.lines if (flags := _subjects([line])) and not flags & about]
    reasons.tell()
    return settled


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Validate in place what a model depends on, and nothing else: for a plan; a UserError where that is refused.

    The size of the vocabulary is the tokenizer's where there is one at hand, else that of `--vocab-size`. Where
    neither is known it is 1, unless buckets that are cut by size depend on it. `args` have `rank` and `world_size`.
    """
    with silent(), _as_in_training(True), explained(args, parser):
        _validate(args)
        if args.vocab_size is None or args.tokenizer_type == "NullTokenizer":
            try:
                _build_tokenizer(args)
            except UserError:
                if args.data_parallel_sharding_strategy != "optim_grads_params":
                    raise
        if args.padded_vocab_size is None and args.vocab_size is None:
            args.vocab_size = 1
        _check_heads(args)


def _subjects(lines: Sequence[str]) -> set[str]:
    return {name for line in lines for name in re.findall(r"--[a-z][a-z0-9-]+|[A-Z]+(?:_[A-Z]+)+", line)}


def _check_batches(args: argparse.Namespace) -> None:
    """Refuse what validation would refuse of evaluation's batches, which follow those of training."""
    if not (args.micro_batch_size and args.global_batch_size) or args.decrease_batch_size_if_needed:
        return
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas = max(1, args.world_size // model)
    given, least = args.global_batch_size, args.micro_batch_size * replicas
    if args.micro_batch_size > 0 and given % least:
        args.global_batch_size = least  # so that the reasons that come after it are told, too
        raise UserError(
            f"--global-batch-size {given} is not a multiple of {least}: --micro-batch-size {args.micro_batch_size} "
            f"times {replicas} data-parallel rank{'s' * (replicas != 1)}; change one of the two sizes, or the number "
            "of ranks"
        )


def _check_heads(args: argparse.Namespace) -> None:
    """What megatron-core finds out in the first step alone."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    if args.group_query_attention and heads % groups:
        raise UserError(
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; change one of them"
        )
    if args.swiglu and args.ffn_hidden_size % 2:
        raise UserError(
            f"--ffn-hidden-size {args.ffn_hidden_size} is odd, and --swiglu pairs its columns; take an even one"
        )
    experts, top_k = args.num_experts, args.moe_router_topk
    if experts and top_k > experts:
        raise UserError(f"--moe-router-topk {top_k} is more than --num-experts {experts}; lower it")
    if experts and args.bias_gelu_fusion and not (args.swiglu or args.quick_geglu):
        raise UserError(
            "megatron-core has no fused GELU for the experts of --num-experts; give --swiglu, or --no-bias-gelu-fusion"
        )


def _validate(args: argparse.Namespace) -> None:
    from megatron.training import arguments

    if args.use_checkpoint_args:
        from megatron.training.checkpointing import load_args_from_checkpoint

        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    kept = os.environ.pop(_CONNECTIONS, None) if args.use_megatron_fsdp else None  # check_settings has its say on it
    try:
        arguments.validate_args(args, DEFAULTS)
    finally:
        if kept is not None:
            os.environ[_CONNECTIONS] = kept


def _build_tokenizer(args: argparse.Namespace, *, elsewhere: bool = False) -> None:
    from megatron_muon.megatron.data.tokenizers import TOKENIZER_TYPES, TokenizerSpec, build_megatron, check_spec

    args.tokenizer_type = args.tokenizer_type or DEFAULTS["tokenizer_type"]
    if args.tokenizer_type in TOKENIZER_TYPES:
        check_spec(TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size))
    if not elsewhere:
        build_megatron(args)  # which pads the vocabulary, too


def _count_micro_batches(args: argparse.Namespace) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    calculator.init_num_microbatches_calculator(
        rank=args.rank,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size * args.gtp_weight_remat_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    calculator.unset_num_microbatches_calculator()


def _build_model(args: argparse.Namespace) -> None:
    """Make configs, and the model without memory as one of so many ranks, where its layers are megatron-core's own.

    Transformer Engine's need a GPU. Only a rank of the first pipeline stage could be built; Megatron-FSDP has no other.
    """
    import torch
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_muon.megatron.model import on_meta
    from megatron_muon.megatron.model.gpt import gpt_config

    pretrain_cfg_container_from_args(args, gpt_config(args))
    if args.transformer_impl != "local" or args.pipeline_model_parallel_size > 1 or torch.distributed.is_initialized():
        return
    with on_meta.process_groups(args) as groups:
        on_meta.build_model(args, groups)


def _schedule(args: argparse.Namespace) -> None:
    from megatron.training import global_vars, training

    if args.skip_train:
        return
    global_vars.set_args(args)
    try:
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))  # it sets rates of groups that it has
    finally:
        global_vars.set_args(None)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep to ourselves what megatron-core prints; a training prints it again."""
    with contextlib.redirect_stdout(io.StringIO()), quiet_imports():
        yield


@contextlib.contextmanager
def _as_in_training(muon_under_fsdp: bool) -> Iterator[None]:
    """What `patches.install` changes of the validation and the configurations, for a while.

    `--use-checkpoint-args` loads a part of the checkpoint, so validation trusts it no more than a training does.
    """
    from megatron_muon.megatron.checkpoint import loading
    from megatron_muon.megatron.patches import install as patches

    with Patches() as changes:
        loading.run_no_pickles(changes)
        loading.explain_unreadable(changes)
        if muon_under_fsdp:
            patches.accept_muon(changes)
            patches.accept_local_logits(changes)
            patches.use_factory(changes)
        yield


@contextlib.contextmanager
def explained(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turn what megatron-core raises into a UserError with the flags on which that depends, as `args` has them."""
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as refusal:
        raise UserError(_explanation(refusal, args, parser)) from refusal


def _is_of_packages(refusal: BaseException | None) -> bool:
    """Whether megatron-core stopped for what is installed here, or for this machine's device."""
    if refusal is None or isinstance(refusal, ImportError) or isinstance(refusal.__cause__, ImportError):
        return refusal is not None
    statement, conditions = next(_statements(refusal.__traceback__), (ast.Pass(), []))
    test = statement.test if isinstance(statement, ast.Assert) else statement
    return bool(_OF_PACKAGES.search(" ".join([str(refusal), *_names(test), *conditions])))


def _explanation(refusal: BaseException, args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Why megatron-core stopped; many assertions carry no message, the condition that does not hold says it then."""
    reason = " ".join((reason_of(refusal) if hasattr(refusal, "failures") else str(refusal)).split())
    flags: dict[str, str] = {}
    for number, (statement, conditions) in enumerate(_statements(refusal.__traceback__)):
        if number:  # whoever calls a helper knows what it was called with
            flags = _flags(_names(statement), args, parser, among=re.findall(r"[\d.]+", reason))
        elif isinstance(statement, ast.Assert):
            reason = reason or re.sub(r"\b(args|self|config)\.", "", ast.unparse(statement.test))
            flags = _flags([*_names(statement.test), *conditions], args, parser)
        else:
            nearest = conditions if isinstance(statement, ast.Raise) else []
            flags = _flags([*_names(statement), *nearest], args, parser)
        if flags:
            break
    if not isinstance(refusal, (AssertionError, ValueError, RuntimeError)) and type(refusal) is not Exception:
        reason = f"{type(refusal).__name__}: {reason}"
    flags |= _flags(re.findall(r"[a-z][a-z0-9_]{2,}", reason.replace("-", "_")), args, parser)
    given = f"; given: {', '.join(list(flags.values())[:_MOST_SHOWN])}" if flags else ""
    return f"megatron-core refuses these settings: {reason}{given}"


def _statements(trace: TracebackType | None) -> Iterator[tuple[ast.stmt, list[str]]]:
    """The statements of Megatron that were running, innermost first, each with the names in its nearest condition."""
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        if frame.f_globals.get("__name__", "").startswith("megatron."):
            nodes = ast.walk(ast.parse("".join(linecache.getlines(frame.f_code.co_filename))))  # outer before inner
            path = [
                node for node in nodes if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
            ]
            tests = [_names(node.test) for node in path[:-1] if isinstance(node, (ast.If, ast.While))]
            if path:
                yield path[-1], (tests or [[]])[-1]


def _names(node: ast.AST) -> list[str]:
    """Names of variables and attributes in an expression or a simple statement."""
    if hasattr(node, "body") and isinstance(node, ast.stmt):
        return []
    parts = [part for part in ast.walk(node) if isinstance(part, (ast.Attribute, ast.Name))]
    return [part.attr if isinstance(part, ast.Attribute) else part.id for part in parts]


def _flags(
    names: Iterable[str],
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    *,
    among: Container[str] | None = None,
) -> dict[str, str]:
    """By name: the flag with its value, as it would be typed, or that it is not given; only values `among` some."""
    shown = {}
    for name in dict.fromkeys(_FLAG_OF.get(name, name) for name in names):
        value = getattr(args, name, None)
        if name in _OURS or (among is not None and str(value) not in among):
            continue
        if name in _RANKS and value is not None and among is None:
            shown[name] = f"{value} {_RANKS[name]}{'s' * (value != 1)}"
        elif actions := [action for action in parser._actions if action.dest == name and action.option_strings]:
            shown[name] = _typed(actions, value)
    return shown


def _typed(actions: list[argparse.Action], value: Any) -> str:
    flags = [next(option for option in action.option_strings if option.startswith("--")) for action in actions]
    for action, flag in zip(actions, flags, strict=True):
        if value is not None and action.nargs == 0 and value == (True if action.const is None else action.const):
            return flag
    if value is None or actions[0].nargs == 0:
        return f"no {flags[0]}"
    return f"{flags[0]} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
