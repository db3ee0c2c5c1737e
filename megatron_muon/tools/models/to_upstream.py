"""`megatron-muon export --to torch_dist`: a checkpoint that megatron-core's own Muon continues.

One process builds the model and megatron-core's own optimizer, fills them, and lets megatron-core
save them. So the format is megatron-core's, and any parallel layout loads it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon import cpu
from megatron_muon.checkpoint import content
from megatron_muon.checkpoint.content import STEP
from megatron_muon.errors import UserError
from megatron_muon.megatron.model.gpt import LOCAL_LAYERS, gpt_config
from megatron_muon.megatron.model.matrices import tag_for_muon, unlike_upstream
from megatron_muon.megatron.muon_config import with_settings
from megatron_muon.megatron.upstream import (
    LocalSpecProvider,
    ProcessGroupCollection,
    checkpointing,
    global_vars,
    initialize_rerun_state_machine,
    model_parallel_cuda_manual_seed,
    parallel_state,
    training,
)
from megatron_muon.patching import Patches
from megatron_muon.settings import UPSTREAM, flag_of
from megatron_muon.tools.models.weights import Weights, local_name

type Tensors = dict[str, Any]
"""Tensors of parameters, by name."""

_STATE = "optimizer.state."
_SETTINGS = "optimizer.param_to_group_meta."
_SCHEDULE = "opt_param_scheduler."
_FLOPS = "num_floating_point_operations_so_far"
_WITHOUT_COUNTERPART = (
    "muon_hyperball",
    "muon_cautious_weight_decay",
    "muon_split_heads",
    "muon_split_gated_mlp",
    "muon_ns_steps_for",
)
_SIZES = (
    "world_size",
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
)
"""Numbers of ranks."""

_UNDER_DDP: dict[str, Any] = {
    **dict.fromkeys(_SIZES, 1),
    "rank": 0,
    "sequence_parallel": False,
    "use_megatron_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
    "use_distributed_optimizer": False,
    "use_layer_wise_distributed_optimizer": False,
    "ckpt_format": "torch_dist",
    "use_dist_ckpt": True,
    "async_save": False,
    "no_save_rng": True,  # each rank's are those of another layout
    "load": None,
    "use_checkpoint_opt_param_scheduler": True,
    "override_opt_param_scheduler": False,
}


def export(args: argparse.Namespace) -> None:
    """Run `megatron-muon export --to torch_dist`."""
    out: Path = args.out
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists already; give another folder, or remove it first")
    checkpoint = Weights(args.checkpoint, verify=not args.no_verify_checkpoint)
    _check(checkpoint)
    entries = content.read_entries(checkpoint.folder)
    names = ["iteration"]
    for name in entries:
        is_count = name.startswith(_SETTINGS) and name.endswith(f".{STEP}")  # FusedAdam's
        if is_count or name == _FLOPS or name.startswith((_STATE, _SCHEDULE)):
            names.append(name)
    stored = content.read(checkpoint.folder, names)
    run = checkpoint.args
    has_experts_apart = run.expert_model_parallel_size > 1
    vars(run).update(_UNDER_DDP, save=str(out))
    of_run = dict(vars(run))
    vars(run).update(LOCAL_LAYERS)
    cpu.install(force=True)
    _initialize(run)
    try:
        model = _model(run)
        if has_experts_apart:  # then their state is that of another optimizer
            for name, parameter in model.named_parameters():
                parameter.allreduce = ".experts." not in name
        optimizer = _optimizer(run, model)
        _require_same_matrices(run, model, checkpoint.folder)
        if lost := _fill(model, optimizer, checkpoint.tensors, stored):
            raise UserError(f"{checkpoint.folder} is incomplete: {content.some(lost)}")
        scheduler = training.get_optimizer_param_scheduler(optimizer)
        schedule = {}
        for name, value in stored.items():
            if name.startswith(_SCHEDULE):
                schedule[name.removeprefix(_SCHEDULE)] = value
        scheduler.load_state_dict(schedule)
        vars(run).update(of_run, use_checkpoint_opt_param_scheduler=False)
        checkpointing.save_checkpoint(
            stored["iteration"], [model], optimizer, scheduler, stored.get(_FLOPS, 0)
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    print(f"{out}: for --load under DDP, from {checkpoint.folder}")


def _check(checkpoint: Weights) -> None:
    """Refuse runs that megatron-core's own Muon cannot continue."""
    run = checkpoint.args
    if run.optimizer != "muon":
        raise UserError(f"{checkpoint.folder} is of --optimizer {run.optimizer}, not of muon")
    given = [name for name in _WITHOUT_COUNTERPART if getattr(run, name, None)]
    for name, rate in {"muon_lr": run.lr, "muon_min_lr": run.min_lr}.items():
        if getattr(run, name, None) not in (None, rate):
            given.append(name)
    if given:
        flags = ", ".join(map(flag_of, given))
        raise UserError(f"{checkpoint.folder}: megatron-core's own Muon has no {flags}")


def _initialize(run: argparse.Namespace) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    global_vars.set_args(run)
    global_vars._set_timers(run)
    initialize_rerun_state_machine()
    model_parallel_cuda_manual_seed(run.seed)


def _model(run: argparse.Namespace) -> Any:
    config = gpt_config(run)
    config.transformer.perform_initialization = False
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with Patches() as changes:
        if run.multi_latent_attention:  # which that of local layers cannot compute
            none = torch.nn.Identity
            changes.replace(LocalSpecProvider, "core_attention", lambda _provider: none)
        model = config.get_builder_cls()(config).build_model(groups, True, True)
    return model.bfloat16() if run.bf16 else model


def _optimizer(run: argparse.Namespace, model: Any) -> Any:
    config, overrides = training.get_megatron_optimizer_config(run)
    optimizer = training.get_megatron_optimizer(config, [model], config_overrides=overrides)
    for member in optimizer.chained_optimizers:
        member.init_state_fn(member.optimizer, config)
    return optimizer


def _require_same_matrices(run: argparse.Namespace, model: Any, folder: Path) -> None:
    """Refuse a run whose Muon has other weights or blocks than megatron-core's own."""
    config, _ = training.get_megatron_optimizer_config(run)
    tag_for_muon([model], exclude=run.muon_exclude, like_upstream=run.muon_matrices == UPSTREAM)
    if unlike := unlike_upstream([model], with_settings(config, vars(run))):
        raise UserError(
            f"{folder}: megatron-core's own Muon chooses otherwise: {'; '.join(unlike)}; train with"
            " --muon-matrices upstream"
        )


def _fill(model: Any, optimizer: Any, weights: Tensors, stored: Mapping[str, Any]) -> list[str]:
    """Give model and optimizer a checkpoint's weights and state; returns what it lacks."""
    state: dict[str, Tensors] = defaultdict(dict)
    for entry, value in stored.items():
        if entry.startswith((_STATE, _SETTINGS)):
            parameter, slot = entry.removeprefix(_STATE).removeprefix(_SETTINGS).rsplit(".", 1)
            state[slot][local_name(parameter)] = value
    names = {}
    lost = []
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])
        for name, parameter in model.named_parameters():
            main = getattr(parameter, "main_param", parameter)
            names[main] = name
            found = _whole(name, weights)
            if found is None:
                lost.append(f"no {name}")
                continue
            for tensor in {parameter, main}:
                tensor.copy_(found)
    for member in optimizer.chained_optimizers:
        inner = member.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                name = names[parameter]
                for slot, tensor in inner.state[parameter].items():
                    found = _whole(name, state[slot])
                    if found is None:
                        lost.append(f"{name} has no {slot}")
                    else:
                        tensor.copy_(found)
                counts = state[STEP]
                step = counts.get(name, counts.get(f"{name}_w"))
                if step is None:
                    if "exp_avg" in inner.state[parameter]:
                        lost.append(f"{name} has no {STEP}")
                else:
                    inner.state[parameter][STEP] = torch.tensor(float(step))
                    group[STEP] = int(step)  # as FusedAdam counts
    return lost


def _whole(name: str, tensors: Tensors) -> Any:
    """A tensor, which may be stored as gate and up; None if it is missing."""
    gate, up = tensors.get(f"{name}_w"), tensors.get(f"{name}_v")
    if gate is None or up is None:
        return tensors.get(name)
    return torch.cat([gate, up])
