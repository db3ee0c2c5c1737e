"""Patches of megatron-core for loading checkpoints: they run no code, and each error is a line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_muon.checkpoint import content, folders
from megatron_muon.checkpoint.content import STEP
from megatron_muon.checkpoint.dcp import Planner, Reader
from megatron_muon.checkpoint.torch_dist import is_torch_dist
from megatron_muon.errors import UserError, reason_of
from megatron_muon.megatron.checkpoint.from_ddp import TorchDistSource
from megatron_muon.megatron.upstream import DistributedOptimizer, checkpointing, training
from megatron_muon.patching import Patches
from megatron_muon.ranks import of_all_ranks, of_any_rank, of_first_rank, say

_RATES = ("max_lr", "min_lr")
_FLOPS = "num_floating_point_operations_so_far"


def load_what_is_there(patches: Patches) -> None:
    """Load complete checkpoints only, and start state at zero that another optimizer did not keep.

    0.19 fails in the middle of a damaged checkpoint. Missing entries are either all fatal, with an
    internal name of torch's, or all ignored in silence (--no-strict-fsdp-dtensor-load).
    Random-number states are stored for each tensor-parallel rank, so more ranks than before find
    none. The count of floating-point operations is stored and never loaded.
    """
    # while _load_base_checkpoint runs: its folder, and the state that it does not load
    loading: dict[str, Any] = {}

    @patches.around(checkpointing, "_load_base_checkpoint")
    def load_base_checkpoint(
        load: Callable[..., Any],
        load_dir: Any,
        args: Any,
        rank0: bool = False,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        folder = _folder_to_load(load_dir, args)
        if folder is not None and rank0:
            _require_sound(folder, verify=args.verify_checkpoint)
        source = None
        if folder is not None and is_torch_dist(folder):
            source = TorchDistSource(folder)
            load = partial(_load_torch_dist, source)
            if rank0:
                return load(load_dir, args, rank0)
        if folder is None or rank0:
            return load(load_dir, args, rank0, *rest, **kwargs)
        loading.update(folder=folder, source=source, settings={}, rates={})
        try:
            state, *others = load(load_dir, args, rank0, *rest, **kwargs)
            if state is not None and "rng_state" in loading:
                state["rng_state"] = loading["rng_state"]
            _require_same_rates(loading["rates"], loading["settings"])
            for parameter, settings in loading["settings"].items():
                state["optimizer"]["param_to_group_meta"][parameter].update(settings)
        finally:
            loading.clear()
        return state, *others

    @patches.around(checkpointing, "preprocess_fsdp_dtensor_state_dict")
    def preprocess_state_dict(
        preprocess: Callable[..., Any], args: Any, raw_state_dict: Any, model: Any
    ) -> Any:
        state = preprocess(args, raw_state_dict, model)
        if "folder" not in loading:
            return state
        source = loading["source"]
        if source is None:
            entries = content.read_entries(loading["folder"])
            left_over = _left_over(state.get("model", {}), entries)
        else:
            entries = source.entries(state, model)
            left_over = source.left_over
        state = _requested_state(state, entries, loading["folder"], args)
        _require_no_more(left_over, loading["folder"], args)
        if "optimizer" in state:
            settings = state["optimizer"]["param_to_group_meta"]
            loading["settings"] = settings
            if not args.use_checkpoint_opt_param_scheduler:
                loading["rates"] = {name: _rates(meta) for name, meta in settings.items()}
        if _FLOPS in entries:
            state[_FLOPS] = 0
        if source is None and state.get("rng_state"):
            wanted = flatten_state_dict({"rng_state": state["rng_state"]})[0]
            if not all(of_all_ranks(all(name in entries for name in wanted))):
                loading["rng_state"] = state.pop("rng_state")
                _warn(
                    "the checkpoint holds no random-number state for every rank of this layout; it"
                    " starts anew"
                )
        return state


def _load_torch_dist(
    source: TorchDistSource,
    load_dir: Any,
    args: Any,
    rank0: bool = False,
    sharded_state_dict: Any = None,
    **_: Any,
) -> Any:
    """megatron-core's _load_base_checkpoint for a checkpoint of another format. Collective."""
    found = source.folder, source.is_release, checkpointing.CheckpointType.FSDP_DTENSOR
    checkpointing.set_loaded_iteration(source.common["iteration"])
    if rank0:
        return source.common, *found
    state = dict(sharded_state_dict)
    (model,) = state.pop("_model")
    source.warn_of_other_settings(args)
    source.load(checkpointing.preprocess_fsdp_dtensor_state_dict(args, state, model))
    source.load_objects(state)
    return state, *found


def _rates(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: meta[name] for name in _RATES if name in meta}


def explain_other_schedules(patches: Patches) -> None:
    """Name the flags that resolve 0.19's assertion on a checkpoint of another schedule."""

    @patches.around(training, "load_checkpoint")
    def load_checkpoint(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except AssertionError as refusal:
            if "OptimizerParamScheduler" not in str(refusal):
                raise
            raise UserError(
                f"megatron-core refuses this checkpoint: {refusal}; use"
                " --override-opt-param-scheduler for this run's schedule,"
                " --use-checkpoint-opt-param-scheduler for that of the checkpoint"
            ) from refusal


def keep_loaded_main_weights(patches: Patches) -> None:
    """Let a bf16 run load weights without optimizer state (--no-load-optim, --finetune).

    0.19 then copies the model's weights to the main weights, which it does not implement for
    Megatron-FSDP. There the main weights are saved and loaded, and loading them has installed the
    model's.
    """
    loading: list[bool] = []

    @patches.around(training, "load_checkpoint")
    def load_checkpoint(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loading.append(True)
        try:
            return load(*args, **kwargs)
        finally:
            loading.pop()

    @patches.around(DistributedOptimizer, "_copy_model_params_to_main_params")
    def copy_model_params_to_main_params(
        copy: Callable[..., None], self: Any, state_dict: Any = None
    ) -> None:
        if (
            not loading
            or not self.ddp_config.use_megatron_fsdp
            or hasattr(self.optimizer, "sub_optimizers")
        ):
            copy(self, state_dict)


def run_no_pickles(patches: Patches) -> None:
    """Read a checkpoint's index and entries without running code that their pickles name.

    torch's reader and planner, up to 2.13 at least, call `pickle.load` and
    `torch.load(weights_only=False)`. So whoever can write to a checkpoint can run any command where
    it is loaded. A read error is one line with the rank and the reason.
    """
    patches.replace(FileSystemReader, "read_metadata", Reader.read_metadata, takes=["kwargs"])
    patches.replace(
        DefaultLoadPlanner, "load_bytes", Planner.load_bytes, takes=["read_item", "value"]
    )

    @patches.around(checkpointing, "_load_base_checkpoint")
    def load_base_checkpoint(
        load: Callable[..., Any], load_dir: Any, args: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        try:
            return load(load_dir, args, *rest, **kwargs)
        except CheckpointException as failure:
            named = args.ckpt_step or folders.latest(Path(load_dir))
            why = f"the checkpoint {named} in {load_dir} cannot be loaded ({reason_of(failure)})"
            raise UserError(f"{why}; {folders.resume_hint(Path(load_dir), but=named)}") from failure


def _folder_to_load(load_dir: Any, args: Any) -> Path | None:
    """The folder that megatron-core is about to load; None without one, or in another format."""
    if (
        load_dir is None
        or args.ckpt_format != "fsdp_dtensor"
        or args.non_persistent_ckpt_type is not None
    ):
        return None
    # also with --ckpt-step: megatron-core reads it and stops at a damaged one
    named = folders.latest(Path(load_dir))
    iteration = args.ckpt_step or named
    if iteration is None:
        return None
    return folders.iteration_folder(Path(load_dir), iteration)


def _require_sound(folder: Path, *, verify: bool) -> None:
    """Refuse a checkpoint that is incomplete or was changed after it was written. Collective.

    The first rank looks for all, because ranks may not see the same files on a file server yet;
    then each file is read by one rank.
    """

    def refuse(found: list[str]) -> None:
        if found:
            hint = folders.resume_hint(folder.parent, but=folders.iteration_of(folder))
            raise UserError(f"this checkpoint cannot be loaded: {content.some(found)}; {hint}")

    def look() -> dict[str, int] | None:
        folders.recover(folder.parent)
        refuse(folders.problems(folder, verify=verify))
        return folders.read_checksums(folder) if verify else {}

    sums = of_first_rank(look)
    if sums is None:
        say(f"megatron-muon: note: {folders.without_checksums(folder)}")
    elif dist.is_initialized():  # else --use-checkpoint-args reads some arguments
        mine = folders.changed(
            folder, sums, folders.share(sums, dist.get_rank(), dist.get_world_size())
        )
        refuse(list(itertools.chain(*of_all_ranks(mine))))


def _require_same_rates(
    run: dict[str, dict[str, Any]],
    stored: dict[str, dict[str, Any]],
) -> None:
    """Refuse learning rates of a checkpoint that differ from the run's: groups would take them on.

    megatron-core compares --lr and --min-lr alone, and takes the checkpoint's for groups even with
    --override-opt-param-scheduler.
    """
    for parameter, rates in run.items():
        for name, rate in rates.items():
            theirs = stored[parameter][name]
            if theirs == rate:
                continue
            difference = f"{name} {theirs:g} for {content.plain(parameter)}, this run {rate:g}"
            raise UserError(
                f"the checkpoint has {difference} (--lr, --min-lr, --muon-lr, --muon-min-lr); use"
                " --override-opt-param-scheduler for this run's,"
                " --use-checkpoint-opt-param-scheduler for those of the checkpoint"
            )


def _requested_state(state: Any, entries: Mapping[str, Any], folder: Path, args: Any) -> Any:
    """The part of a state dict that a checkpoint with these entries can fill; the rest stays.

    Refuses weights that are missing or have another shape, and without --muon-allow-missing-state
    missing state. Collective.
    """
    optimizer, weights = state.get("optimizer"), state.get("model", {})
    replaced, absent = content.compare(optimizer["state"] if optimizer else {}, entries)
    if optimizer:
        replaced |= _reordered(optimizer["state"], folder, args) - absent
        absent |= _uncounted(optimizer, entries) - replaced
    fresh = {name.rpartition(".")[0] for name in replaced | absent}
    missing = [name for name in weights if f"model.{name}" not in entries]
    misfits = {f"{content.plain(name)} is not in it" for name in missing}
    misfits |= content.other_shapes("model.", weights, entries)
    # ranks hold different experts, and must agree
    everywhere = list(zip(*of_all_ranks((replaced, absent, misfits)), strict=True))
    replaced, absent, misfits = (set().union(*of_ranks) for of_ranks in everywhere)
    if misfits:
        remedy = _padding(weights, entries, args) or "give this run its model flags"
        raise UserError(f"{folder} is of another model: {content.some(misfits)}; {remedy}")
    if absent and not args.muon_allow_missing_state:
        names = content.some(map(content.plain, absent))
        raise UserError(
            f"{folder} lacks {len(absent)} entries of optimizer state: {names}; use"
            " --muon-allow-missing-state to start them at zero, or --no-load-optim to load no"
            " optimizer state at all"
        )
    if lost := set(map(content.plain, absent | replaced)):
        by = "another optimizer or layout wrote this checkpoint" if replaced else "it lacks them"
        count = f"{len(lost)} entries of optimizer state"
        _warn(f"{count} start at zero, because {by}: {content.some(lost)}")
    if optimizer:
        kept = _RATES if args.override_opt_param_scheduler else ()
        state["optimizer"] = content.without_fresh(optimizer, fresh, entries, keep=kept)
    return state


def _reordered(
    state: Mapping[str, Mapping[str, Any]],
    folder: Path,
    args: Any,
) -> set[str]:
    """State whose rows are in another order in a checkpoint of another tensor-parallel size."""
    reordered = content.laid_out_by_rank(state)
    if not reordered:
        return set()
    size = args.tensor_model_parallel_size
    stored = content.read(folder, ["args"]).get("args")
    if getattr(stored, "tensor_model_parallel_size", size) == size:
        return set()
    return {f"{name}.{slot}" for name in reordered for slot in state[name]}


def _uncounted(optimizer: Mapping[str, Any], entries: Mapping[str, Any]) -> set[str]:
    """State of FusedAdam, which counts steps by group, where the checkpoint counts otherwise.

    A count that starts at zero beside old moments would make the first updates too large.
    """
    settings = optimizer["param_to_group_meta"]
    found = set()
    for name, slots in optimizer["state"].items():
        whole = content.whole_name(name, settings)
        if STEP in settings[whole] and content.setting(whole, STEP) not in entries:
            found |= {f"{name}.{slot}" for slot in slots}
    return found


def _padding(weights: Mapping[str, Any], entries: Mapping[str, Any], args: Any) -> str:
    """The flag that pads the vocabulary as in a checkpoint; empty if that is not the difference."""
    for name, tensor in weights.items():
        stored = getattr(entries.get(f"model.{name}"), "size", tensor.shape)
        is_table = name.endswith(".word_embeddings.weight")
        if not is_table or stored == tensor.shape or stored[1:] != tensor.shape[1:]:
            continue
        multiple, rest = divmod(stored[0], args.tensor_model_parallel_size)
        if rest == 0 and stored[0] >= (args.vocab_size or 0):
            return f"for the same padding, use --make-vocab-size-divisible-by {multiple}"
    return ""


def _require_no_more(left_over: list[str], folder: Path, args: Any) -> None:
    """Refuse a checkpoint with weights that the model lacks, unless they may be left out."""
    if not left_over:
        return
    count, names = len(left_over), content.some(left_over)
    if args.strict_fsdp_dtensor_load:
        remedy = "give this run its model flags, or --no-strict-fsdp-dtensor-load to leave them out"
        raise UserError(
            f"{folder} is of another model: this one lacks {count} of its weights: {names};"
            f" {remedy}"
        )
    _warn(f"weights of the checkpoint that this model lacks are left out, {count}: {names}")


def _left_over(weights: Mapping[str, Any], entries: Mapping[str, Any]) -> list[str]:
    """Weights of a checkpoint that no rank's model has. Collective: ranks hold different experts.

    Transformer Engine's fp8 states do not count: megatron-core neither saves nor loads them in this
    format.
    """
    stored = sorted(
        name for name in content.weight_names(entries) if not name.endswith("._extra_state")
    )
    taken = of_any_rank([name.removeprefix("model.") in weights for name in stored])
    left = [name for name, is_taken in zip(stored, taken, strict=True) if not is_taken]
    return [content.plain(name.removeprefix("model.")) for name in left]


def _warn(text: str) -> None:
    say(f"megatron-muon: warning: {text}")
