"""What a run reports: metrics, to TensorBoard and Weights & Biases, and the events of `megatron.TOLD`.

Both show the same metrics under the same names, written by the last rank: whatever goes to the
first goes to the second. What tools want to know of the run goes into `facts.json`, beside
TensorBoard's files.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import megatron.training.global_vars as global_vars
import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.training import get_args, get_timers, print_rank_last

from megatron_muon import cpu
from megatron_muon.checkpoint import files
from megatron_muon.core.ranks import is_first_rank, say
from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS, FIRST_STEP, LOSS, WANDB_RUN, tell, tells
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.places import read_json
from megatron_muon.megatron.provenance import origin
from megatron_muon.megatron.run_device import bf16_tflops
from megatron_muon.megatron.state_report import report_state
from megatron_muon.patching import Patches

_SHOWN_MATRICES = 5
_ESTIMATE_AT = 10
"""Steps of a start after which its time left is reported; a log interval may be much longer."""

_METRICS = {"tokens-per-second": "tokens_per_s", "mfu": "mfu", "optimizer-share": "optimizer_share"}
_STAGES = {
    "setup_model_and_optimizer": "building the model",
    "load_checkpoint": "loading the checkpoint",
    "build_train_valid_test_data_iterators": "reading the data",
    "train": FIRST_STEP,
}
"""What a training does in functions of Megatron's module."""


class Clock(NamedTuple):
    """Seconds at an iteration: of the wall; in steps and in the optimizer so far, by Megatron's timers."""

    iteration: int
    wall: float
    in_steps: float
    in_optimizer: float | None

    @classmethod
    def at(cls, iteration: int) -> Clock:
        """The time now, just after a log. The optimizer's timer runs with --timing-log-level 1 alone."""
        timers, has_optimizers = get_timers(), get_args().timing_log_level >= 1
        in_optimizer = timers("optimizer", log_level=1).active_time() if has_optimizers else None
        return cls(iteration, time.monotonic(), timers("interval-time").active_time(), in_optimizer)


def show_progress(patches: Patches) -> None:
    """Report what a training does, with speed and time left, and log Muon's metrics."""
    progress = Progress(on_gpu=torch.cuda.is_available())
    patches.around(training, "get_megatron_optimizer")(progress.watch)
    patches.around(training, "train_step", takes=["iteration"])(progress.step)
    patches.around(
        training, "training_log", takes=["loss_dict", "iteration", "skipped_iter", "grad_norm"]
    )(progress.follow)
    for name, stage in _STAGES.items():
        patches.around(training, name)(functools.partial(_tell_and_call, stage))
    patches.around(training, "evaluate_and_print_results", takes=["prefix", "iteration"])(
        progress.evaluate
    )
    patches.around(training, "evaluate", takes=["data_iterator", "model"])(progress.evaluate_set)
    patches.around(training, "save_checkpoint_and_time", takes=["iteration"])(save)


class Progress:
    """Reports a run from its optimizer, the times of its steps and its evaluations."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._gpu = torch.cuda.get_device_name() if on_gpu and not cpu.installed() else None
        self._optimizer: Any = None
        self._facts: dict[str, Any] = {}
        self._last_measured = self._skipped = 0
        self._first: Clock | None = None
        self._last: Clock | None = None
        self._evaluation = 0, "", iter(())
        self._validated: int | None = None

    def watch(
        self,
        build: Callable[..., Any],
        config: Any,
        model: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Instead of megatron.training's factory."""
        self._optimizer = optimizer = build(config, model, *args, **kwargs)
        facts = optimizer.facts if isinstance(optimizer, MuonChainedOptimizer) else {}
        # Of this model-parallel rank, as Megatron counts: Megatron-FSDP's are whole over
        # tensor-parallel ranks.
        parameters = sum(
            getattr(p, "orig_param", p).numel() for chunk in model for p in chunk.parameters()
        )
        self._write_facts(**(origin() if is_first_rank() else {}), parameters=parameters, **facts)
        return optimizer

    def step(self, call: Callable[..., Any], *args: Any, iteration: int, **kwargs: Any) -> Any:
        """Instead of `train_step`; a step whose loss or gradient is not finite is not logged before all ranks end."""
        result = call(*args, iteration=iteration, **kwargs)
        if result[3]:
            tell("diverged", step=iteration + 1)
            self._write_facts(diverged_at=iteration + 1)
        return result

    def follow(self, log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of megatron.training's log of an iteration."""
        logged = inspect.signature(log).bind(*args, **kwargs).arguments
        iteration, skipped, settings = logged["iteration"], bool(logged["skipped_iter"]), get_args()
        is_first, logs, loss = self._first is None, iteration % settings.log_interval == 0, None
        if tells() and (is_first or logs):
            loss = mean_loss(logged["loss_dict"], logged["total_loss_dict"], skipped=skipped)
        result = log(*args, **kwargs)
        # whose factory has reported
        if is_first and not isinstance(self._optimizer, MuonChainedOptimizer):
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
            speed = self._speed(settings, Clock.at(iteration))
            values |= {
                name: value
                for name, key in _METRICS.items()
                if (value := speed.get(key)) is not None
            }
            tell(
                "step",
                step=iteration,
                steps=settings.train_iters,
                loss=loss,
                grad_norm=logged["grad_norm"],
                lr=logged["learning_rate"],
                muon_lr=rate,
                skipped=self._skipped or None,
                peak_bytes=peak,
                **speed,
            )
            self._skipped = 0
            if isinstance(self._optimizer, MuonChainedOptimizer) and (
                failed := self._optimizer.skipped_updates()
            ):
                print_rank_last(skipped_line(failed))
        if self._first is not None and iteration == self._first.iteration + _ESTIMATE_AT - 1:
            tell(
                "estimate",
                step=iteration,
                seconds_left=self._seconds_left(settings, iteration, time.monotonic()),
            )
        self._log(values, iteration)
        return result

    def _log(self, values: dict[str, float], iteration: int) -> None:
        """Log `values`, and under `muon/` the metrics of a step that has been measured since."""
        metrics = getattr(getattr(self._optimizer, "metrics", None), "latest", None)
        if metrics is not None and metrics.step != self._last_measured:
            self._last_measured = metrics.step
            values |= {f"muon/{name}": value for name, value in metrics.values.items()}
        if (writer := global_vars.get_tensorboard_writer()) is not None:
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)

    def _write_facts(self, **facts: Any) -> None:
        """Write what is known of the run beside its events: `FACTS` has the keys."""
        self._facts |= facts
        if (folder := get_args().tensorboard_dir) is not None and is_first_rank():
            Path(folder).mkdir(parents=True, exist_ok=True)
            with files.written_at_once(Path(folder) / FACTS) as stream:
                stream.write(json.dumps(self._facts, indent=2) + "\n")

    def _speed(self, settings: Any, now: Clock) -> dict[str, float | None]:
        """Speed of the steps since the last log; nothing at a start's first step, which is slow."""
        first, last = self._first, self._last
        self._first, self._last = first or now, now
        if first is None or last is None:
            return {}
        steps, seconds = now.iteration - last.iteration, now.in_steps - last.in_steps
        share = None
        if now.in_optimizer is not None and last.in_optimizer is not None:
            share = (now.in_optimizer - last.in_optimizer) / seconds
        batch = settings.global_batch_size
        return {
            "tokens_per_s": batch * settings.seq_length * steps / seconds,
            "mfu": self._mfu(settings, batch, seconds / steps),
            "optimizer_share": share,
            "seconds_left": self._seconds_left(settings, now.iteration, now.wall),
        }

    def _seconds_left(self, settings: Any, iteration: int, wall: float) -> float:
        """Time that the rest takes at the speed since a start's first step, evaluations and saves so far included."""
        assert self._first is not None
        left = max((settings.train_iters or 0) - iteration, 0)
        return left * (wall - self._first.wall) / (iteration - self._first.iteration)

    def _mfu(self, settings: Any, batch: int, step_s: float) -> float | None:
        """The model's operations in a step, as Megatron counts them, over what the GPUs could do in bf16."""
        peak = bf16_tflops(self._gpu) if self._gpu is not None else None
        if peak is None or not (settings.bf16 or settings.fp16) or settings.fp8 or settings.fp4:
            return None
        flops = training.num_floating_point_operations(settings, batch)
        return float(flops / (step_s * settings.world_size * peak * 1e12))

    def evaluate(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of `evaluate_and_print_results`, of all sets; after training the prefix ends in " set".

        Where --eval-interval has evaluated the last step, 0.19 evaluates it again on the samples
        that follow: a second number for the same weights. The first one counts.
        """
        given, settings = inspect.signature(call).bind(*args, **kwargs).arguments, get_args()
        prefix, after = given["prefix"], "final " if given["prefix"].endswith(" set") else ""
        data = "test" if prefix.endswith("test set") else f"{after}validation"
        if data == "final validation" and self._validated == given["iteration"]:
            say(f"megatron-muon: {prefix}: evaluated above, at --eval-interval")
            return None
        names: Iterator[Any] = itertools.repeat("")
        if getattr(settings, "multiple_validation_sets", False):
            names = iter(settings.validation_set_names or itertools.count())
        self._evaluation = given["iteration"], data, names
        result = _tell_and_call("evaluating", call, *args, **kwargs)
        tell("stage", stage=None)
        return result

    def evaluate_set(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of `evaluate`, which evaluates one set."""
        result, (iteration, data, names) = call(*args, **kwargs), self._evaluation
        if result[2]:  # 0.19 leaves its timer running, and fails where the test set is next
            get_timers()("evaluate").stop()
        elif data == "validation":
            self._validated = iteration
        what = f"{data} loss {next(names, '')}".rstrip()
        if result[0] and LOSS in result[0]:
            # Megatron is to print it, too
            tell("validation", step=iteration, loss=float(result[0][LOSS]), what=what)
        return result


def save(call: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Instead of `save_checkpoint_and_time`, which is called without --save, too, where a loss is not finite."""
    if get_args().save is None and not kwargs.get("non_persistent_ckpt"):
        say(f"megatron-muon: iteration {iteration} is not saved: there is no --save")
        return None
    began = time.monotonic()
    result = _tell_and_call("saving a checkpoint", call, iteration, *args, **kwargs)
    tell("saved", step=iteration, folder=get_args().save, seconds=time.monotonic() - began)
    tell("stage", stage=None)
    return result


def _tell_and_call(stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tell("stage", stage=stage)
    return call(*args, **kwargs)


def _peak_of_all_ranks() -> float:
    """The most bytes that a rank's memory has held; on a CPU its resident set. Collective."""
    peak = torch.tensor(torch.cuda.max_memory_allocated(), dtype=torch.float64, device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def mean_loss(
    losses: Mapping[str, Any], totals: Mapping[str, Any], *, skipped: bool
) -> float | None:
    """The mean loss since the last log, this step's included, as Megatron's log is about to say it; it waits for it."""
    count = totals.get("advanced iterations", 0) + (not skipped)
    total = totals.get(LOSS, 0.0) + (losses[LOSS] if not skipped and LOSS in losses else 0.0)
    return float(total) / count if count and isinstance(total, torch.Tensor) else None


def skipped_line(skipped: Mapping[str, int]) -> str:
    """The warning of updates that were not finite, by matrix."""
    shown = ", ".join(
        f"{name} ({count})" for name, count in itertools.islice(skipped.items(), _SHOWN_MATRICES)
    )
    return (
        f"megatron-muon: warning: updates that were not finite: {sum(skipped.values())}, of"
        f" {len(skipped)} matrices, which kept their weights:"
        f" {shown}{', ...' if len(skipped) > _SHOWN_MATRICES else ''}. If this goes on, their"
        " momentum is not finite either: resume from an earlier checkpoint"
    )


def muon_rate(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of Muon's parameters, where --muon-lr or --muon-min-lr gives them a schedule of their own.

    megatron-core logs the rate of the first of the parameter groups that has the run's own
    schedule.
    """
    own = (
        group
        for group in groups
        if "optimizer" not in group and not group.get("default_config", True)
    )
    return next((group["lr"] for group in own), None)


def log_to_both(patches: Patches) -> None:
    """Give Weights & Biases what TensorBoard gets, in every run of `--wandb-project`.

    0.19 keeps memory (--log-memory-to-tensorboard) and validation perplexity for TensorBoard, and
    without --tensorboard-dir logs neither losses nor validation anywhere. Metrics over samples stay
    TensorBoard's: their steps are not iterations.
    """

    @patches.around(global_vars, "_set_wandb_writer", takes=["args"])
    def set_wandb_writer(make: Callable[..., None], args: argparse.Namespace) -> None:
        if not args.wandb_project or args.rank != args.world_size - 1:
            return make(args)
        choose_run(args, os.environ)
        try:
            make(args)
        except Exception as error:
            if not type(error).__module__.startswith("wandb"):
                raise
            remedy = "type wandb login, or set WANDB_MODE=offline and upload later with wandb sync"
            raise UserError(f"--wandb-project {args.wandb_project}: {error}; {remedy}") from error
        wandb, writer = global_vars.get_wandb_writer(), global_vars.get_tensorboard_writer()
        if writer is None:
            writer = SimpleNamespace(
                **dict.fromkeys(("add_scalar", "add_text", "flush"), lambda *_, **__: None)
            )
            patches.replace(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)

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


def choose_run(args: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    """Choose the run of Weights & Biases and where its files go, unless flags or the environment do.

    A run that goes on from a checkpoint of its own is the same run, by the id in `WANDB_RUN`; one
    that starts anew, or goes back with --ckpt-step, is another, so that nothing of the first is
    overwritten.
    """
    folder = Path()  # beside a folder `tensorboard` or `checkpoints`, else in it
    for place, name in ((args.save, "checkpoints"), (args.tensorboard_dir, "tensorboard")):
        if place:
            folder = Path(place).parent if Path(place).name == name else Path(place)
    *_, sweep, point, run = ("", "", *folder.resolve().parts)
    is_of_sweep = sweep == environ.get("WANDB_RUN_GROUP")
    args.wandb_save_dir = args.wandb_save_dir or str(folder)
    args.wandb_exp_name = args.wandb_exp_name or (f"{point}/{run}" if is_of_sweep else run)
    if "WANDB_RUN_ID" in environ:
        return
    own = args.load and args.save and Path(args.load).resolve() == Path(args.save).resolve()
    goes_on = (
        own
        and not args.finetune
        and args.ckpt_step is None
        and isinstance(files.latest(Path(args.load)), int)
    )
    before = read_json(folder / WANDB_RUN).get("id") if goes_on else None
    environ["WANDB_RUN_ID"] = before or secrets.token_hex(4)
    if before:
        environ.setdefault("WANDB_RESUME", "allow")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with files.written_at_once(folder / WANDB_RUN) as stream:
        stream.write(json.dumps({"id": environ["WANDB_RUN_ID"]}) + "\n")
