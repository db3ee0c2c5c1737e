"""What a run reports: a line after each of Megatron's iteration lines, metrics, and the events of `megatron.TOLD`.

Metrics go to TensorBoard, and from there (`monitoring`) to Weights & Biases; what tools want to know of the run goes
into `facts.json`, beside TensorBoard's files.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.training import get_args, print_rank_last
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_muon import cpu
from megatron_muon.checkpoint import files
from megatron_muon.core.ranks import is_first_rank
from megatron_muon.megatron import FACTS, FIRST_STEP, LOSS
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.gpu import bf16_tflops
from megatron_muon.megatron.patches.monitoring import show_facts
from megatron_muon.megatron.provenance import origin
from megatron_muon.megatron.state import report_state
from megatron_muon.megatron.tell import tell, tells
from megatron_muon.patching import Patches

_SHOWN_MATRICES = 5
_TICK_S = 1.0
_METRICS = {"tokens-per-second": "tokens_per_s", "mfu": "mfu", "optimizer-share": "optimizer_share"}
_STAGES = {
    "setup_model_and_optimizer": "building the model",
    "load_checkpoint": "loading the checkpoint",
    "build_train_valid_test_data_iterators": "reading the data",
    "train": FIRST_STEP,
}
"""What a training does in functions of Megatron's module."""


class Stopwatch:
    """Adds up the seconds that calls take, until they are asked for; of GPU work as the GPU itself counts."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._spans: list[tuple[Any, Any]] = []

    def time(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `call` returns."""
        start = self._now()
        result = call(*args, **kwargs)
        self._spans.append((start, self._now()))
        return result

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> tuple[int, float]:
        """How many calls since the last time, and their seconds; waits for the GPU."""
        spans, self._spans = self._spans, []
        if self._on_gpu and spans:
            spans[-1][1].synchronize()
        seconds = (start.elapsed_time(end) / 1e3 if self._on_gpu else end - start for start, end in spans)
        return len(spans), float(sum(seconds))


def show_progress(patches: Patches, *, on_gpu: bool) -> None:
    """Report what a training does, with speed and time left, and log Muon's metrics."""
    progress = Progress(on_gpu=on_gpu)
    patches.around(training, "get_megatron_optimizer")(progress.watch)
    patches.around(training, "train_step", takes=["iteration"])(progress.step)
    patches.around(training, "training_log", takes=["loss_dict", "iteration", "skipped_iter", "grad_norm"])(
        progress.follow
    )
    for name, stage in _STAGES.items():
        patches.around(training, name)(functools.partial(_tell_and_call, stage))
    patches.around(training, "evaluate_and_print_results", takes=["prefix", "iteration"])(progress.evaluate)
    patches.around(training, "evaluate", takes=["data_iterator", "model"])(progress.evaluate_set)
    patches.around(training, "save_checkpoint_and_time", takes=["iteration"])(save)


class Progress:
    """Reports a run from its optimizer, the times of its steps and its evaluations."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.steps, self._in_optimizer = Stopwatch(on_gpu=on_gpu), Stopwatch(on_gpu=on_gpu)
        self._gpu = torch.cuda.get_device_name() if on_gpu and not cpu.installed() else None
        self._optimizer: Any = None
        self._facts: dict[str, Any] = {}
        self._has_reported = False
        self._last_measured = self._skipped = 0
        self._told = 0.0
        self._began: tuple[float, int] | None = None
        self._evaluates: tuple[int, str] = 0, ""
        self._set = 0

    def watch(self, build: Callable[..., Any], config: Any, model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of megatron.training's factory."""
        self._optimizer = optimizer = build(config, model, *args, **kwargs)
        optimizer.step = functools.partial(self._in_optimizer.time, optimizer.step)
        facts = optimizer.facts if isinstance(optimizer, MuonChainedOptimizer) else {}
        # Of this model-parallel rank, as Megatron counts: Megatron-FSDP's are whole over tensor-parallel ranks.
        parameters = sum(getattr(p, "orig_param", p).numel() for chunk in model for p in chunk.parameters())
        self._write_facts(**_origin(), parameters=parameters, **facts)
        tell("model", parameters=parameters, muon_parameters=facts.get("muon_parameters"), device=self._gpu)
        return optimizer

    def step(self, train_step: Callable[..., Any], *args: Any, iteration: int, **kwargs: Any) -> Any:
        """Instead of megatron.training's step; one whose loss or gradient is not finite ends before it is logged."""
        try:
            result = self.steps.time(train_step, *args, iteration=iteration, **kwargs)
        except RuntimeError as error:
            if "Unexpected result" in str(error):  # --rerun-mode disabled: on this rank alone
                self._write_facts(by_first_rank=False, diverged_at=iteration + 1)
            raise
        if result[3]:  # Megatron's rerun state machine is about to end all ranks
            self._write_facts(diverged_at=iteration + 1)
        if (now := time.monotonic()) - self._told >= _TICK_S:
            self._told = now
            tell("tick", step=iteration + 1)
        return result

    def follow(self, log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of megatron.training's log of an iteration."""
        logged = inspect.signature(log).bind(*args, **kwargs).arguments
        iteration, skipped, settings = logged["iteration"], bool(logged["skipped_iter"]), get_args()
        is_first, logs = not self._has_reported, iteration % settings.log_interval == 0
        self._has_reported = True
        loss = None
        if tells() and (is_first or logs):
            loss = mean_loss(logged["loss_dict"], logged["total_loss_dict"], skipped=skipped)
        result = log(*args, **kwargs)
        if is_first and not isinstance(self._optimizer, MuonChainedOptimizer):  # whose factory has reported
            self._write_facts(state_bytes=report_state(self._optimizer))
        rate = muon_rate(self._optimizer.param_groups)
        values = {"skipped-iterations": 1.0} if skipped else {}
        if rate is not None and iteration % settings.tensorboard_log_interval == 0:
            values["muon/learning-rate"] = rate
        self._skipped += skipped
        if is_first or logs:
            peak = _peak_of_all_ranks()
            if not settings.log_memory_to_tensorboard:
                values["mem-max-allocated-bytes"] = peak
            speed = self._speed(settings, rate, iteration) if logs else {}
            values |= {name: value for name, key in _METRICS.items() if (value := speed.get(key)) is not None}
            tell(
                "step", step=iteration, steps=settings.train_iters, loss=loss, grad_norm=logged["grad_norm"],
                lr=logged["learning_rate"], muon_lr=rate, skipped=self._skipped, peak_bytes=peak, **speed,
            )  # fmt: skip
            self._skipped = 0
        self._log(values, iteration)
        return result

    def _log(self, values: dict[str, float], iteration: int) -> None:
        """Log `values`, and under `muon/` the metrics of a step that has been measured since."""
        metrics = getattr(getattr(self._optimizer, "metrics", None), "latest", None)
        if metrics is not None and metrics.step != self._last_measured:
            self._last_measured = metrics.step
            values |= {f"muon/{name}": value for name, value in metrics.values.items()}
        if (writer := get_tensorboard_writer()) is not None:
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)

    def _write_facts(self, *, by_first_rank: bool = True, **facts: Any) -> None:
        """Write what is known of the run beside its events: `FACTS` has the keys."""
        self._facts |= facts
        if (folder := get_args().tensorboard_dir) is not None and (is_first_rank() or not by_first_rank):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with files.written_at_once(Path(folder) / FACTS) as stream:
                stream.write(json.dumps(self._facts, indent=2) + "\n")
        show_facts(facts)

    def _speed(self, settings: Any, rate: float | None, iteration: int) -> dict[str, float | None]:
        """Print the line that follows Megatron's; the same figures for the event `step`."""
        if isinstance(self._optimizer, MuonChainedOptimizer) and (skipped := self._optimizer.skipped_updates()):
            print_rank_last(skipped_line(skipped))
        (count, seconds), (_, in_optimizer) = self.steps.take(), self._in_optimizer.take()
        if not count:
            return {}
        share, step_s = in_optimizer / seconds, seconds / count
        batch = getattr(settings, "global_batch_size", 0)
        tokens_per_s = batch * settings.seq_length / step_s
        left = max((settings.train_iters or iteration) - iteration, 0) * self._seconds_each(iteration, step_s)
        muons = "" if rate is None else f"Muon's learning rate {rate:.6E}, "
        shown_left = datetime.timedelta(seconds=round(left))
        print_rank_last(
            f"megatron-muon: {tokens_per_s:,.0f} tokens/s, optimizer {share:.1%} of the step, {muons}{shown_left} left"
        )
        return {
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "mfu": self._mfu(settings, batch, step_s),
            "optimizer_share": share,
            "seconds_left": left,
        }

    def _seconds_each(self, iteration: int, step_s: float) -> float:
        """The mean time of a step since the first log, evaluations and saves included; at first a step's own."""
        now = time.monotonic()
        began, first = self._began = self._began or (now, iteration)
        return (now - began) / (iteration - first) if iteration > first else step_s

    def _mfu(self, settings: Any, batch: int, step_s: float) -> float | None:
        """The model's operations in a step, as Megatron counts them, over what the GPUs could do in bf16."""
        peak = bf16_tflops(self._gpu) if self._gpu is not None else None
        if peak is None or not (settings.bf16 or settings.fp16) or settings.fp8 or settings.fp4:
            return None
        flops = training.num_floating_point_operations(settings, batch)
        return float(flops / (step_s * settings.world_size * peak * 1e12))

    def evaluate(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of `evaluate_and_print_results`, of all sets; after training the prefix ends in " set"."""
        given = inspect.signature(call).bind(*args, **kwargs).arguments
        prefix, after = given["prefix"], "final " if given["prefix"].endswith(" set") else ""
        self._evaluates = given["iteration"], "test" if prefix.endswith("test set") else f"{after}validation"
        self._set = 0
        tell("stage", stage="evaluating")
        result = call(*args, **kwargs)
        tell("stage", stage=None)
        return result

    def evaluate_set(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of `evaluate`, which evaluates one set."""
        began, settings, (iteration, data) = time.monotonic(), get_args(), self._evaluates
        result = call(*args, **kwargs)
        name = ""
        if getattr(settings, "multiple_validation_sets", False):
            name = str((settings.validation_set_names or range(self._set + 1))[self._set])
        self._set += 1
        if result[0] and LOSS in result[0]:
            loss, seconds = float(result[0][LOSS]), time.monotonic() - began  # which Megatron is about to print
            tell("validation", step=iteration, loss=loss, set=name, data=data, seconds=seconds)
        return result


def save(call: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Instead of `save_checkpoint_and_time`."""
    tell("stage", stage="saving a checkpoint")
    began = time.monotonic()
    result = call(iteration, *args, **kwargs)
    in_background = bool(getattr(get_args(), "async_save", False))
    tell("saved", step=iteration, folder=get_args().save, seconds=time.monotonic() - began, background=in_background)
    tell("stage", stage=None)
    return result


def _tell_and_call(stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tell("stage", stage=stage)
    return call(*args, **kwargs)


def _origin() -> dict[str, Any]:
    if not is_first_rank() and get_tensorboard_writer() is None and get_wandb_writer() is None:
        return {}
    found = origin()
    return {
        **{name: found[name] for name in ("versions", "commit", "dirty")},
        "processor": found["machine"]["processor"],
    }


def _peak_of_all_ranks() -> float:
    """The most bytes that a rank's memory has held; on a CPU its resident set. Collective."""
    peak = torch.tensor(torch.cuda.max_memory_allocated(), dtype=torch.float64, device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def mean_loss(losses: Mapping[str, Any], totals: Mapping[str, Any], *, skipped: bool) -> float | None:
    """The mean loss since the last log, this step's included, as Megatron's log is about to say it; it waits for it."""
    count = totals.get("advanced iterations", 0) + (not skipped)
    total = totals.get(LOSS, 0.0) + (losses[LOSS] if not skipped and LOSS in losses else 0.0)
    return float(total) / count if count and isinstance(total, torch.Tensor) else None


def skipped_line(skipped: Mapping[str, int]) -> str:
    """The warning of updates that were not finite, by matrix."""
    shown = ", ".join(f"{name} ({count})" for name, count in itertools.islice(skipped.items(), _SHOWN_MATRICES))
    return (
        f"megatron-muon: warning: updates that were not finite: {sum(skipped.values())}, of {len(skipped)} matrices, "
        f"which kept their weights: {shown}{', ...' if len(skipped) > _SHOWN_MATRICES else ''}. If this goes on, their "
        "momentum is not finite either: resume from an earlier checkpoint"
    )


def muon_rate(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of Muon's parameters, where --muon-lr or --muon-min-lr gives them a schedule of their own.

    megatron-core logs the rate of the first of the parameter groups that has the run's own schedule.
    """
    own = (group for group in groups if "optimizer" not in group and not group.get("default_config", True))
    return next((group["lr"] for group in own), None)
