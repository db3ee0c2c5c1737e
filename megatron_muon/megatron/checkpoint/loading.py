"""The patches of megatron-core for loading checkpoints: no code of theirs is run, and every refusal is one line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_muon.checkpoint import content, folders
from megatron_muon.checkpoint.content import STEP
from megatron_muon.checkpoint.dcp import Planner, Reader
from megatron_muon.core.ranks import of_all_ranks, of_any_rank, of_first_rank, say
from megatron_muon.errors import UserError, reason_of
from megatron_muon.patching import Patches

_RATES = ("max_lr", "min_lr")
_FLOPS = "num_floating_point_operations_so_far"


def load_what_is_there(patches: Patches) -> None:
    """Load complete checkpoints only, and start the state afresh that another optimizer did not keep.

    0.19 fails in the middle of a damaged checkpoint. Entries that it lacks are either all fatal,
    with a name of torch's inner workings, or all passed over in silence
    (--no-strict-fsdp-dtensor-load). Random-number states are stored for each data-parallel rank
    with --data-parallel-random-init, so more ranks than before find none. The count of
    floating-point operations is stored and never asked for.
    """
    # while _load_base_checkpoint runs: its folder, and what it was not asked for
    asked: dict[str, Any] = {}

    @patches.around(checkpointing, "_load_base_checkpoint", takes=["load_dir", "args", "rank0"])
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
        if folder is None or rank0:
            return load(load_dir, args, rank0, *rest, **kwargs)
        asked.update(folder=folder, settings={}, rates={})
        try:
            state, *others = load(load_dir, args, rank0, *rest, **kwargs)
            if state is not None and "rng_state" in asked:
                state["rng_state"] = asked["rng_state"]
            _require_same_rates(asked["rates"], asked["settings"])
            for parameter, settings in asked["settings"].items():
                state["optimizer"]["param_to_group_meta"][parameter].update(settings)
        finally:
            asked.clear()
        return state, *others

    @patches.around(
        checkpointing,
        "preprocess_fsdp_dtensor_state_dict",
        takes=["args", "raw_state_dict", "model"],
    )
    def preprocess_state_dict(
        preprocess: Callable[..., Any], args: Any, raw_state_dict: Any, model: Any
    ) -> Any:
        state = preprocess(args, raw_state_dict, model)
        if "folder" not in asked:
            return state
        entries = content.read_entries(asked["folder"])
        theirs = ours = content.wrappers(content.optimized(entries))
        if "optimizer" in state:  # weights have the same names in every precision
            ours = content.wrappers(state["optimizer"]["param_to_group_meta"])
            state["optimizer"] = content.renamed(state["optimizer"], ours, theirs)
        state = _ask_for_what_is_there(state, entries, asked["folder"], args)
        if "optimizer" in state:
            stored = state["optimizer"]["param_to_group_meta"]
            asked["settings"] = settings = {
                ours + name.removeprefix(theirs): meta for name, meta in stored.items()
            }
            if not args.use_checkpoint_opt_param_scheduler:
                asked["rates"] = {
                    p: {k: meta[k] for k in _RATES if k in meta} for p, meta in settings.items()
                }
        if _FLOPS in entries:
            state[_FLOPS] = 0
        if state.get("rng_state"):
            wanted = flatten_state_dict({"rng_state": state["rng_state"]})[0]
            if not all(of_all_ranks(all(name in entries for name in wanted))):
                asked["rng_state"] = state.pop("rng_state")
                _warn(
                    "the checkpoint holds no random-number state for every rank of this layout; it"
                    " starts anew"
                )
        return state


def explain_load_refusals(patches: Patches) -> None:
    """Turn the assertions by which 0.19 refuses a checkpoint of another model or schedule into one-line messages."""

    @patches.around(training, "load_checkpoint")
    def load_checkpoint(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except AssertionError as refusal:
            if "OptimizerParamScheduler" in str(refusal):
                schedules = (
                    "this run's schedule, --use-checkpoint-opt-param-scheduler for that of the"
                    " checkpoint"
                )
                remedy = f"use --override-opt-param-scheduler for {schedules}"
            elif "from checkpoint" in str(refusal):
                remedy = "give this run the flags that wrote it"
            else:
                raise
            raise UserError(
                f"megatron-core refuses this checkpoint: {refusal}; {remedy}"
            ) from refusal


def keep_loaded_main_weights(patches: Patches) -> None:
    """Let a bf16 run load weights without optimizer state (--no-load-optim, --finetune).

    0.19 then copies the model's weights to the main weights, which it does not implement for
    Megatron-FSDP. There the main weights are what is saved and loaded, and loading them has
    installed the model's.
    """
    loading: list[bool] = []

    @patches.around(training, "load_checkpoint")
    def load_checkpoint(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loading.append(True)
        try:
            return load(*args, **kwargs)
        finally:
            loading.pop()

    @patches.around(DistributedOptimizer, "_copy_model_params_to_main_params", takes=["state_dict"])
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
    """Read a checkpoint's index and its entries without running what their pickles name.

    torch's reader and planner, up to 2.13 at least, call `pickle.load` and
    `torch.load(weights_only=False)`. So whoever can write to a checkpoint can run any command where
    it is loaded. What cannot be read is a line that names the rank and the reason.
    """
    patches.replace(FileSystemReader, "read_metadata", Reader.read_metadata, takes=["kwargs"])
    patches.replace(
        DefaultLoadPlanner, "load_bytes", Planner.load_bytes, takes=["read_item", "value"]
    )

    @patches.around(checkpointing, "_load_base_checkpoint", takes=["load_dir", "args"])
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
    """The folder that megatron-core is about to load; None where it finds none, or it is not of this format."""
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
        _warn_of_unfinished(Path(load_dir))
        return None
    return folders.iteration_folder(Path(load_dir), iteration)


def _warn_of_unfinished(save_dir: Path) -> None:
    for left in sorted(save_dir.glob(f"iter_*{folders.UNFINISHED}")):
        _warn(f"{left} is a save that did not finish; it is not used, and may be deleted")


def _require_sound(folder: Path, *, verify: bool) -> None:
    """Refuse a checkpoint that is not complete, or whose files are not as they were written. Collective.

    The first rank looks for all, because what a file server shows to one rank, another may not see
    yet; then each file is read by one rank.
    """

    def refuse(found: list[str]) -> None:
        if found:
            hint = folders.resume_hint(folder.parent, but=folders.iteration_of(folder))
            raise UserError(f"this checkpoint cannot be loaded: {content.some(found)}; {hint}")

    def look() -> dict[str, int] | None:
        folders.recover(folder.parent)
        refuse(folders.problems(folder, verify=verify))
        _warn_of_unfinished(folder.parent)
        return folders.read_checksums(folder) if verify else {}

    sums = of_first_rank(look)
    if sums is None:
        say(f"megatron-muon: note: {folders.without_checksums(folder)}")
    elif dist.is_initialized():  # else --use-checkpoint-args reads some arguments
        mine = folders.changed(
            folder, sums, folders.share(sums, dist.get_rank(), dist.get_world_size())
        )
        refuse(list(itertools.chain(*of_all_ranks(mine))))


def _require_same_rates(run: dict[str, dict[str, Any]], stored: dict[str, dict[str, Any]]) -> None:
    """Refuse learning rates of a checkpoint, which groups would take on, that are not those of the run.

    megatron-core compares --lr and --min-lr alone, and takes the checkpoint's for groups even where
    it is told to override them.
    """
    for parameter, name, rate in (
        (p, name, rate) for p, rates in run.items() for name, rate in rates.items()
    ):
        if (theirs := stored[parameter][name]) != rate:
            raise UserError(
                f"the checkpoint has {name} {theirs:g} for {content.plain(parameter)}, this run"
                f" {rate:g} (--lr, --min-lr, --muon-lr, --muon-min-lr); use"
                " --override-opt-param-scheduler for this run's,"
                " --use-checkpoint-opt-param-scheduler for those of the checkpoint"
            )


def _ask_for_what_is_there(state: Any, entries: Mapping[str, Any], folder: Path, args: Any) -> Any:
    """The part of a state dict that a checkpoint with these entries can fill; what it cannot starts afresh.

    Refused is a weight that is missing, of another shape or, with --strict-fsdp-dtensor-load, the
    checkpoint's alone, and, without --muon-allow-missing-state, state that should be there.
    Collective.
    """
    optimizer, weights = state.get("optimizer"), state.get("model", {})
    replaced, absent = content.compare(optimizer["state"] if optimizer else {}, entries)
    fresh = {name.rpartition(".")[0] for name in replaced | absent}
    if optimizer and (moved := content.laid_out_by_rank(optimizer["state"]) - fresh):
        stored, size = content.read(folder, ["args"]).get("args"), args.tensor_model_parallel_size
        if getattr(stored, "tensor_model_parallel_size", size) != size:
            fresh |= moved
            replaced |= {f"{name}.{slot}" for name in moved for slot in optimizer["state"][name]}
    misfits = {
        f"{content.plain(name)} is not in it" for name in weights if f"model.{name}" not in entries
    }
    misfits |= content.other_shapes("model.", weights, entries)
    # ranks hold different experts, and must agree
    everywhere = of_all_ranks((replaced, absent, misfits))
    replaced, absent, misfits = (set().union(*of_each) for of_each in zip(*everywhere, strict=True))
    if misfits:
        raise UserError(
            f"{folder} is of another model: {content.some(misfits)}; give this run its model flags"
        )
    dropped = _dropped(weights, entries)
    if dropped and args.strict_fsdp_dtensor_load:
        which = f"this one lacks {len(dropped)} of its weights: {content.some(dropped)}"
        remedy = "give this run its model flags, or --no-strict-fsdp-dtensor-load to leave them out"
        raise UserError(f"{folder} is of another model: {which}; {remedy}")
    if dropped:
        _warn(
            f"weights of the checkpoint that this model lacks are left out, {len(dropped)}:"
            f" {content.some(dropped)}"
        )
    if absent and not args.muon_allow_missing_state:
        names = content.some(map(content.plain, absent))
        raise UserError(
            f"{folder} lacks {len(absent)} entries of optimizer state: {names}; use"
            " --muon-allow-missing-state to start them at zero, or --no-load-optim to load no"
            " optimizer state at all"
        )
    if lost := set(map(content.plain, absent | replaced)):
        by = "another optimizer or layout wrote this checkpoint" if replaced else "it lacks them"
        _warn(
            f"{len(lost)} entries of optimizer state start at zero, because {by}:"
            f" {content.some(lost)}"
        )
    if optimizer:
        optimizer, kept = carry_step_counts_over(optimizer, fresh, entries, folder)
        kept += _RATES if args.override_opt_param_scheduler else ()
        state["optimizer"] = content.without_fresh(optimizer, fresh, entries, keep=kept)
    return state


def _dropped(weights: Mapping[str, Any], entries: Mapping[str, Any]) -> list[str]:
    """Weights of a checkpoint that no rank's model takes. Collective: ranks hold different experts.

    The states that Transformer Engine keeps of fp8 are none: megatron-core neither saves nor loads
    them in this format.
    """
    stored = sorted(
        name for name in content.weight_names(entries) if not name.endswith("._extra_state")
    )
    taken = of_any_rank([name.removeprefix("model.") in weights for name in stored])
    left = [name for name, is_taken in zip(stored, taken, strict=True) if not is_taken]
    return [content.plain(name.removeprefix("model.")) for name in left]


def carry_step_counts_over(
    optimizer: dict[str, Any], fresh: set[str], entries: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Set Adam's counts of steps that a checkpoint keeps in another form, in the run's state dict `optimizer`.

    torch's AdamW counts for each parameter, in its state; the FusedAdam of Transformer Engine and
    Apex for each group, in its settings, as an integer or (capturable) a tensor. Without the count
    Adam's bias correction starts again and its first updates are too large.

    Parameters that start `fresh` keep theirs. Returns the part of the state dict that is still to
    be asked for, and the settings not to ask for.
    """
    state, settings = optimizer["state"], optimizer["param_to_group_meta"]
    held = content.optimizer_slots(entries)
    in_state = [
        n for n in state if STEP in state[n] and n not in fresh and STEP not in held.get(n, ())
    ]
    in_groups = []
    for name, meta in settings.items():
        if STEP in meta and not fresh & {name, f"{name}_w"}:
            entry = entries.get(content.setting(name, STEP))
            if entry is None or isinstance(meta[STEP], torch.Tensor) != hasattr(entry, "size"):
                in_groups.append(name)
    if not in_state and not in_groups:
        return optimizer, ()
    counts = content.step_counts(folder)
    for name in in_state:
        state[name][STEP].fill_(counts[content.whole_name(content.plain(name), counts)])
    # whose parameters share one dict
    groups = {id(settings[name]): settings[name] for name in in_groups}
    for group, meta in groups.items():
        found = {
            counts.get(content.plain(name), 0) for name in in_groups if id(settings[name]) == group
        }
        count = max(found)
        meta[STEP] = (
            torch.full_like(meta[STEP], count) if isinstance(meta[STEP], torch.Tensor) else count
        )
        if len(found) > 1:
            _warn(
                f"Adam counts by group here, the checkpoint has {min(found)} to {count} steps in"
                f" one; it takes {count}"
            )
    others = {
        name: {slot: value for slot, value in state[name].items() if slot != STEP}
        for name in in_state
    }
    return {**optimizer, "state": {**state, **others}}, (STEP,) if in_groups else ()


def _warn(text: str) -> None:
    say(f"megatron-muon: warning: {text}")
