"""The patches of megatron-core that a run needs, most of them for Muon under Megatron-FSDP, one function each."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import megatron.core.pipeline_parallel.schedules as schedules
import megatron.core.tensor_parallel.layers as layers
import megatron.training.arguments as arguments
import megatron.training.training as training
import torch
from megatron.training import get_args

from megatron_muon.core.probe import span
from megatron_muon.errors import OffloadError, SaveError
from megatron_muon.megatron.checkpoint import loading, saving
from megatron_muon.megatron.flags.arguments import allow_full_precision
from megatron_muon.megatron.patches.fsdp import mend_megatron_fsdp
from megatron_muon.megatron.patches.progress import log_to_both, show_progress
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.patching import Patches


def install(patches: Patches, *, muon_under_fsdp: bool, megatron_fsdp: bool = False, profile: bool = False) -> None:
    """Install what a run needs; under Megatron-FSDP that is more, with this package's Muon most."""
    use_shipped_dataset_helper(patches)
    accept_full_precision(patches)
    if muon_under_fsdp:
        accept_muon(patches)
        use_factory(patches)
        stop_after_offload_failure(patches)
        mend_megatron_fsdp(patches)
    show_progress(patches, on_gpu=torch.cuda.is_available())
    log_to_both(patches)
    if profile:
        count_global_steps(patches)
        name_parts(patches)
    if muon_under_fsdp or megatron_fsdp:
        let_experts_have_biases(patches)
        saving.install(patches, adam=not muon_under_fsdp)
    loading.run_no_pickles(patches)


def use_shipped_dataset_helper(patches: Patches) -> None:
    """Use the dataset helper that megatron-core's wheel ships compiled; 0.19 runs `make`, and has no Makefile there."""

    @patches.around(dataset_utils, "compile_helpers")
    def compile_helpers(build: Callable[[], None]) -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            build()


def accept_full_precision(patches: Patches) -> None:
    """Let every parser of the run take `--muon-fp32-matmul-prec highest`.

    0.19 parses the command line again in ft_integration.setup, where a value that a flag does not know ends the run.
    """

    @patches.around(arguments, "add_megatron_arguments", takes=["parser"])
    def add_megatron_arguments(add: Callable[..., Any], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add(parser)
        allow_full_precision(parser)
        return parser


def let_experts_have_biases(patches: Patches) -> None:
    """Let local experts with biases train where neither tensors nor experts are parallel.

    0.19 adds an expert's bias in place (MLP.forward) to what the reduction over one rank hands through, a view that
    autograd refuses to have changed. One rank has nothing to reduce.
    """

    @patches.around(layers, "reduce_from_tensor_model_parallel_region", takes=["input_", "group"])
    def reduce_region(reduce: Callable[..., torch.Tensor], input_: torch.Tensor, group: Any = None) -> torch.Tensor:
        return input_ if group is not None and group.size() == 1 else reduce(input_, group)


def accept_muon(patches: Patches) -> None:
    """Validate a run of `--optimizer muon` as one of Adam, and one of local attention as one that needs no logits.

    0.19 asserts twice that Megatron-FSDP runs Adam or SGD only; everything else that validation sets for Adam under
    Megatron-FSDP holds for Muon too. It asserts Transformer Engine 2.9 for --qk-clip and --log-max-attention-logit, and
    here local attention shows its logits too.
    """

    @patches.around(arguments, "validate_args", takes=["args", "defaults"])
    def validate_args(
        validate: Callable[..., Any], args: argparse.Namespace, defaults: dict[str, Any] | None = None
    ) -> Any:
        shown: dict[str, Any] = {"optimizer": "adam"}
        if args.transformer_impl == "local":
            shown |= {"qk_clip": False, "log_max_attention_logit": False}
        before = {name: getattr(args, name) for name in shown}
        vars(args).update(shown)
        try:
            return validate(args, defaults or {})
        finally:
            vars(args).update(before)


def use_factory(patches: Patches) -> None:
    """Have the training loop build its optimizer with our factory, from a config that carries our flags.

    Its step clips queries and keys. 0.19's clip_qk, which the loop calls afterwards, looks for
    `model.module.module.decoder`, which Megatron-FSDP puts deeper, and edits weights that the next step installs anew
    from its main weights; here it returns the logit that the step has measured, still on the device.
    """
    from megatron_muon.megatron.factory import get_megatron_muon_optimizer

    made: list[Any] = []

    def get_optimizer(
        config: Any, model_chunks: Any, config_overrides: Any = None, pg_collection: Any = None, **_unused: Any
    ) -> Any:
        args = get_args()
        if not (args.tensorboard_dir or args.wandb_project):
            config.muon_metrics_interval = 0  # nobody would see them
        made[:] = [get_megatron_muon_optimizer(config, model_chunks, config_overrides, pg_collection)]
        return made[0]

    def clip_qk(model: Any, log_max_only: bool = False) -> torch.Tensor:
        largest: torch.Tensor = made[0].qk_clip.largest
        return largest

    patches.replace(
        training, "get_megatron_optimizer", get_optimizer, takes=["config", "model_chunks", "config_overrides"]
    )
    patches.replace(training, "OptimizerConfig", MuonOptimizerConfig)
    patches.replace(training, "clip_qk", clip_qk, takes=["model", "log_max_only"])


def stop_after_offload_failure(patches: Patches) -> None:
    """Save a checkpoint, which is whole, and stop once momentum could not be read or written, in a step or a save."""

    @patches.around(training, "save_checkpoint", takes=["iteration", "model", "optimizer"])
    def save_checkpoint(
        save: Callable[..., None], iteration: int, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        save(iteration, model, optimizer, *args, **kwargs)
        if (failure := getattr(optimizer, "offload_failure", None)) is not None:
            raise OffloadError(f"{failure}. Iteration {iteration} was finished and saved in {get_args().save}")

    state = ("model", "optimizer", "opt_param_scheduler", "iteration", "num_floating_point_operations_so_far")

    @patches.around(
        training, "checkpoint_and_decide_exit", takes=[*state, "checkpointing_context", "train_data_iterator"]
    )
    def checkpoint_and_decide_exit(decide: Callable[..., bool], *args: Any) -> bool:
        model, optimizer, scheduler, iteration, flops, context, data = args
        if (failure := getattr(optimizer, "offload_failure", None)) is not None:
            if not get_args().save:
                raise OffloadError(f"{failure}. Iteration {iteration} was finished; without --save it is lost")
            try:
                training.save_checkpoint_and_time(
                    iteration, model, optimizer, scheduler, flops, context, train_data_iterator=data
                )
            except SaveError as error:
                raise OffloadError(f"{failure}. Iteration {iteration} was finished, and is lost: {error}") from error
        return decide(*args)


def count_global_steps(patches: Patches) -> None:
    """Let `--profile-step-start` count from the run's first step in a run that goes on from a checkpoint, too.

    0.19 calls the two flags global steps and stops the profiler at that of --profile-step-end, but has torch's schedule
    count from the step that the run goes on with. So it would record other steps, or none. Steps that were done before
    are not recorded: their trace, if there is one, stays.
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
