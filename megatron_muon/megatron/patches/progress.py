"""What a run shows beside Megatron's own log: speed, the optimizer's share, time left, and Muon's metrics.

Each of Megatron's iteration lines is followed by one of this package's, and what they say is told to whoever launched
the run. Metrics go where Megatron's go, to TensorBoard and from there (`monitoring`) to Weights & Biases: Muon's under
`muon/`, speed, and Muon's learning rate where it is not the one that Megatron logs. What tools want to know of the run
goes into `facts.json`, beside the run's events.
"""

from __future__ import annotations

import datetime
import functools
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
from megatron_muon.megatron import FACTS, LOSS
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.gpu import bf16_tflops
from megatron_muon.megatron.patches.monitoring import show_facts, speed_metrics
from megatron_muon.megatron.patches.stages import Stages
from megatron_muon.megatron.provenance import origin
from megatron_muon.megatron.state import report_state
from megatron_muon.megatron.tell import tell, tells
from megatron_muon.patching import Patches

_SHOWN_MATRICES = 5
_TICK_S = 1.0


class Stopwatch:
    """Seconds that calls take, summed until they are asked for; of GPU work as the GPU itself counts."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._spans: list[tuple[Any, Any]] = []

    @property
    def calls(self) -> int:
        """How many since the last time."""
        return len(self._spans)

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

    def take(self) -> float:
        """Seconds since the last time; waits for the GPU."""
        spans, self._spans = self._spans, []
        if self._on_gpu and spans:
            spans[-1][1].synchronize()
        seconds = [start.elapsed_time(end) / 1e3 if self._on_gpu else end - start for start, end in spans]
        return float(sum(seconds))


def show_progress(patches: Patches, *, on_gpu: bool) -> None:
    """Follow Megatron's iteration lines with speed and time left, and log Muon's metrics."""
    progress = Progress(on_gpu=on_gpu)
    patches.around(training, "get_megatron_optimizer")(progress.watch)
    patches.around(training, "train_step", takes=["iteration"])(progress.step)
    patches.around(training, "training_log", takes=["loss_dict", "iteration", "skipped_iter", "grad_norm"])(
        progress.follow
    )
    progress.stages.install(patches)


class Progress:
    """What of a run is shown, from its optimizer and the times of its steps."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.steps, self._in_optimizer = Stopwatch(on_gpu=on_gpu), Stopwatch(on_gpu=on_gpu)
        self._optimizer: Any = None
        self._facts: dict[str, Any] = {}
        self._has_reported = False
        self._last_measured = self._skipped = 0
        self._told = 0.0
        self._began: tuple[float, int] | None = None
        self.stages, self._gpu = Stages(), torch.cuda.get_device_name() if on_gpu and not cpu.installed() else None

    def watch(self, build: Callable[..., Any], config: Any, model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of megatron.training's factory."""
        self._optimizer = optimizer = build(config, model, *args, **kwargs)
        optimizer.step = functools.partial(self._in_optimizer.time, optimizer.step)
        self._write_facts(
            **_origin(),
            # Of this model-parallel rank, as Megatron counts: Megatron-FSDP's are whole over tensor-parallel ranks.
            parameters=sum(getattr(p, "orig_param", p).numel() for chunk in model for p in chunk.parameters()),
            **(optimizer.facts if isinstance(optimizer, MuonChainedOptimizer) else {}),
        )
        tell("model", device=self._gpu, **{name: self._facts.get(name) for name in ("parameters", "muon_parameters")})
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

    def follow(
        self,
        log: Callable[..., Any],
        losses: Any,
        totals: Any,
        learning_rate: Any,
        iteration: int,
        loss_scale: Any,
        report_memory: bool,
        skipped: int,
        grad_norm: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Instead of megatron.training's log of an iteration."""
        settings, is_first = get_args(), not self._has_reported
        logs = iteration % settings.log_interval == 0
        loss = mean_loss(losses, totals, skipped=bool(skipped)) if tells() and (is_first or logs) else None
        result = log(
            losses, totals, learning_rate, iteration, loss_scale, report_memory, skipped, grad_norm, *args, **kwargs
        )
        if self._optimizer is not None and is_first:
            self._has_reported = True
            if not isinstance(self._optimizer, MuonChainedOptimizer):  # whose factory has reported, before any step
                self._write_facts(state_bytes=report_state(self._optimizer))
        rate = muon_rate(self._optimizer.param_groups) if self._optimizer is not None else None
        values = {"skipped-iterations": 1.0} if skipped else {}
        if rate is not None and iteration % settings.tensorboard_log_interval == 0:
            values["muon/learning-rate"] = rate
        peak = _peak_of_all_ranks() if is_first or logs else None
        if peak is not None and not settings.log_memory_to_tensorboard:
            values["mem-max-allocated-bytes"] = peak
        self._write(values, iteration)
        self._skipped += bool(skipped)
        if is_first or logs:
            speed = self._print(settings, rate, iteration) if logs and self.steps.calls else {}
            self._write(speed_metrics(speed), iteration)
            tell(
                "step", step=iteration, steps=settings.train_iters, loss=loss, grad_norm=grad_norm, lr=learning_rate,
                muon_lr=rate, skipped=self._skipped, peak_bytes=peak, **speed,
            )  # fmt: skip
            self._skipped = 0
        return result

    def _write(self, values: dict[str, float], iteration: int) -> None:
        """Log `values`, and under `muon/` the metrics of a step that has been measured since."""
        metrics = getattr(getattr(self._optimizer, "metrics", None), "latest", None)
        if metrics is not None and metrics.step != self._last_measured:
            self._last_measured = metrics.step
            values |= {f"muon/{name}": value for name, value in metrics.values.items()}
        if values and (writer := get_tensorboard_writer()) is not None:
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

    def _print(self, settings: Any, rate: float | None, iteration: int) -> dict[str, float | None]:
        """Print the line that follows Megatron's; what it says, and what more is known of speed, for who is told."""
        if isinstance(self._optimizer, MuonChainedOptimizer) and (skipped := self._optimizer.skipped_updates()):
            print_rank_last(skipped_line(skipped))
        count, seconds = self.steps.calls, self.steps.take()
        share, step_s = self._in_optimizer.take() / seconds, seconds / count
        batch = getattr(settings, "global_batch_size", 0)
        tokens_per_s = batch * settings.seq_length / step_s
        left = max((settings.train_iters or iteration) - iteration, 0) * self._seconds_each(iteration, step_s)
        print_rank_last(progress_line(tokens_per_s, share, left, rate))
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


def _origin() -> dict[str, Any]:
    """Software and machine, on the ranks that tell of them: one asks git."""
    if not is_first_rank() and get_tensorboard_writer() is None and get_wandb_writer() is None:
        return {}
    found = origin()
    told = {name: found[name] for name in ("versions", "commit", "dirty")}
    return {**told, "processor": found["machine"]["processor"]}


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
    more = f" and {len(skipped) - _SHOWN_MATRICES} more" if len(skipped) > _SHOWN_MATRICES else ""
    return (
        f"megatron-muon: warning: updates that were not finite: {sum(skipped.values())}; these matrices kept "
        f"their weights: {shown}{more}. If this goes on, their momentum is not finite either: resume from an earlier "
        "checkpoint"
    )


def muon_rate(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of Muon's parameters, where --muon-lr or --muon-min-lr gives them a schedule of their own.

    megatron-core logs the rate of the first of the parameter groups that has the run's own schedule.
    """
    own = (group for group in groups if "optimizer" not in group and not group.get("default_config", True))
    return next((group["lr"] for group in own), None)


def progress_line(tokens_per_s: float, share: float, seconds_left: float, muon_rate: float | None = None) -> str:
    """The line that follows one of Megatron's; `share` is the optimizer's."""
    left = datetime.timedelta(seconds=round(seconds_left))
    rate = "" if muon_rate is None else f"Muon's learning rate {muon_rate:.6E}, "
    return f"megatron-muon: {tokens_per_s:,.0f} tokens/s, optimizer {share:.1%} of the step, {rate}{left} left"
