"""Reports of a run: metrics for TensorBoard and Weights & Biases, and events (`megatron.TOLD`).

The last rank writes all metrics, under the same names for both. Facts of the run that tools need go
to `facts.json`, next to TensorBoard's files.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import megatron.training.global_vars as global_vars
import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.training import get_args, get_timers, print_rank_last

from megatron_muon import cpu
from megatron_muon.checkpoint import folders
from megatron_muon.core.ranks import is_first_rank, say
from megatron_muon.megatron import FACTS, FIRST_STEP, LOSS, tell, tells
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.provenance import origin
from megatron_muon.megatron.run_device import bf16_tflops
from megatron_muon.megatron.state_report import report_state
from megatron_muon.patching import Patches

_SHOWN_MATRICES = 5

_METRICS = {"tokens-per-second": "tokens_per_s", "mfu": "mfu", "optimizer-share": "optimizer_share"}
"""TensorBoard tags of figures of the event `step`."""

_STAGES = {
    "setup_model_and_optimizer": "building the model",
    "load_checkpoint": "loading the checkpoint",
    "build_train_valid_test_data_iterators": "reading the data",
    "train": FIRST_STEP,
}
"""Stages of a run, by the function of Megatron's module that they take."""


class Clock(NamedTuple):
    """Seconds at an iteration: wall time, and Megatron's timers of steps and optimizer."""

    iteration: int
    wall: float
    in_steps: float
    in_optimizer: float | None

    @classmethod
    def at(cls, iteration: int) -> Clock:
        """The time now, just after a log; the optimizer's timer needs --timing-log-level 1."""
        timers = get_timers()
        in_optimizer = None
        if get_args().timing_log_level >= 1:
            in_optimizer = timers("optimizer", log_level=1).active_time()
        return cls(iteration, time.monotonic(), timers("interval-time").active_time(), in_optimizer)


def show_progress(patches: Patches) -> None:
    """Report stages, speed and time left, and log Muon's metrics."""
    progress = Progress(on_gpu=torch.cuda.is_available())
    around = functools.partial(patches.around, training)
    logged = ["loss_dict", "iteration", "skipped_iter", "grad_norm"]
    around("get_megatron_optimizer")(progress.watch)
    around("train_step", takes=["iteration"])(progress.step)
    around("training_log", takes=logged)(progress.follow)
    for name, stage in _STAGES.items():
        around(name)(functools.partial(_tell_and_call, stage))
    around("evaluate_and_print_results", takes=["prefix", "iteration"])(progress.evaluate)
    around("evaluate", takes=["data_iterator", "model"])(progress.evaluate_set)
    around("save_checkpoint_and_time", takes=["iteration"])(save)


class Progress:
    """Reports a run by its optimizer, the times of its steps and its evaluations."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._gpu = torch.cuda.get_device_name() if on_gpu and not cpu.installed() else None
        self._optimizer: Any = None
        self._facts: dict[str, Any] = {}
        self._last_measured = 0
        self._skipped = 0
        self._first: Clock | None = None
        self._last: Clock | None = None
        self._evaluated_data = ""
        self._evaluated_at = 0
        self._set_names: Iterator[Any] = iter(())
        self._validated: int | None = None

    @property
    def _is_muon(self) -> bool:
        return isinstance(self._optimizer, MuonChainedOptimizer)

    def watch(
        self,
        build: Callable[..., Any],
        config: Any,
        model: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Wraps megatron.training's factory of the optimizer."""
        self._optimizer = build(config, model, *args, **kwargs)
        # of this model-parallel rank, as Megatron counts; Megatron-FSDP's parameters are whole
        # over tensor-parallel ranks
        parameters = 0
        for chunk in model:
            for parameter in chunk.parameters():
                parameters += getattr(parameter, "orig_param", parameter).numel()
        facts = self._optimizer.facts if self._is_muon else {}
        from_where = origin() if is_first_rank() else {}
        self._write_facts(**from_where, parameters=parameters, **facts)
        return self._optimizer

    def step(
        self,
        call: Callable[..., Any],
        *args: Any,
        iteration: int,
        **kwargs: Any,
    ) -> Any:
        """Wraps `train_step`: reports a step that is not finite before all ranks end."""
        result = call(*args, iteration=iteration, **kwargs)
        if result[3]:
            tell("diverged", step=iteration + 1)
            self._write_facts(diverged_at=iteration + 1)
        return result

    def follow(self, log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps megatron.training's log of an iteration."""
        logged = inspect.signature(log).bind(*args, **kwargs).arguments
        iteration = logged["iteration"]
        skipped = bool(logged["skipped_iter"])
        settings = get_args()
        is_first = self._first is None
        is_shown = is_first or iteration % settings.log_interval == 0
        loss = None
        if is_shown and tells():  # before Megatron resets its sums
            loss = mean_loss(logged["loss_dict"], logged["total_loss_dict"], skipped=skipped)
        result = log(*args, **kwargs)
        if is_first and not self._is_muon:  # Muon's factory has reported it
            self._write_facts(state_bytes=report_state(self._optimizer))
        self._skipped += skipped
        values: dict[str, float] = {}
        if skipped:
            values["skipped-iterations"] = 1.0
        rate = muon_rate(self._optimizer.param_groups)
        if rate is not None and iteration % settings.tensorboard_log_interval == 0:
            values["muon/learning-rate"] = rate
        if is_shown:
            figures = {
                "loss": loss,
                "grad_norm": logged["grad_norm"],
                "lr": logged["learning_rate"],
                "muon_lr": rate,
            }
            values |= self._report(settings, iteration, figures)
        self._log(values, iteration)
        return result

    def _report(self, settings: Any, iteration: int, figures: dict[str, Any]) -> dict[str, float]:
        """Report a step that is shown; the metrics to log."""
        peak = _peak_of_all_ranks()
        speed = self._speed(settings, Clock.at(iteration))
        tell(
            "step",
            step=iteration,
            steps=settings.train_iters,
            **figures,
            skipped=self._skipped or None,
            peak_bytes=peak,
            **speed,
        )
        self._skipped = 0
        failed = self._optimizer.skipped_updates() if self._is_muon else None
        if failed:
            print_rank_last(skipped_line(failed))
        values: dict[str, float] = {}
        if not settings.log_memory_to_tensorboard:
            values["mem-max-allocated-bytes"] = peak
        for tag, name in _METRICS.items():
            value = speed.get(name)
            if value is not None:
                values[tag] = value
        return values

    def _log(self, values: dict[str, float], iteration: int) -> None:
        """Log `values`, and under `muon/` the metrics of a step that was measured since."""
        metrics = getattr(getattr(self._optimizer, "metrics", None), "latest", None)
        if metrics is not None and metrics.step != self._last_measured:
            self._last_measured = metrics.step
            values |= {f"muon/{name}": value for name, value in metrics.values.items()}
        writer = global_vars.get_tensorboard_writer()
        if writer is not None:
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)

    def _write_facts(self, **facts: Any) -> None:
        """Add to the facts of the run, whose keys `FACTS` lists."""
        self._facts |= facts
        folder = get_args().tensorboard_dir
        if folder is not None and is_first_rank():
            Path(folder).mkdir(parents=True, exist_ok=True)
            with folders.written_at_once(Path(folder) / FACTS) as stream:
                stream.write(json.dumps(self._facts, indent=2) + "\n")

    def _speed(self, settings: Any, now: Clock) -> dict[str, float | None]:
        """Speed since the last log; empty at a start's first step, which is slow."""
        first = self._first
        last = self._last
        self._first = first or now
        self._last = now
        if first is None or last is None:
            return {}
        steps = now.iteration - last.iteration
        seconds = now.in_steps - last.in_steps
        share = None
        if now.in_optimizer is not None and last.in_optimizer is not None:
            share = (now.in_optimizer - last.in_optimizer) / seconds
        # since the first step, so that evaluations and saves count
        pace = (now.wall - first.wall) / (now.iteration - first.iteration)
        steps_left = max((settings.train_iters or 0) - now.iteration, 0)
        tokens = settings.global_batch_size * settings.seq_length
        return {
            "tokens_per_s": tokens * steps / seconds,
            "mfu": self._mfu(settings, seconds / steps),
            "optimizer_share": share,
            "seconds_left": steps_left * pace,
        }

    def _mfu(self, settings: Any, step_s: float) -> float | None:
        """The model's operations in a step, as Megatron counts, over the GPUs' peak in bf16."""
        peak = bf16_tflops(self._gpu) if self._gpu is not None else None
        if peak is None or settings.fp8 or settings.fp4 or not (settings.bf16 or settings.fp16):
            return None
        flops = training.num_floating_point_operations(settings, settings.global_batch_size)
        return float(flops / (step_s * settings.world_size * peak * 1e12))

    def evaluate(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `evaluate_and_print_results` of all sets; after training its prefix ends in " set".

        If --eval-interval has evaluated the last step, 0.19 evaluates it again on the samples that
        follow: a second number for the same weights. The first one counts.
        """
        given = inspect.signature(call).bind(*args, **kwargs).arguments
        settings = get_args()
        prefix = given["prefix"]
        data = "final validation" if prefix.endswith(" set") else "validation"
        if prefix.endswith("test set"):
            data = "test"
        if data == "final validation" and self._validated == given["iteration"]:
            say(f"megatron-muon: {prefix}: evaluated above, at --eval-interval")
            return None
        self._evaluated_data = data
        self._evaluated_at = given["iteration"]
        self._set_names = itertools.repeat("")
        if getattr(settings, "multiple_validation_sets", False):
            self._set_names = iter(settings.validation_set_names or itertools.count())
        result = _tell_and_call("evaluating", call, *args, **kwargs)
        tell("stage", stage=None)
        return result

    def evaluate_set(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `evaluate`, which evaluates one set."""
        result = call(*args, **kwargs)
        losses, _, is_out_of_time = result
        if is_out_of_time:  # 0.19 leaves its timer running, and fails if the test set is next
            get_timers()("evaluate").stop()
        elif self._evaluated_data == "validation":
            self._validated = self._evaluated_at
        what = f"{self._evaluated_data} loss {next(self._set_names, '')}".rstrip()
        if losses and LOSS in losses:
            tell("validation", step=self._evaluated_at, loss=float(losses[LOSS]), what=what)
        return result


def save(call: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Wraps `save_checkpoint_and_time`, which Megatron may call without --save (bad loss)."""
    folder = get_args().save
    if folder is None and not kwargs.get("non_persistent_ckpt"):
        say(f"megatron-muon: iteration {iteration} is not saved: there is no --save")
        return None
    began = time.monotonic()
    result = _tell_and_call("saving a checkpoint", call, iteration, *args, **kwargs)
    tell("saved", step=iteration, folder=folder, seconds=time.monotonic() - began)
    tell("stage", stage=None)
    return result


def _tell_and_call(stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tell("stage", stage=stage)
    return call(*args, **kwargs)


def _peak_of_all_ranks() -> float:
    """Largest peak memory of a rank in bytes; on a CPU its resident set. Collective."""
    peak = torch.tensor(torch.cuda.max_memory_allocated(), dtype=torch.float64, device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def mean_loss(
    losses: Mapping[str, Any], totals: Mapping[str, Any], *, skipped: bool
) -> float | None:
    """The mean loss since the last log, this step included, as in Megatron's log. Waits for it."""
    count = totals.get("advanced iterations", 0)
    total = totals.get(LOSS, 0.0)
    if not skipped:
        count += 1
        total = total + losses.get(LOSS, 0.0)  # not in place: the sums are Megatron's
    return float(total) / count if count and isinstance(total, torch.Tensor) else None


def skipped_line(skipped: Mapping[str, int]) -> str:
    """The warning of updates that were not finite, by matrix."""
    named = [f"{name} ({count})" for name, count in skipped.items()]
    shown = ", ".join(named[:_SHOWN_MATRICES])
    if len(named) > _SHOWN_MATRICES:
        shown += ", ..."
    return (
        f"megatron-muon: warning: updates that were not finite: {sum(skipped.values())}, of"
        f" {len(skipped)} matrices, which kept their weights: {shown}. If this goes on, their"
        " momentum is not finite either: resume from an earlier checkpoint"
    )


def muon_rate(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of Muon's parameters, if --muon-lr or --muon-min-lr sets it apart.

    megatron-core logs the rate of the first group with the run's own schedule.
    """
    for group in groups:
        if "optimizer" not in group and not group.get("default_config", True):
            return float(group["lr"])
    return None


def log_to_both(patches: Patches) -> None:
    """Give Weights & Biases every scalar that TensorBoard gets: 0.19 omits some.

    Metrics over samples are left out: their steps are not iterations.
    """

    @patches.around(global_vars, "_set_wandb_writer", takes=["args"])
    def set_wandb_writer(make: Callable[..., None], args: argparse.Namespace) -> None:
        if args.tensorboard_dir:
            folder = Path(args.tensorboard_dir).resolve().parent
            args.wandb_exp_name = args.wandb_exp_name or folder.name
            args.wandb_save_dir = args.wandb_save_dir or str(folder)
        make(args)
        wandb = global_vars.get_wandb_writer()
        writer = global_vars.get_tensorboard_writer()
        if wandb is None or writer is None:
            return

        @patches.around(writer, "add_scalar")
        def add_scalar(
            add: Callable[..., None],
            name: str,
            value: Any,
            step: int | None = None,
            *rest: Any,
            **kwargs: Any,
        ) -> None:
            add(name, value, step, *rest, **kwargs)
            if not name.endswith(" vs samples"):
                wandb.log({name: float(value)}, step)
