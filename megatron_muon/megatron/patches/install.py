"""The patches of megatron-core that a run needs, most of them for Muon under Megatron-FSDP, one function each.

`follow` comes before flags are parsed, `install` when they are: in pretrain_gpt.py, and in any
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

import megatron.core.datasets.utils as dataset_utils
import megatron.core.optimizer as optimizers
import megatron.core.pipeline_parallel.schedules as schedules
import megatron.core.tensor_parallel.layers as layers
import megatron.training.arguments as arguments
import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch
from megatron.training import get_args

from megatron_muon import cpu
from megatron_muon.core.numbers import check_numbers
from megatron_muon.core.probe import span
from megatron_muon.core.ranks import say
from megatron_muon.errors import OffloadError, SaveError, UserError
from megatron_muon.megatron.checkpoint import loading, saving
from megatron_muon.megatron.flags.arguments import add_muon_arguments
from megatron_muon.megatron.flags.refusals import FIELDS, MUONS, MuonRun, muon_rules, refuse
from megatron_muon.megatron.gpu import settle_device
from megatron_muon.megatron.patches.fsdp import mend_megatron_fsdp
from megatron_muon.megatron.patches.progress import log_to_both, show_progress
from megatron_muon.megatron.settings import with_settings
from megatron_muon.patching import Patches
from megatron_muon.settings import LoadSettings, word_as_flags

TOO_LATE = (
    "call megatron_muon.enable() earlier, before Megatron parses flags and makes an optimizer"
)
_OURS = (*FIELDS, *(field.name for field in fields(LoadSettings)))


def follow(
    patches: Patches, settings: Mapping[str, Any] | None = None, *, every_run: bool = False
) -> None:
    """Give megatron.training's parsers this package's flags, and `install` what a run needs when its flags are read.

    That is a run with Muon under Megatron-FSDP, or `every_run`. `settings` are defaults of the
    flags, and of the config that an optimizer is made from without flags.
    """
    given, installed = dict(settings or {}), list[str]()
    accept_muon(patches)
    use_factory(patches, given)

    @patches.around(arguments, "add_megatron_arguments", takes=["parser"])
    def add_megatron_arguments(
        add: Callable[..., Any], parser: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        parser = add(parser)
        if "--muon-exchange" not in parser._option_string_actions:  # followed twice
            add_muon_arguments(parser)
        parser.set_defaults(**given)
        # by parse_args, too
        patches.around(parser, "parse_known_args")(functools.partial(parse_known_args, parser))
        return parser

    @word_as_flags()
    def parse_known_args(parser: Any, parse: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flags, unknown = parse(*args, **kwargs)
        if muon := _has_muon(flags):
            if not torch.cuda.is_available():
                settle_device("auto")
            check_numbers(flags)
            refuse(muon_rules(MuonRun(values=flags, on_cpu=cpu.installed(), has_model=False)))
            given.update({name: getattr(flags, name) for name in FIELDS})
            if not (flags.tensorboard_dir or flags.wandb_project):
                given["muon_metrics_interval"] = 0  # nobody would see them
        else:
            ours = [
                each
                for each in parser._actions
                if each.dest in _OURS and getattr(flags, each.dest) != each.default
            ]
            needs = "needs --optimizer muon --use-megatron-fsdp; add them or leave it out"
            refuse((not every_run, f"{each.option_strings[0]} {needs}") for each in ours)
        if (muon or every_run) and not installed:
            under_fsdp = flags.use_megatron_fsdp
            installed.extend(
                install(
                    patches, muon_under_fsdp=muon, megatron_fsdp=under_fsdp, profile=flags.profile
                )
            )
            _replace_copies(patches)
            say(f"megatron-muon: patched for this run: {', '.join(installed)}")
        return flags, unknown

    _replace_copies(patches)


def _has_muon(args: argparse.Namespace) -> bool:
    return bool(args.use_megatron_fsdp and args.optimizer in MUONS)


def _replace_copies(patches: Patches) -> None:
    """Give modules that imported a function of megatron.training by name what has been put in its place."""
    functions = [
        each for owner in (arguments, checkpointing, training) for each in vars(owner).values()
    ]
    now = {
        inspect.unwrap(function): function
        for function in functions
        if hasattr(function, "__wrapped__")
    }
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith(
            ("megatron.core", "megatron.training", "megatron_muon")
        ):
            for name, value in list(vars(module).items()):
                if type(value) is FunctionType and value in now:
                    patches.replace(module, name, now[value])


def install(
    patches: Patches, *, muon_under_fsdp: bool, megatron_fsdp: bool = False, profile: bool = False
) -> list[str]:
    """Install what a run needs; under Megatron-FSDP that is more, with this package's Muon most. Returns the names."""
    chosen: list[Callable[[Patches], None]] = [use_shipped_dataset_helper]
    if muon_under_fsdp:
        chosen += [stop_after_offload_failure, mend_megatron_fsdp]
    chosen += [show_progress, log_to_both]
    if profile:
        chosen += [count_global_steps, name_parts]
    if muon_under_fsdp or megatron_fsdp:
        chosen += [let_experts_have_biases, saving.split_swiglu, saving.save_beside_and_rename]
        chosen += [
            saving.write_tracker_at_once,
            saving.explain_failed_saves,
            saving.have_main_weights_at_hand,
        ]
        chosen += [
            loading.load_what_is_there,
            loading.explain_load_refusals,
            loading.keep_loaded_main_weights,
        ]
        chosen += [saving.try_saving_before_training, saving.remember_signals]
    if megatron_fsdp and not muon_under_fsdp:
        chosen += [saving.keep_adam_state_alike]
    chosen += [loading.run_no_pickles]
    for patch in chosen:
        patch(patches)
    return [patch.__name__ for patch in chosen]


def use_shipped_dataset_helper(patches: Patches) -> None:
    """Use the dataset helper that megatron-core's wheel ships compiled; 0.19 runs `make`, and has no Makefile there."""

    @patches.around(dataset_utils, "compile_helpers")
    def compile_helpers(build: Callable[[], None]) -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            build()


def let_experts_have_biases(patches: Patches) -> None:
    """Let local experts with biases train where neither tensors nor experts are parallel.

    0.19 adds an expert's bias in place (MLP.forward) to what the reduction over one rank hands
    through, a view that autograd refuses to have changed. One rank has nothing to reduce.
    """

    @patches.around(layers, "reduce_from_tensor_model_parallel_region", takes=["input_", "group"])
    def reduce_region(
        reduce: Callable[..., torch.Tensor], input_: torch.Tensor, group: Any = None
    ) -> torch.Tensor:
        return input_ if group is not None and group.size() == 1 else reduce(input_, group)


def accept_muon(patches: Patches) -> None:
    """Validate Muon under Megatron-FSDP as Adam, and local attention in it as one that needs no logits.

    0.19 asserts twice that Megatron-FSDP runs Adam or SGD only; everything else that validation
    sets for Adam under Megatron-FSDP holds for Muon too. It asserts Transformer Engine 2.9 for
    --qk-clip and --log-max-attention-logit, and here local attention shows its logits too.
    """

    @patches.around(arguments, "validate_args", takes=["args", "defaults"])
    def validate_args(
        validate: Callable[..., Any],
        args: argparse.Namespace,
        defaults: dict[str, Any] | None = None,
    ) -> Any:
        if not _has_muon(args):
            return validate(args, defaults or {})
        if not hasattr(args, FIELDS[0]):
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
    """Have whoever calls get_megatron_optimizer for Muon under Megatron-FSDP get this package's optimizer.

    `given` are the settings that a config of megatron-core's class lacks.

    The optimizer's step clips queries and keys. 0.19's clip_qk, which the training loop calls
    afterwards, looks for `model.module.module.decoder`, which Megatron-FSDP puts deeper, and edits
    weights that the next step installs anew from its main weights; here it returns the logit that
    the step has measured, still on the device.
    """
    from megatron_muon.megatron.factory import get_megatron_muon_optimizer

    made: list[Any] = []
    takes = ["config", "model_chunks", "config_overrides", "pg_collection"]

    @patches.around(optimizers, "_get_megatron_emerging_optimizer", takes=takes)
    def get_optimizer(
        build: Callable[..., Any],
        config: Any,
        model_chunks: Any,
        config_overrides: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        under_fsdp = getattr(
            getattr(model_chunks[0], "ddp_config", None), "use_megatron_fsdp", False
        )
        if config.optimizer not in MUONS or not under_fsdp:
            return build(config, model_chunks, config_overrides, pg_collection)
        # no flags: a loop of one's own
        if not hasattr(checkpointing.handle_swiglu_in_state_dict, "__wrapped__"):
            saving.split_swiglu(patches)
            _replace_copies(patches)
            say("megatron-muon: patched for this loop: mend_megatron_fsdp, split_swiglu")
        settings = with_settings(config, given)
        made[:] = [
            get_megatron_muon_optimizer(settings, model_chunks, config_overrides, pg_collection)
        ]
        return made[0]

    @patches.around(training, "clip_qk", takes=["model", "log_max_only"])
    def clip_qk(clip: Callable[..., Any], model: Any, log_max_only: bool = False) -> Any:
        return made[0].qk_clip.largest if made else clip(model, log_max_only)


def stop_after_offload_failure(patches: Patches) -> None:
    """Save a checkpoint, which is whole, and stop once momentum could not be read or written, in a step or a save."""

    @patches.around(training, "save_checkpoint", takes=["iteration", "model", "optimizer"])
    def save_checkpoint(
        save: Callable[..., None],
        iteration: int,
        model: Any,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        save(iteration, model, optimizer, *args, **kwargs)
        if (failure := getattr(optimizer, "offload_failure", None)) is not None:
            raise OffloadError(
                f"{failure}. Iteration {iteration} was finished and saved in {get_args().save}"
            )

    state = (
        "model",
        "optimizer",
        "opt_param_scheduler",
        "iteration",
        "num_floating_point_operations_so_far",
    )

    @patches.around(
        training,
        "checkpoint_and_decide_exit",
        takes=[*state, "checkpointing_context", "train_data_iterator"],
    )
    def checkpoint_and_decide_exit(decide: Callable[..., bool], *args: Any) -> bool:
        model, optimizer, scheduler, iteration, flops, context, data = args
        if (failure := getattr(optimizer, "offload_failure", None)) is not None:
            if not get_args().save:
                raise OffloadError(
                    f"{failure}. Iteration {iteration} was finished; without --save it is lost"
                )
            try:
                training.save_checkpoint_and_time(
                    iteration, model, optimizer, scheduler, flops, context, train_data_iterator=data
                )
            except SaveError as error:
                raise OffloadError(
                    f"{failure}. Iteration {iteration} was finished, and is lost: {error}"
                ) from error
        return decide(*args)


def count_global_steps(patches: Patches) -> None:
    """Let `--profile-step-start` count from the run's first step in a run that goes on from a checkpoint, too.

    0.19 calls the two flags global steps and stops the profiler at that of --profile-step-end, but
    has torch's schedule count from the step that the run goes on with. So it would record other
    steps, or none. Steps that were done before are not recorded: their trace, if there is one,
    stays.
    """

    @patches.around(torch.profiler, "schedule", takes=["wait", "warmup", "active", "repeat"])
    def schedule(make: Callable[..., Any], *, wait: int, **more: int) -> Any:
        args = get_args()
        if args.profile_step_start <= args.iteration > 0:
            return lambda _: torch.profiler.ProfilerAction.NONE
        return make(wait=wait - args.iteration, **more)


def name_parts(patches: Patches) -> None:
    """Name iterations, forward and backward passes, and the end of the gradients' reduction, in a trace.

    0.19 names none of them; the steps that torch names are counted from where the run goes on.
    """

    @patches.around(training, "train_step", takes=["iteration"])
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
