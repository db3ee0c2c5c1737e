"""A save that writes nothing, before the first step: a run that could not save ends at once, not hours later."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron_muon.errors import SaveError, reason_of
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.ranks import say
from megatron_muon.patching import Patches


class _Discarding(StorageWriter):
    """Takes a checkpoint as torch's writer to files does, objects pickled, and keeps nothing."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for item in plan.items:
            planner.resolve_data(item)  # looks up a tensor, pickles an object
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    def storage_meta(self) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def try_saving_before_training(patches: Patches) -> None:
    """Prepare and plan a checkpoint as a save does, before the first step of a run with --save.

    megatron-core finds out at the first save what it cannot save, and all that was trained is lost then.
    """

    @patches.around(training, "train", takes=["forward_step_func", "model", "optimizer", "opt_param_scheduler"])
    def train_after_trial(
        train: Callable[..., Any], forward: Any, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from megatron.training import get_args

        settings = get_args()
        if settings.save and settings.ckpt_format == "fsdp_dtensor":
            _try_saving(settings, model, optimizer, scheduler)
        return train(forward, model, optimizer, scheduler, *args, **kwargs)


def _try_saving(args: Any, model: list[torch.nn.Module], optimizer: Any, scheduler: Any) -> None:
    """Go through a save of the run's state up to the writing, or raise SaveError. Collective; nothing changes."""
    started = time.monotonic()
    try:
        state = _state_to_save(args, model, optimizer, scheduler)
        save(state, storage_writer=_Discarding())
    except (Exception, CheckpointException) as error:
        traceback.print_exc()
        raise SaveError(
            f"this run could not save a checkpoint: a save without files, tried before the first step, failed "
            f"({reason_of(error)}; the traceback is above); nothing was trained. Without --save it would train"
        ) from error
    say(f"megatron-muon: tried a save without writing it, in {time.monotonic() - started:.2f} s")


def _state_to_save(args: Any, model: list[torch.nn.Module], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """What megatron-core's save_checkpoint hands to torch's distributed checkpointing, by the same functions."""
    model = unwrap_model(model)
    settings: dict[str, Any] = {"metadata": checkpointing._build_sharded_state_dict_metadata(args)}
    if isinstance(optimizer, MuonChainedOptimizer):
        settings["is_loading"] = True  # leaves offloaded momentum where it is
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    rng_state = checkpointing.get_rng_state(args.ckpt_format, *groups)
    state = checkpointing.generate_state_dict(
        args, model, optimizer, scheduler, rng_state, iteration=0, optim_sd_kwargs=settings
    )
    prepared: dict[str, Any] = checkpointing.preprocess_fsdp_dtensor_state_dict(args, state, model[0])
    return prepared
