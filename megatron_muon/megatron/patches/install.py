"""The patches of megatron-core 0.19, in one table: `PATCHES`, one function each.

`follow` runs before flags are parsed, `install` when they are: in pretrain_gpt.py, and in any
script by `megatron_muon.enable`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import FunctionType
from typing import Any

import torch

from megatron_muon import cpu
from megatron_muon.core.probe import span
from megatron_muon.errors import UserError
from megatron_muon.megatron.checkpoint import from_ddp, loading, saving
from megatron_muon.megatron.flags.command_line import add_muon_arguments
from megatron_muon.megatron.flags.named_optimizer import MEGATRONS, settle_matrix_optimizer
from megatron_muon.megatron.flags.refusals import FIELDS, NEEDS_MUON, CheckedRun, check
from megatron_muon.megatron.muon_config import with_settings
from megatron_muon.megatron.patches.fsdp import patch_megatron_fsdp
from megatron_muon.megatron.patches.progress import show_progress
from megatron_muon.megatron.run_device import settle_device
from megatron_muon.megatron.upstream import arguments, checkpointing, installed, schedules, training
from megatron_muon.megatron.upstream import optimizer as optimizers
from megatron_muon.megatron.upstream import utils as dataset_utils
from megatron_muon.patching import Patches
from megatron_muon.ranges import check_numbers
from megatron_muon.ranks import say
from megatron_muon.settings import LoadSettings, word_as_flags

TOO_LATE = (
    "call megatron_muon.enable() earlier, before Megatron parses flags and makes an optimizer"
)


def follow(
    patches: Patches, settings: Mapping[str, Any] | None = None, *, every_run: bool = False
) -> None:
    """Add this package's flags to megatron.training's parsers, and `install` when they are parsed.

    Patches are installed for a run with Muon under Megatron-FSDP, or for `every_run`. `settings`
    are defaults of the flags, and of the config of an optimizer that is made without flags.
    """
    given = dict(settings or {})
    patched: list[str] = []
    accept_muon(patches)
    use_factory(patches, given)

    @patches.around(arguments, "add_megatron_arguments")
    def add_megatron_arguments(
        add: Callable[..., Any], parser: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        parser = add(parser)
        if "--muon-exchange" not in parser._option_string_actions:  # `follow` was called twice
            add_muon_arguments(parser)
        parser.set_defaults(**given)
        # parse_args calls it, too.
        patches.around(parser, "parse_known_args")(functools.partial(parse_known_args, parser))
        return parser

    @word_as_flags()
    def parse_known_args(parser: Any, parse: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flags, unknown = parse(*args, **kwargs)
        settle_matrix_optimizer(flags)
        has_muon = _has_muon(flags)
        if has_muon:
            if not torch.cuda.is_available():
                settle_device("auto")
            check_numbers(flags)
            from_ddp.settle_matrices(flags)
            check(CheckedRun(flags, on_cpu=cpu.installed()))
            given.update({name: getattr(flags, name) for name in FIELDS})
            if not (flags.tensorboard_dir or flags.wandb_project):
                given["muon_metrics_interval"] = 0  # nobody would see them
        elif not every_run:
            _refuse_ours(parser, flags)
        if (has_muon or every_run) and not patched:
            patched.extend(
                install(
                    patches,
                    muon_under_fsdp=has_muon,
                    megatron_fsdp=flags.use_megatron_fsdp,
                    profile=flags.profile,
                )
            )
            _replace_copies(patches)
            say(f"megatron-muon: patched for this run: {', '.join(patched)}")
        return flags, unknown

    _replace_copies(patches)


def _refuse_ours(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Refuse this package's flags in a run that it leaves to Megatron."""
    names = {*FIELDS, *(field.name for field in fields(LoadSettings))}
    given = [a for a in parser._actions if getattr(flags, a.dest, a.default) != a.default]
    lines = [f"{a.option_strings[0]} {NEEDS_MUON}" for a in given if a.dest in names]
    if lines:
        raise UserError("\n".join(lines))


def _has_muon(args: argparse.Namespace) -> bool:
    return bool(args.use_megatron_fsdp and args.optimizer not in MEGATRONS)


def _replace_copies(patches: Patches) -> None:
    """Patch modules that imported a patched function of megatron.training by name."""
    patched = {}
    for owner in (arguments, checkpointing, training):
        for function in vars(owner).values():
            if hasattr(function, "__wrapped__"):
                patched[inspect.unwrap(function)] = function
    ours = ("megatron.core", "megatron.training", "megatron_muon")
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith(ours):
            for name, value in list(vars(module).items()):
                if type(value) is FunctionType and value in patched:
                    patches.replace(module, name, patched[value])


EVERY_RUN = "every run"
PROFILED = "with --profile"
MEGATRON_FSDP = "under Megatron-FSDP"
MUON = "with Muon under Megatron-FSDP"
ADAM = "with another optimizer under Megatron-FSDP"


def install(
    patches: Patches, *, muon_under_fsdp: bool, megatron_fsdp: bool = False, profile: bool = False
) -> list[str]:
    """Install the patches of `PATCHES` that a run needs; return their names."""
    needed = {
        EVERY_RUN: True,
        PROFILED: profile,
        MEGATRON_FSDP: megatron_fsdp or muon_under_fsdp,
        MUON: muon_under_fsdp,
        ADAM: megatron_fsdp and not muon_under_fsdp,
    }
    table = {**PATCHES, **dict.fromkeys(installed().PATCHES, MEGATRON_FSDP)}
    chosen = [patch for patch, kind in table.items() if needed[kind]]
    for patch in chosen:
        patch(patches)
    return [patch.__name__ for patch in chosen]


def use_shipped_dataset_helper(patches: Patches) -> None:
    """Use the wheel's compiled dataset helper; 0.19 runs `make`, without a Makefile."""

    @patches.around(dataset_utils, "compile_helpers")
    def compile_helpers(build: Callable[[], None]) -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            build()


def accept_muon(patches: Patches) -> None:
    """Validate Muon under Megatron-FSDP as Adam, and its local attention without logits.

    0.19 asserts twice that Megatron-FSDP runs Adam or SGD only; everything else that validation
    sets for Adam under Megatron-FSDP holds for Muon too. It asserts Transformer Engine 2.9 for
    --qk-clip and --log-max-attention-logit, but here local attention provides its logits.
    """

    @patches.around(arguments, "validate_args")
    def validate_args(
        validate: Callable[..., Any],
        args: argparse.Namespace,
        defaults: dict[str, Any] | None = None,
    ) -> Any:
        if not _has_muon(args):
            return validate(args, defaults or {})
        if not hasattr(args, "muon_exchange"):
            raise UserError(
                f"--optimizer {args.optimizer}: its flags were parsed without this package's;"
                f" {TOO_LATE}"
            )
        shown: dict[str, Any] = {"optimizer": "adam"}
        if args.transformer_impl == "local":
            shown |= {"qk_clip": False, "log_max_attention_logit": False}
        before = {name: getattr(args, name) for name in shown}
        vars(args).update(shown)
        try:
            return validate(args, defaults or {})
        finally:
            vars(args).update(before)


def use_factory(patches: Patches, given: Mapping[str, Any]) -> None:
    """Let get_megatron_optimizer return this package's optimizer for Muon under Megatron-FSDP.

    `given` are the settings that a config of megatron-core's class lacks.

    The optimizer's step clips queries and keys. 0.19's clip_qk, which the training loop calls
    afterwards, looks for `model.module.module.decoder`, which is deeper under Megatron-FSDP, and
    edits weights that the next step overwrites from its main weights; here it returns the logit
    that the step has measured, still on the device.
    """
    from megatron_muon.megatron.factory import get_megatron_muon_optimizer

    made: list[Any] = []

    @patches.around(optimizers, "_get_megatron_emerging_optimizer")
    def get_optimizer(
        build: Callable[..., Any],
        config: Any,
        model_chunks: Any,
        config_overrides: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        ddp_config = getattr(model_chunks[0], "ddp_config", None)
        under_fsdp = getattr(ddp_config, "use_megatron_fsdp", False)
        if config.optimizer in MEGATRONS or not under_fsdp:
            return build(config, model_chunks, config_overrides, pg_collection)
        # A custom loop, which has parsed no flags.
        if not hasattr(checkpointing.handle_swiglu_in_state_dict, "__wrapped__"):
            saving.split_swiglu(patches)
            _replace_copies(patches)
            say("megatron-muon: patched for this loop: patch_megatron_fsdp, split_swiglu")
        optimizer = get_megatron_muon_optimizer(
            with_settings(config, given), model_chunks, config_overrides, pg_collection
        )
        made[:] = [optimizer]
        return optimizer

    @patches.around(training, "clip_qk")
    def clip_qk(clip: Callable[..., Any], model: Any, log_max_only: bool = False) -> Any:
        return made[0].qk_clip.largest if made else clip(model, log_max_only)


def name_parts(patches: Patches) -> None:
    """Name iterations, forward and backward passes and the gradients' reduction in a trace.

    0.19 names none of them; torch numbers steps from the start of the process.
    """

    @patches.around(training, "train_step")
    def train_step(step: Callable[..., Any], *args: Any, iteration: int, **kwargs: Any) -> Any:
        with span(f"iteration {iteration + 1}"):
            return step(*args, iteration=iteration, **kwargs)

    for owner, name, label in (
        (schedules, "forward_backward_no_pipelining", "forward_backward"),
        (training, "finalize_model_grads", "finish_grad_sync"),
    ):
        patches.around(owner, name)(functools.partial(_within, label))


def _within(label: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with span(label):
        return call(*args, **kwargs)


PATCHES: dict[Callable[[Patches], None], str] = {
    use_shipped_dataset_helper: EVERY_RUN,
    patch_megatron_fsdp: MUON,
    show_progress: EVERY_RUN,
    name_parts: PROFILED,
    saving.split_swiglu: MEGATRON_FSDP,
    saving.save_beside_and_rename: MEGATRON_FSDP,
    saving.write_tracker_at_once: MEGATRON_FSDP,
    saving.explain_failed_saves: MEGATRON_FSDP,
    saving.have_main_weights_at_hand: MEGATRON_FSDP,
    loading.load_what_is_there: MEGATRON_FSDP,
    loading.explain_other_schedules: MEGATRON_FSDP,
    loading.keep_loaded_main_weights: MEGATRON_FSDP,
    saving.remember_signals: MEGATRON_FSDP,
    saving.keep_adam_state_alike: ADAM,
    loading.run_no_pickles: EVERY_RUN,
}
"""The patches of megatron-core 0.19 and the runs that need them, in the order of installation."""
