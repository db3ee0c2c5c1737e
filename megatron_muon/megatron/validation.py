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
import inspect
import io
import os
import re
import textwrap
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any

from megatron_muon.errors import Reasons, UserError, reason_of
from megatron_muon.patching import Patches
from megatron_muon.quiet import quiet_imports

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What validation takes for arguments that nobody gave."""

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
    muon_under_fsdp: bool,
    elsewhere: bool = False,
    refused: Sequence[str] = (),
) -> argparse.Namespace:
    """Take a command line through everything by which megatron-core validates it; no process group, nothing written.

    A run with `--yaml-cfg`, whose settings are not those of the flags, is left to its start.

    Args:
        args: parsed by `parser`; left as they are.
        parser: knows the flags.
        world_size: number of ranks.
        muon_under_fsdp: this package's factory makes the optimizer.
        elsewhere: the run is for another machine, where a tokenizer's package and files may be.
        refused: what is refused already; reasons that are about the same flags are not repeated.

    Returns:
        The arguments as validation has completed them, with the padded size of the vocabulary.

    Raises:
        UserError: the reasons of all parts that do not depend on each other, one a line.
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
        before = len(reasons.lines)
        for part in parts:
            with reasons, explained(settled, parser):
                part(settled)
            if len(reasons.lines) > before:
                return False
        return True

    with silent(), _as_in_training(muon_under_fsdp):
        passes(_check_batches)
        is_valid = passes(_validate, _count_micro_batches)
        passes(_build_tokenizer_elsewhere if elsewhere else _build_tokenizer)
        if is_valid:
            passes(_schedule)
            if settled.padded_vocab_size is None:  # the rest of the model does not depend on it
                settled.padded_vocab_size = settled.make_vocab_size_divisible_by * settled.tensor_model_parallel_size
            passes(_check_heads, _build_model)
    if refused:
        about = _subjects(refused)
        reasons.lines = [line for line in reasons.lines if (flags := _subjects([line])) and not flags & about]
    reasons.tell()
    return settled


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Validate in place what a model depends on, and nothing else: for a plan.

    The size of the vocabulary is the tokenizer's where there is one at hand, else that of `--vocab-size`. Where
    neither is known it is 1, unless buckets that are cut by size depend on it. `args` have `rank` and `world_size`.

    Raises:
        UserError: what megatron-core refuses.
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
    """Flags and environment variables."""
    return {name for line in lines for name in re.findall(r"--[a-z][a-z0-9-]+|[A-Z]+(?:_[A-Z]+)+", line)}


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


def _explanation(refusal: BaseException, args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Why megatron-core stopped; many assertions carry no message, the condition that does not hold says it then."""
    reason = " ".join((reason_of(refusal) if hasattr(refusal, "failures") else str(refusal)).split())
    flags: dict[str, str] = {}
    for number, (statement, conditions) in enumerate(_statements(refusal.__traceback__)):
        if number == 0:
            if isinstance(statement, ast.Assert):
                reason = reason or re.sub(r"\b(args|self|config)\.", "", ast.unparse(statement.test))
            nearest = conditions[:1] if isinstance(statement, (ast.Assert, ast.Raise)) else []
            flags = _flags([name for node in (statement, *nearest) for name in _names(node)], args, parser)
        else:  # whoever calls a helper knows what it was called with
            flags = _flags(_names(statement), args, parser, among=re.findall(r"[\d.]+", reason))
        if flags:
            break
    if not isinstance(refusal, (AssertionError, ValueError, RuntimeError)) and type(refusal) is not Exception:
        reason = f"{type(refusal).__name__}: {reason}"
    flags |= _flags(re.findall(r"[a-z][a-z0-9_]{2,}", reason.replace("-", "_")), args, parser)
    given = f"; given: {', '.join(list(flags.values())[:_MOST_SHOWN])}" if flags else ""
    return f"megatron-core refuses these settings: {reason}{given}"


def _check_batches(args: argparse.Namespace) -> None:
    """Refuse what validation would refuse of evaluation's batches, which follow those of training; mend it after."""
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
    if args.group_query_attention and args.num_attention_heads % args.num_query_groups:
        raise UserError(
            f"--num-attention-heads {args.num_attention_heads} is not a multiple of --num-query-groups "
            f"{args.num_query_groups}; change one of them"
        )
    if args.num_experts and args.moe_router_topk > args.num_experts:
        raise UserError(
            f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts}; lower it"
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


def _build_tokenizer(args: argparse.Namespace) -> None:
    from megatron_muon.data.tokenizers import build_megatron

    args.tokenizer_type = args.tokenizer_type or DEFAULTS["tokenizer_type"]
    build_megatron(args)  # which pads the vocabulary, too


def _build_tokenizer_elsewhere(args: argparse.Namespace) -> None:
    from megatron_muon.data.tokenizers import TOKENIZER_TYPES, TokenizerSpec, check_spec

    if args.tokenizer_type in TOKENIZER_TYPES:
        check_spec(TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size))
    with contextlib.suppress(UserError):
        _build_tokenizer(args)


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
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_muon.megatron.model import on_meta

    pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
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
            patches.use_factory(changes)
        yield


def _statements(trace: TracebackType | None) -> Iterator[tuple[ast.stmt, list[ast.expr]]]:
    """The statements that were running, innermost first, each with the conditions under which it runs, nearest first.

    Only functions of Megatron whose source is there.
    """
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        if not frame.f_globals.get("__name__", "").startswith("megatron."):
            continue
        with contextlib.suppress(OSError, SyntaxError, TypeError):
            lines, first = inspect.getsourcelines(frame.f_code)
            line -= max(first, 1) - 1
            tree = ast.walk(ast.parse(textwrap.dedent("".join(lines))))  # outer statements before inner ones
            path = [node for node in tree if isinstance(node, ast.stmt) and node.lineno <= line <= _last_line(node)]
            if path:
                yield path[-1], [node.test for node in reversed(path[:-1]) if isinstance(node, (ast.If, ast.While))]


def _last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _names(node: ast.AST) -> list[str]:
    """Names of variables and attributes in an assertion's condition, or in any other simple statement."""
    node = node.test if isinstance(node, ast.Assert) else node
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.With, ast.Try)):
        return []
    return [
        part.attr if isinstance(part, ast.Attribute) else part.id
        for part in ast.walk(node)
        if isinstance(part, (ast.Attribute, ast.Name))
    ]


def _flags(
    names: list[str],
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    *,
    among: Container[str] | None = None,
) -> dict[str, str]:
    """By name: the flag with its value, as it would be typed, or that it is not given; only values `among` some."""
    shown = {}
    for name in dict.fromkeys(_FLAG_OF.get(name, name) for name in names):
        if name in _OURS or (among is not None and str(getattr(args, name, None)) not in among):
            continue
        if name in _RANKS and hasattr(args, name) and among is None:
            size = getattr(args, name)
            shown[name] = f"{size} {_RANKS[name]}{'s' * (size != 1)}"
        elif actions := [action for action in parser._actions if action.dest == name and action.option_strings]:
            shown[name] = _typed(actions, getattr(args, name, None))
    return shown


def _typed(actions: list[argparse.Action], value: Any) -> str:
    """A setting as it would be typed."""
    flag = next(option for option in actions[0].option_strings if option.startswith("--"))
    if value is None:
        return f"no {flag}"
    for action in actions:
        if action.nargs == 0 and isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0] if value else action.option_strings[-1]
        if action.nargs == 0 and action.const == value:
            return next(option for option in action.option_strings if option.startswith("--"))
    if actions[0].nargs == 0:
        return f"no {flag}"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
