"""Megatron's own validation of a command line, before any rank is started.

megatron-core refuses settings by assertions on the way from flags to a training: in the validation of all flags, the
batch-size calculator, the configurations of model and optimizer, the scheduler, the tokenizer. None of them needs a
process group or a device. `check` goes that way on a copy of the arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import linecache
import os
import re
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from megatron_muon.errors import UserError, quiet_imports, reason_of
from megatron_muon.megatron.flags import arguments, refusals
from megatron_muon.megatron.flags.refusals import MUONS
from megatron_muon.patching import Patches

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What validation takes for arguments that nobody gave."""

_OF_PACKAGES = re.compile(
    r"\binstall(ed|ation)?\b|\b(is_\w+_min_version|has_\w+_support|HAVE_\w+|get_device_capability)\b"
)
"""What a refusal says, or its condition asks, that depends on packages and device and not on settings."""

_CONDITION_LINES = 6
"""Source lines above a refusal in which its condition is looked for."""


def check(args: argparse.Namespace, *, world_size: int, elsewhere: list[str] | None = None) -> argparse.Namespace:
    """Take a command line through everything by which megatron-core validates it; no process group, nothing written.

    A run with `--yaml-cfg`, whose settings are not those of the flags, is left to its start. For a run that starts
    `elsewhere` no tokenizer is built, and that list takes what packages of this machine refuse, which only the other
    machine can know. `args` stay as they are; returned are those that validation has completed, with the padded size of
    the vocabulary.

    Raises:
        UserError: the first refusal.
    """
    settled = copy.deepcopy(args)
    settled.rank, settled.world_size = 0, world_size
    settled._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    if args.yaml_cfg is not None:
        return settled
    try:
        with _as_in_training(args.use_megatron_fsdp and args.optimizer in MUONS):
            _validate(settled)
            _count_micro_batches(settled)
            _build_tokenizer(settled, elsewhere=elsewhere is not None)
            _schedule(settled)
            if settled.padded_vocab_size is None:  # the rest of the model does not depend on it
                settled.padded_vocab_size = settled.make_vocab_size_divisible_by * settled.tensor_model_parallel_size
            refusals.apply(arguments.of_model(settled))
            _build_model(settled)
    except UserError as error:
        raised = error.__cause__
        by_import = any(isinstance(cause, ImportError) for cause in (raised, raised and raised.__context__))
        if elsewhere is None or not (by_import or _OF_PACKAGES.search(str(error))):
            raise
        elsewhere.append(f"not known here, and checked no further: {error}")
    return settled


def complete(args: argparse.Namespace) -> None:
    """Validate in place what a model depends on, and nothing else: for a plan; a UserError where that is refused.

    The size of the vocabulary is the tokenizer's where there is one at hand, else that of `--vocab-size`. Where
    neither is known it is 1, unless buckets that are cut by size depend on it. `args` have `rank` and `world_size`.
    """
    with _as_in_training(True):
        _validate(args)
        if args.vocab_size is None or args.tokenizer_type == "NullTokenizer":
            try:
                _build_tokenizer(args)
            except UserError:
                if args.data_parallel_sharding_strategy != "optim_grads_params":
                    raise
        if args.padded_vocab_size is None and args.vocab_size is None:
            args.vocab_size = 1
        refusals.apply(arguments.of_model(args))


def _validate(args: argparse.Namespace) -> None:
    from megatron.training import arguments

    if args.use_checkpoint_args:
        from megatron.training.checkpointing import load_args_from_checkpoint

        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    with mock.patch.dict(os.environ):
        if args.use_megatron_fsdp:
            os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # check_settings has its say on it
        arguments.validate_args(args, DEFAULTS)


def _build_tokenizer(args: argparse.Namespace, *, elsewhere: bool = False) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    from megatron_muon.megatron.data.tokenizers import TokenizerSpec, build_megatron, check_spec

    args.tokenizer_type = args.tokenizer_type or DEFAULTS["tokenizer_type"]
    check_spec(TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size))
    if elsewhere:  # package and files may be there, and a hub that cannot be reached is waited for a minute
        return
    if args.tokenizer_type != "NullTokenizer":
        build_megatron(args)  # which pads the vocabulary, too
    elif args.pad_vocab_size and args.padded_vocab_size is None:  # without the two seconds of importing transformers
        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)


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
def _as_in_training(muon_under_fsdp: bool) -> Iterator[None]:
    """What `patches.install` changes of the validation and the configurations, for a while.

    `--use-checkpoint-args` loads a part of the checkpoint, so validation trusts it no more than a training does.
    """
    from megatron_muon.megatron.checkpoint import loading
    from megatron_muon.megatron.patches import install as patches

    with explained(), Patches() as changes:
        loading.run_no_pickles(changes)
        loading.explain_unreadable(changes)
        if muon_under_fsdp:
            patches.accept_muon(changes)
            patches.accept_local_logits(changes)
            patches.use_factory(changes)
        yield


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what megatron-core raises into a UserError of one line: its words, and the condition that did not hold.

    What it prints is kept back; a training prints it again.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    try:
        with contextlib.redirect_stdout(io.StringIO()), quiet_imports():
            yield
    except UserError:
        raise
    except (Exception, CheckpointException) as refusal:
        reason = " ".join((reason_of(refusal) if hasattr(refusal, "failures") else str(refusal)).split())
        if not isinstance(refusal, (AssertionError, ValueError, RuntimeError)) and type(refusal) is not Exception:
            reason = f"{type(refusal).__name__}: {reason}"
        said = ": ".join(filter(None, (reason, _condition(refusal))))
        raise UserError(f"megatron-core refuses these settings: {said}") from refusal


def _condition(refusal: BaseException) -> str:
    """The source of the `assert` or `if` behind an exception of Megatron, and where it is; empty for others'."""
    for frame, line in reversed(list(traceback.walk_tb(refusal.__traceback__))):
        if frame.f_globals.get("__name__", "").startswith("megatron."):
            file = frame.f_code.co_filename
            above = [part.strip() for part in linecache.getlines(file)[max(0, line - _CONDITION_LINES) : line]]
            starts = [at for at, part in enumerate(above) if part.startswith(("assert ", "if ", "elif "))]
            source = " ".join(above[starts[-1] if starts else -1 :]).partition(" raise ")[0].rstrip(", \\")
            return f"{source} ({os.path.basename(file)}:{line})"
    return ""
