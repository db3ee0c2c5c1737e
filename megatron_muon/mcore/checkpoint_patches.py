"""The patches of megatron-core that fsdp_dtensor checkpoints need, one function each, for Muon and for Adam.

Saving: under `no_shard` too, never over the checkpoint that is there, with a tracker file that is always whole.
Loading: only what is complete, with the state that another optimizer left started afresh, and never in silence.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.checkpoint import content, files
from megatron_muon.errors import SaveError, UserError
from megatron_muon.mcore.scalar_state import initialize_scalar_state, step_over_empty_shards
from megatron_muon.patching import Patches, versions

_RATES = ("max_lr", "min_lr")
_FLOPS = "num_floating_point_operations_so_far"
_SHOWN = 5
"""Names listed in a message; the rest is counted."""


def install(patches: Patches, *, adam: bool) -> None:
    """Install what a run under Megatron-FSDP needs.

    Args:
        patches: records what is replaced, so that it can be undone.
        adam: the run's optimizer is built by megatron-core's own factory.
    """
    split_swiglu_of_replicas(patches)
    save_beside_and_rename(patches)
    write_tracker_at_once(patches)
    explain_failed_saves(patches)
    load_what_is_there(patches)
    explain_load_refusals(patches)
    remember_signals(patches)
    if adam:
        keep_adam_state_alike(patches)


def split_swiglu_of_replicas(patches: Patches) -> None:
    """Let fsdp_dtensor checkpoints split a SwiGLU's fused projection under `no_shard` too.

    0.19's handler cuts by `megatron_fsdp_slice`, the part of a matrix that a rank holds, which Megatron-FSDP sets on
    sharded parameters only, and makes its halves as shards. Here parameters that are whole get the slice that says so,
    and their halves are made whole.
    """
    import megatron.core.transformer.fsdp_dtensor_checkpoint as handlers
    import megatron.training.checkpointing as checkpointing

    make = handlers.make_fsdp_dtensor
    for name in ("is_sharded_param", "run_check"):
        if name not in inspect.signature(make).parameters:
            raise RuntimeError(f"cannot patch the SwiGLU handler: make_fsdp_dtensor takes no {name} in {versions()}")

    def make_whole(local_tensor: torch.Tensor, param: torch.Tensor, **kwargs: Any) -> Any:
        return make(local_tensor, param, **{**kwargs, "is_sharded_param": False})

    def around(handle: Callable[..., Any]) -> Callable[..., Any]:
        def handle_swiglu(model: Any, model_state: Any, optimizer_state: Any) -> Any:
            whole = [p for p in model.parameters() if _is_replica(p)]
            if not whole:
                return handle(model, model_state, optimizer_state)
            for parameter in whole:
                parameter.megatron_fsdp_slice = slice(0, parameter._local_tensor.numel())
            try:
                with _changed(handlers, "make_fsdp_dtensor", make_whole):
                    return handle(model, model_state, optimizer_state)
            finally:
                for parameter in whole:
                    del parameter.megatron_fsdp_slice

        return handle_swiglu

    patches.wrap(
        checkpointing,
        "handle_swiglu_in_state_dict",
        around,
        takes=["model", "model_state_dict", "optimizer_state_dict"],
    )


def _is_replica(parameter: Any) -> bool:
    return hasattr(parameter, "megatron_fsdp_dist_index") and not hasattr(parameter, "megatron_fsdp_slice")


@contextlib.contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def save_beside_and_rename(patches: Patches) -> None:
    """Write a checkpoint beside its place, and rename it when every rank's file is there in full.

    0.19 writes where the checkpoint is to be. A save that is cut off leaves a folder that looks like a checkpoint; one
    that repeats an iteration writes over the files of a checkpoint that `latest` may name.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def around(save: Callable[..., Any]) -> Callable[..., Any]:
        def save_beside(state_dict: Any, *args: Any, storage_writer: Any = None, **kwargs: Any) -> Any:
            folder = Path(getattr(storage_writer, "path", "."))
            if not isinstance(storage_writer, FileSystemWriter) or files.iteration_of(folder) is None:
                return save(state_dict, *args, storage_writer=storage_writer, **kwargs)
            try:
                _on_first_rank(lambda: files.begin(folder))
                storage_writer.reset(folder.with_name(folder.name + files.UNFINISHED))
                result = save(state_dict, *args, storage_writer=storage_writer, **kwargs)
                _on_first_rank(lambda: files.finish(folder))
            except (Exception, CheckpointException) as error:
                raise SaveError(
                    f"the checkpoint of iteration {files.iteration_of(folder)} could not be written to {folder.parent} "
                    f"({_reason(error)}{_free_space(folder.parent)}); {files.resume_hint(folder.parent)}"
                ) from error
            return result

        return save_beside

    patches.wrap(dcp, "save", around, takes=["state_dict", "storage_writer"])


def _on_first_rank(act: Callable[[], object]) -> None:
    """Do something on rank 0; every rank raises what it raises there."""
    failure: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            act()
        except Exception as error:
            failure = [f"rank 0: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise OSError(failure[0])


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, with the rank where it did."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (failure, *_) = min(failures.items())
        return f"rank {rank}: {_first_line(failure)}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # torch's writer says this, and nothing of the operating system's error, where a write fails half way.
    return "a file could not be written in full" if "unexpected pos" in line else line


def _free_space(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free / 2**30:.1f} GiB free there"
    except OSError:
        return ""


def write_tracker_at_once(patches: Patches) -> None:
    """Write `latest_checkpointed_iteration.txt` so that it is always whole.

    0.19 opens it for writing in place. Killed between that and the write, the run leaves an empty file, at which the
    next one stops.
    """
    import megatron.training.checkpointing as checkpointing

    text = "maybe_msc.open(tracker_filename, 'w')"
    if text not in inspect.getsource(inspect.unwrap(checkpointing.save_checkpoint)):
        raise RuntimeError(f"megatron.training.checkpointing.save_checkpoint no longer has {text} in {versions()}")
    client = checkpointing.maybe_msc

    class WithWholeTracker:
        """megatron-core's storage client, which writes the tracker at once where it is a plain file."""

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if mode == "w" and client.open is open and os.path.basename(path) == files.TRACKER:
                return _tracker(Path(path))
            return client.open(path, mode, *args, **kwargs)

    patches.replace(checkpointing, "maybe_msc", WithWholeTracker())


@contextlib.contextmanager
def _tracker(file: Path) -> Iterator[Any]:
    try:
        with files.written_at_once(file) as stream:
            yield stream
    except OSError as error:
        raise SaveError(f"{file} could not be written ({error}); {files.resume_hint(file.parent)}") from error


def explain_failed_saves(patches: Patches) -> None:
    """Say which checkpoint to resume from where a save fails outside of torch's part, as in making its folder."""
    import megatron.training.training as training

    def around(save: Callable[..., None]) -> Callable[..., None]:
        def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> None:
            try:
                save(iteration, *args, **kwargs)
            except OSError as error:
                from megatron.training import get_args

                save_dir = Path(get_args().save)
                raise SaveError(
                    f"the checkpoint of iteration {iteration} could not be written to {save_dir} ({error}); "
                    f"{files.resume_hint(save_dir)}"
                ) from error

        return save_checkpoint

    patches.wrap(training, "save_checkpoint", around, takes=["iteration"])


def load_what_is_there(patches: Patches) -> None:
    """Load complete checkpoints only, and start the state afresh that another optimizer did not keep.

    0.19 fails in the middle of a damaged checkpoint. Entries that it lacks are either all fatal, with a name of torch's
    inner workings, or all passed over in silence (--no-strict-fsdp-dtensor-load). Random-number states are stored for
    each data-parallel rank with --data-parallel-random-init, so more ranks than before find none; tensor-parallel ranks
    share theirs under Megatron-FSDP. The count of floating-point operations is stored and never asked for.
    """
    import megatron.training.checkpointing as checkpointing

    asked: dict[str, Any] = {}  # while _load_base_checkpoint runs: its folder, and what it was not asked for

    def around_load(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_base_checkpoint(load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any) -> Any:
            folder = _folder_to_load(load_dir, args)
            if folder is None:
                return load(load_dir, args, rank0, *rest, **kwargs)
            if rank0:
                _on_first_rank(lambda: files.recover(folder.parent))
                _require_complete(folder)
                return load(load_dir, args, rank0, *rest, **kwargs)
            asked.update(folder=folder)
            try:
                state, *others = load(load_dir, args, rank0, *rest, **kwargs)
                if state is not None and "rng_state" in asked:
                    state["rng_state"] = asked["rng_state"]
                _require_same_rates(asked.get("rates", {}), asked.get("settings", {}))
                for parameter, settings in asked.get("settings", {}).items():
                    state["optimizer"]["param_to_group_meta"][parameter].update(settings)
            finally:
                asked.clear()
            return state, *others

        return load_base_checkpoint

    def around_preprocess(preprocess: Callable[..., Any]) -> Callable[..., Any]:
        def preprocess_state_dict(args: Any, raw_state_dict: Any, model: Any) -> Any:
            state = preprocess(args, raw_state_dict, model)
            if "folder" not in asked:
                return state
            entries = content.read_entries(asked["folder"])
            allow = getattr(args, "muon_allow_missing_state", False)
            keep = _RATES if args.override_opt_param_scheduler else ()
            tensor_parallel = args.tensor_model_parallel_size
            state = _ask_for_what_is_there(
                state, entries, asked["folder"], allow_missing=allow, keep=keep, tensor_parallel=tensor_parallel
            )
            if "optimizer" in state:
                settings = state["optimizer"]["param_to_group_meta"]
                asked["settings"] = settings
                if not args.use_checkpoint_opt_param_scheduler:
                    asked["rates"] = {p: {k: meta[k] for k in _RATES if k in meta} for p, meta in settings.items()}
            if _FLOPS in entries:
                state[_FLOPS] = 0
            if state.get("rng_state") and not _holds_rng(state["rng_state"], entries):
                asked["rng_state"] = state.pop("rng_state")
                _tell("the checkpoint holds no random-number state for every rank of this layout; it starts anew")
            return state

        return preprocess_state_dict

    patches.wrap(checkpointing, "_load_base_checkpoint", around_load, takes=["load_dir", "args", "rank0"])
    patches.wrap(
        checkpointing,
        "preprocess_fsdp_dtensor_state_dict",
        around_preprocess,
        takes=["args", "raw_state_dict", "model"],
    )


def explain_load_refusals(patches: Patches) -> None:
    """Turn the assertions by which 0.19 refuses a checkpoint of another model or schedule into one-line messages."""
    import megatron.training.training as training

    def around(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            try:
                return load(*args, **kwargs)
            except AssertionError as refusal:
                schedule = "OptimizerParamScheduler" in str(refusal)
                if not schedule and "from checkpoint" not in str(refusal):
                    raise
                remedy = (
                    "use --override-opt-param-scheduler for this run's schedule, --use-checkpoint-opt-param-scheduler "
                    "for that of the checkpoint"
                    if schedule
                    else "give this run the flags that wrote it"
                )
                raise UserError(f"megatron-core refuses this checkpoint: {refusal}; {remedy}") from refusal

        return load_checkpoint

    patches.wrap(training, "load_checkpoint", around)


def _folder_to_load(load_dir: Any, args: Any) -> Path | None:
    """The folder that megatron-core is about to load; None where it finds none, or it is not of this format."""
    if load_dir is None or args.ckpt_format != "fsdp_dtensor" or args.non_persistent_ckpt_type is not None:
        return None
    save_dir = Path(load_dir)
    iteration = args.ckpt_step or files.latest(save_dir)
    if iteration is None:
        _tell_unfinished(save_dir)
        return None
    return save_dir / "release" if iteration == "release" else files.iteration_folder(save_dir, int(iteration))


def _require_complete(folder: Path) -> None:
    """Check a checkpoint's files on the first rank, for all.

    Raises:
        UserError: what is wrong with it, and which one to take instead.
    """
    found: list[str] = []
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = files.problems(folder)
        if found:
            iteration = files.iteration_of(folder)
            found = [f"{_some(found)}; {files.resume_hint(folder.parent, but=iteration)}"]
        else:
            _tell_unfinished(folder.parent)
    if dist.is_initialized():
        shared: list[Any] = [found]
        dist.broadcast_object_list(shared, src=0)
        found = shared[0]
    if found:
        raise UserError(f"this checkpoint cannot be loaded: {found[0]}")


def _require_same_rates(run: dict[str, dict[str, Any]], stored: dict[str, dict[str, Any]]) -> None:
    """Check that a checkpoint's learning rates, which groups would take on, are those of the run.

    megatron-core compares --lr and --min-lr alone, and takes the checkpoint's for groups even where it is told to
    override them.

    Raises:
        UserError: the first that differs.
    """
    for parameter, rates in run.items():
        for name, rate in rates.items():
            if stored[parameter][name] != rate:
                raise UserError(
                    f"the checkpoint has {name} {stored[parameter][name]:g} for {content.plain(parameter)}, this run "
                    f"{rate:g} (--lr, --min-lr, --muon-lr, --muon-min-lr); use --override-opt-param-scheduler for this "
                    "run's, --use-checkpoint-opt-param-scheduler for those of the checkpoint"
                )


def _ask_for_what_is_there(
    state: Any,
    entries: dict[str, Any],
    folder: Path,
    *,
    allow_missing: bool,
    keep: Sequence[str] = (),
    tensor_parallel: int = 1,
) -> Any:
    """The part of a state dict that a checkpoint can fill; what it cannot starts afresh, or is an error.

    Args:
        state: what the run wants: `model`, `optimizer` and more.
        entries: what the checkpoint holds.
        folder: the checkpoint, for messages.
        allow_missing: `--muon-allow-missing-state`.
        keep: settings of parameter groups that stay the run's.
        tensor_parallel: the run's tensor parallel size.

    Raises:
        UserError: a weight is missing or of another shape, or state is missing that should be there.
    """
    optimizer = state.get("optimizer")
    missing, fresh = content.compare(optimizer["state"], entries) if optimizer else (content.Missing(), set())
    if optimizer and (moved := content.laid_out_by_rank(optimizer["state"]) - fresh):
        stored = content.read_objects(folder, ["args"]).get("args")
        if getattr(stored, "tensor_model_parallel_size", tensor_parallel) != tensor_parallel:
            fresh |= moved
            missing.replaced |= {f"{name}.{slot}" for name in moved for slot in optimizer["state"][name]}
    weights = state.get("model", {})
    missing.misfits |= {f"{content.plain(name)} is not in it" for name in weights if f"model.{name}" not in entries}
    missing.misfits |= content.other_shapes("model.", weights, entries)
    if dist.is_initialized():  # ranks hold different experts, and must agree
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, missing)
        for other in everyone:
            missing.add(other)
    if missing.misfits:
        raise UserError(
            f"{folder} is of another model: {_some(sorted(missing.misfits))}; give this run its model flags"
        )
    if missing.absent and not allow_missing:
        raise UserError(
            f"{folder} lacks {len(missing.absent)} entries of optimizer state: {_some(sorted(missing.absent))}; "
            "use --muon-allow-missing-state to start them at zero, or --no-load-optim to load no optimizer state at all"
        )
    if lost := missing.absent | missing.replaced:
        by = "another optimizer or layout wrote this checkpoint" if missing.replaced else "it lacks them"
        _tell(
            f"{len(lost)} entries of optimizer state start at zero, because {by}: "
            f"{_some(sorted(content.plain(name) for name in lost))}"
        )
    if optimizer:
        state["optimizer"] = content.without_fresh(optimizer, fresh, entries, keep=keep)
    return state


def _holds_rng(rng_state: Any, entries: dict[str, Any]) -> bool:
    """Whether a checkpoint has the random-number states that this rank, and every other one, looks for."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    holds = all(name in entries for name in flatten_state_dict({"rng_state": rng_state})[0])
    if not dist.is_initialized():
        return holds
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, holds)
    return all(everyone)


def _tell_unfinished(save_dir: Path) -> None:
    for left in files.unfinished(save_dir):
        _tell(f"{left} is a save that did not finish; it is not used, and may be deleted")


def _tell(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"megatron-muon: warning: {text}", flush=True)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def remember_signals(patches: Patches) -> None:
    """Remember on every rank that a signal ended the run (`--exit-signal-handler`), so that the exit status can say so.

    0.19 writes a checkpoint then and exits with 0, like a run that has come to its end.
    """
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    def around(received: Callable[..., Any]) -> Callable[..., Any]:
        def signals_received(self: Any) -> Any:
            everyone = received(self)
            self.any_received = any(everyone)
            return everyone

        return signals_received

    patches.wrap(DistributedSignalHandler, "signals_received", around)


def keep_adam_state_alike(patches: Patches) -> None:
    """Give Adam under Megatron-FSDP its state from the start, on every rank alike, for shards without rows too.

    torch's AdamW keeps no state for empty shards, and a save, which runs collectives key by key, then never returns;
    where it has state for them, its counter must advance with the others', since a checkpoint holds one for all. And
    0.19 makes state before loading with an optimizer step, which leaves what the checkpoint lacks decayed by a step.
    """
    import megatron.training.training as training
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def around_factory(build: Callable[..., Any]) -> Callable[..., Any]:
        def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
            optimizer = build(*args, **kwargs)
            for member in getattr(optimizer, "chained_optimizers", [optimizer]):
                if not member.is_stub_optimizer and getattr(member, "init_state_fn", None) is not None:
                    initialize_scalar_state(member)
                    step_over_empty_shards(member.optimizer)
            return optimizer

        return get_megatron_optimizer

    def around_dummy(initialize: Callable[..., None]) -> Callable[..., None]:
        def init_optimizer_states_with_dummy_values(self: Any) -> None:
            if not all(p in self.optimizer.state for group in self.optimizer.param_groups for p in group["params"]):
                initialize(self)

        return init_optimizer_states_with_dummy_values

    patches.wrap(training, "get_megatron_optimizer", around_factory)
    patches.wrap(DistributedOptimizer, "_init_optimizer_states_with_dummy_values", around_dummy)
