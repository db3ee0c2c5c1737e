"""Megatron's own refusals: in its words, before any rank is started.

megatron-core refuses settings by assertions on the way from flags to a training: in the validation of all flags, the
batch-size calculator, the configurations of model and optimizer. `check` goes that way on a copy of the
arguments, for `train`, `sweep` and `submit`. The rest is refused by the ranks, whose errors before the first step
are shown in the same way.
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

from megatron_muon.errors import UserError, quiet_imports, unforeseen
from megatron_muon.megatron.flags.refusals import MUONS
from megatron_muon.patching import Patches

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What validation takes for arguments that nobody gave."""

_OF_PACKAGES = re.compile(
    r"\binstall(ed|ation)?\b|\b(is_\w+_min_version|has_\w+_support|HAVE_\w+|get_device_capability|\w*ImportError"
    r"|ModuleNotFoundError|nvidia_resiliency_ext)\b"
)
"""What a refusal says, or its condition asks, that depends on packages and device and not on settings."""

_CONDITION_LINES = 6
"""Source lines above a refusal in which its condition is looked for."""


def check(args: argparse.Namespace, *, world_size: int, elsewhere: bool = False) -> list[str]:
    """Take a command line through what megatron-core validates without data; no process group, nothing written.

    A run with `--yaml-cfg`, whose settings are not those of the flags, is left to its start. `args` stay as they are.

    Raises:
        UserError: the first refusal. For a run that starts `elsewhere`, what packages of this machine refuse is a note,
            which is returned.
    """
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_muon.megatron.model.gpt import gpt_config

    if args.yaml_cfg is not None:
        return []
    checked = copy.deepcopy(args)
    checked.rank, checked.world_size = 0, world_size
    checked._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    try:
        with _as_in_training(args.use_megatron_fsdp and args.optimizer in MUONS):
            _validate(checked)
            _count_micro_batches(checked)
            pretrain_cfg_container_from_args(checked, gpt_config(checked))
    except UserError as error:
        if not (elsewhere and _OF_PACKAGES.search(str(error))):
            raise
        return [f"not known here, and checked no further: {error}"]
    return []


def complete(args: argparse.Namespace) -> None:
    """Validate in place what a model depends on, and nothing else: for a plan; a UserError where that is refused.

    The size of the vocabulary is that of `--vocab-size`, else the tokenizer's where there is one at hand. Where neither
    is known it is 1, unless buckets that are cut by size depend on it. `args` have `rank` and `world_size`.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    from megatron_muon.megatron.data.tokenizers import build_megatron

    with _as_in_training(True):
        _validate(args)
        if args.vocab_size is None:
            try:
                build_megatron(args)  # which pads the vocabulary, too
            except UserError:
                if args.data_parallel_sharding_strategy != "optim_grads_params":
                    raise
                args.vocab_size = 1
        if args.pad_vocab_size and args.padded_vocab_size is None:
            args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)


def _validate(args: argparse.Namespace) -> None:
    from megatron.training import arguments

    if args.use_checkpoint_args:
        from megatron.training.checkpointing import load_args_from_checkpoint

        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    arguments.validate_args(args, DEFAULTS)


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


@contextlib.contextmanager
def _as_in_training(muon_under_fsdp: bool) -> Iterator[None]:
    """What `patches.install` changes of the validation and the configurations, for a while; prints are kept back.

    `--use-checkpoint-args` loads a part of the checkpoint, so validation trusts it no more than a training does.
    """
    from megatron_muon.megatron.checkpoint import loading
    from megatron_muon.megatron.patches import install as patches

    with explained(), Patches() as changes, contextlib.redirect_stdout(io.StringIO()), quiet_imports():
        loading.run_no_pickles(changes)
        if muon_under_fsdp:
            patches.accept_muon(changes)
            patches.use_factory(changes)
        yield


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what megatron-core refuses into a UserError in its words, and what no check foresaw into another."""
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:
        raise refused(error) or UserError(f"Megatron's validation failed: {unforeseen(error)}") from error


def refused(error: BaseException) -> UserError | None:
    """A UserError of one line, with the condition that did not hold, where a statement of Megatron has raised this."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    above = [part.strip() for part in linecache.getlines(file)[max(0, line - _CONDITION_LINES) : line]]
    is_own = frame.f_globals.get("__name__", "").startswith("megatron.") and above
    if not is_own or not re.search(r"\b(assert|raise)\b", above[-1]):
        return None
    starts = [at for at, part in enumerate(above) if part.startswith(("assert ", "if ", "elif "))]
    source = " ".join(above[starts[-1] if starts else -1 :]).partition(" raise ")[0].rstrip(", \\")
    condition = f"{source} ({os.path.basename(file)}:{line})"
    said = ": ".join(filter(None, (" ".join(str(error).split()), condition)))
    return UserError(f"megatron-core refuses these settings: {said}")
