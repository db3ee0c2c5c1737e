"""Reports of a run: metrics for TensorBoard and Weights & Biases, and events for a launcher.

The last rank writes metrics that Megatron lacks, and events (`megatron.REPORTS`). Facts of the run
go to `facts.json`, next to TensorBoard's files.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_muon.checkpoint import folders
from megatron_muon.megatron import FACTS, FIRST_STEP, LOSS, tell, tells
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.provenance import origin
from megatron_muon.megatron.state_report import report_state
from megatron_muon.megatron.upstream import (
    get_args,
    get_timers,
    global_vars,
    print_rank_last,
    training,
)
from megatron_muon.patching import Patches
from megatron_muon.ranks import is_first_rank, say

_STAGES = {  # by the function of Megatron's module
    "setup_model_and_optimizer": "building the model",
    "load_checkpoint": "loading the checkpoint",
    "build_train_valid_test_data_iterators": "reading the data",
    "train": FIRST_STEP,
    "evaluate_and_print_results": "evaluating",
    "save_checkpoint_and_time": "saving a checkpoint",
}


_TAGS = {"tokens_per_s": "tokens-per-second", "optimizer_share": "optimizer-share"}
_SHOWN_MATRICES = 5


class Clock(NamedTuple):
    """Seconds at an iteration: wall time, and Megatron's timers of steps and optimizer."""

    iteration: int
    wall: float
    in_steps: float
    in_optimizer: float | None


def clock(iteration: int) -> Clock:
    """The time now, just after a log; the optimizer's timer needs --timing-log-level 1."""
    timers = get_timers()
    in_optimizer = None
    if get_args().timing_log_level >= 1:
        in_optimizer = timers("optimizer", log_level=1).active_time()
    return Clock(iteration, time.monotonic(), timers("interval-time").active_time(), in_optimizer)


def show_progress(patches: Patches) -> None:
    """Report stages, speed and time left, and log Muon's metrics."""
    progress = Progress()
    around = functools.partial(patches.around, training)
    around("get_megatron_optimizer")(progress.keep_optimizer)
    around("train")(progress.train)
    around("train_step")(progress.step)
    around("checkpoint_and_decide_exit")(progress.decide_exit)
    around("training_log")(progress.log)
    around("evaluate")(progress.evaluate)
    around("evaluate_and_print_results")(progress.name_evaluation)
    around("save_checkpoint_and_time")(save)
    for name, stage in _STAGES.items():
        around(name)(functools.partial(_tell_and_call, stage))


class Progress:
    """Reports a run by its optimizer, the times of its steps and its evaluations."""

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._losses: list[torch.Tensor] = []
        self._last_measured = 0
        self._first: Clock | None = None
        self._last: Clock | None = None
        self._evaluation: dict[str, Any] = {}
        self._stops_for: Sequence[str] = ()  # faults

    def keep_optimizer(self, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps megatron.training's factory of the optimizer."""
        self._optimizer = build(*args, **kwargs)
        return self._optimizer

    def log(self, log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps megatron.training's log of an iteration."""
        logged = inspect.signature(log).bind(*args, **kwargs).arguments
        result = log(*args, **kwargs)
        iteration = logged["iteration"]
        settings = get_args()
        is_first = self._first is None
        is_interval = iteration % settings.log_interval == 0
        if LOSS in logged["loss_dict"] and not logged["skipped_iter"]:
            self._losses.append(logged["loss_dict"][LOSS].reshape(()))
        if is_first:
            self._write_facts(settings.tensorboard_dir)
        values: dict[str, float] = {}
        rate = muon_rate(self._optimizer.param_groups)
        if rate is not None and iteration % settings.tensorboard_log_interval == 0:
            values["muon/learning-rate"] = rate
        if is_first or is_interval:
            speed = self._speed(settings, clock(iteration))
            loss = None
            if self._losses and tells():  # waits for the device
                loss = float(torch.stack(self._losses).mean())
            tell(
                "step",
                step=iteration,
                steps=settings.train_iters,
                loss=loss,
                grad_norm=logged["grad_norm"],
                lr=logged["learning_rate"],
                muon_lr=rate,
                **speed,
            )
            self._warn_of_skipped()
            if is_interval:
                self._losses.clear()
            for name, tag in _TAGS.items():
                if name in speed:
                    values[tag] = speed[name]
        metrics = getattr(getattr(self._optimizer, "metrics", None), "latest", None)
        if metrics is not None and metrics.step != self._last_measured:
            self._last_measured = metrics.step
            values |= {f"muon/{name}": value for name, value in metrics.values.items()}
        write(values, iteration)
        return result

    def _warn_of_skipped(self) -> None:
        """Name the matrices whose updates were not finite since the last log."""
        skipped = {}
        if isinstance(self._optimizer, MuonChainedOptimizer):
            skipped = self._optimizer.skipped_updates()
        if skipped:
            named = ", ".join(list(skipped)[:_SHOWN_MATRICES])
            print_rank_last(
                f"megatron-muon: warning: updates of {len(skipped)} matrices were not finite, so"
                f" they kept their weights: {named}. If this goes on, their momentum is not finite"
                " either: resume from an earlier checkpoint"
            )

    def _write_facts(self, folder: str | None) -> None:
        """Write the facts of the run, whose keys `FACTS` lists. Collective."""
        if isinstance(self._optimizer, MuonChainedOptimizer):
            facts = self._optimizer.facts
        else:
            facts = {"state_bytes": report_state(self._optimizer)}
        if folder is not None and is_first_rank():
            Path(folder).mkdir(parents=True, exist_ok=True)
            with folders.written_at_once(Path(folder) / FACTS) as stream:
                stream.write(json.dumps({**origin(), **facts}, indent=2) + "\n")

    def _speed(self, settings: Any, now: Clock) -> dict[str, float]:
        """Speed since the last log; empty at a start's first step, which is slow."""
        first = self._first
        last = self._last
        self._first = first or now
        self._last = now
        if first is None or last is None:
            return {}
        seconds = now.in_steps - last.in_steps
        tokens = settings.global_batch_size * settings.seq_length
        # since the first step, so that evaluations and saves count
        pace = (now.wall - first.wall) / (now.iteration - first.iteration)
        steps_left = max((settings.train_iters or 0) - now.iteration, 0)
        speed = {
            "tokens_per_s": tokens * (now.iteration - last.iteration) / seconds,
            "seconds_left": steps_left * pace,
        }
        if now.in_optimizer is not None and last.in_optimizer is not None:
            speed["optimizer_share"] = (now.in_optimizer - last.in_optimizer) / seconds
        return speed

    def train(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `train`: ends it with status 1 after a fault, where megatron-core has 0."""
        try:
            return call(*args, **kwargs)
        except SystemExit:
            if self._stops_for:
                remedy = (
                    "the checkpoint of this step has the fault; use --ckpt-step to load another"
                )
                raise SystemExit("; ".join([*self._stops_for, remedy])) from None
            raise

    def step(self, call: Callable[..., Any], *args: Any, iteration: int, **kwargs: Any) -> Any:
        """Wraps `train_step`: reports a step that is not finite before ranks end, and faults."""
        muon = self._optimizer if isinstance(self._optimizer, MuonChainedOptimizer) else None
        if muon is not None:
            muon.iteration = iteration
        result = call(*args, iteration=iteration, **kwargs)
        if result[3]:
            tell("diverged", step=iteration + 1)
        for fault in muon.audit_faults if muon is not None else ():
            tell("audit", step=iteration + 1, fault=fault)
        return result

    def decide_exit(self, decide: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Wraps `checkpoint_and_decide_exit`: saves and ends after a fault, if so requested."""
        settings = get_args()
        faults = getattr(self._optimizer, "audit_faults", [])
        if not faults or settings.muon_audit_action != "stop":
            return decide(*args, **kwargs)
        self._stops_for = faults
        before = settings.exit_interval
        settings.exit_interval = 1
        try:
            return decide(*args, **kwargs)
        finally:
            settings.exit_interval = before

    def name_evaluation(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `evaluate_and_print_results`, which evaluates one or several sets."""
        given = inspect.signature(call).bind(*args, **kwargs).arguments
        self._evaluation = {"step": given["iteration"], "at": given["prefix"]}
        return call(*args, **kwargs)

    def evaluate(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `evaluate`, which evaluates one set."""
        result = call(*args, **kwargs)
        losses, _, is_out_of_time = result
        if is_out_of_time:  # 0.19 leaves its timer running, and fails if the test set is next
            get_timers()("evaluate").stop()
        if losses and LOSS in losses:
            tell("validation", loss=float(losses[LOSS]), **self._evaluation)
        return result


def save(call: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Wraps `save_checkpoint_and_time`, which Megatron may call without --save (bad loss)."""
    folder = get_args().save
    if folder is None and not kwargs.get("non_persistent_ckpt"):
        say(f"megatron-muon: iteration {iteration} is not saved: there is no --save")
        return None
    result = call(iteration, *args, **kwargs)
    tell("saved", step=iteration, folder=folder)
    return result


def write(values: Mapping[str, float], iteration: int) -> None:
    """Log metrics to TensorBoard and to Weights & Biases, on the rank that has their writers."""
    writer = global_vars.get_tensorboard_writer()
    if writer is not None:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    wandb = global_vars.get_wandb_writer()
    if wandb is not None and values:
        wandb.log(dict(values), iteration)


def muon_rate(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of Muon's parameters, if --muon-lr or --muon-min-lr sets it apart.

    megatron-core logs the rate of the first group with the run's own schedule.
    """
    for group in groups:
        if "optimizer" not in group and not group.get("default_config", True):
            return float(group["lr"])
    return None


def _tell_and_call(stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tell("stage", stage=stage)
    return call(*args, **kwargs)
