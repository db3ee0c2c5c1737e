"""What a run shows beside Megatron's own log: speed, the optimizer's share, time left, and Muon's metrics.

Each of Megatron's iteration lines is followed by one of this package's. Metrics go where Megatron's go, to TensorBoard
and Weights & Biases, under `muon/`, and so does Muon's learning rate where it is not the one that Megatron logs.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_muon.patching import Patches

_SHOWN_MATRICES = 5


class Stopwatch:
    """Seconds that a call takes, summed until they are asked for; of GPU work as the GPU itself counts.

    Args:
        on_gpu: record events instead of reading the clock.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self.calls = 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self._on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                result = call(*args, **kwargs)
                end.record()
                self._events.append((start, end))
                return result
            begun = time.perf_counter()
            result = call(*args, **kwargs)
            self._seconds += time.perf_counter() - begun
            return result

        return timed

    def take(self) -> float:
        """Seconds since the last time; waits for the GPU."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events, self.calls = self._seconds, 0.0, [], 0
        return seconds


def show_progress(patches: Patches, *, on_gpu: bool) -> None:
    """Follow Megatron's iteration lines with speed and time left, and log Muon's metrics."""
    import megatron.training.training as training
    from megatron.training import get_args, print_rank_last
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    from megatron_muon.megatron.chained import MuonChainedOptimizer

    steps, of_optimizer = Stopwatch(on_gpu=on_gpu), Stopwatch(on_gpu=on_gpu)
    made: list[Any] = []
    logged: list[int] = []
    reported: list[Any] = []

    def around_factory(build: Callable[..., Any]) -> Callable[..., Any]:
        def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
            optimizer = build(*args, **kwargs)
            optimizer.step = of_optimizer.timed(optimizer.step)
            made[:] = [optimizer]
            if isinstance(optimizer, MuonChainedOptimizer):
                _tell(optimizer.facts)
            return optimizer

        return get_megatron_optimizer

    def around_log(log: Callable[..., Any]) -> Callable[..., Any]:
        def training_log(
            loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any, **kwargs: Any
        ) -> Any:
            result = log(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
            settings = get_args()
            if made and not reported:
                reported.append(made[0])
                _report_state(made[0])
            rate = muon_rate(made[0].param_groups) if made else None
            values = {}
            if rate is not None and iteration % settings.tensorboard_log_interval == 0:
                values["muon/learning-rate"] = rate
            metrics = getattr(getattr(made[0], "metrics", None), "latest", None) if made else None
            if metrics is not None and logged != [metrics.step]:
                logged[:] = [metrics.step]
                values |= {f"muon/{name}": value for name, value in metrics.values.items()}
            if values:
                if (writer := get_tensorboard_writer()) is not None:
                    for name, value in values.items():
                        writer.add_scalar(name, value, iteration)
                if (wandb := get_wandb_writer()) is not None:
                    wandb.log(values, iteration)
            if iteration % settings.log_interval == 0 and steps.calls:
                if made and isinstance(made[0], MuonChainedOptimizer) and (skipped := made[0].skipped_updates()):
                    print_rank_last(skipped_line(skipped))
                count, seconds = steps.calls, steps.take()
                per_step = seconds / count
                batch = getattr(settings, "global_batch_size", 0)
                print_rank_last(
                    progress_line(
                        tokens_per_s=batch * settings.seq_length / per_step,
                        optimizer_share=of_optimizer.take() / seconds,
                        seconds_left=per_step * max((settings.train_iters or iteration) - iteration, 0),
                        muon_rate=rate,
                    )
                )
            return result

        return training_log

    patches.wrap(training, "get_megatron_optimizer", around_factory)
    patches.wrap(training, "train_step", steps.timed)
    patches.wrap(training, "training_log", around_log, takes=["loss_dict", "iteration"])


def _report_state(optimizer: Any) -> None:
    """Prints how much state an optimizer of megatron-core has, which begins with its first step. Collective.

    This package's factory tells that of its own before.
    """
    from megatron_muon.megatron.chained import MuonChainedOptimizer
    from megatron_muon.megatron.state_report import adam_report

    if not isinstance(optimizer, MuonChainedOptimizer):
        report, state_bytes = adam_report(optimizer)
        if torch.distributed.get_rank() == 0:
            print(report, flush=True)
        _tell({"state_bytes": state_bytes})


def _tell(facts: Mapping[str, Any]) -> None:
    """Writes what is known of the optimizer beside the run's events; the first rank does."""
    from megatron.training import get_args

    from megatron_muon.megatron.state_report import write_facts

    if (folder := get_args().tensorboard_dir) is not None and torch.distributed.get_rank() == 0:
        write_facts(Path(folder), facts)


def skipped_line(skipped: Mapping[str, int]) -> str:
    """The warning of updates that were not finite, by matrix."""
    shown = ", ".join(f"{name} ({count})" for name, count in itertools.islice(skipped.items(), _SHOWN_MATRICES))
    more = f" and {len(skipped) - _SHOWN_MATRICES} more" if len(skipped) > _SHOWN_MATRICES else ""
    return (
        f"megatron-muon: warning: {sum(skipped.values())} updates were not finite; these matrices kept their weights: "
        f"{shown}{more}. Their momentum may stay as it is: resume from an earlier checkpoint"
    )


def muon_rate(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of Muon's parameters, where --muon-lr or --muon-min-lr gives them a schedule of their own.

    Args:
        groups: parameter groups; megatron-core logs the rate of the first that has the run's own schedule.
    """
    own = (group for group in groups if "optimizer" not in group and not group.get("default_config", True))
    return next((group["lr"] for group in own), None)


def progress_line(
    *, tokens_per_s: float, optimizer_share: float, seconds_left: float, muon_rate: float | None = None
) -> str:
    """The line that follows one of Megatron's."""
    left = datetime.timedelta(seconds=round(seconds_left))
    rate = "" if muon_rate is None else f"Muon's learning rate {muon_rate:.6E}, "
    return (
        f"megatron-muon: {tokens_per_s:,.0f} tokens/s, optimizer {optimizer_share:.1%} of the step, {rate}{left} left"
    )
