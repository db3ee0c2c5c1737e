"""What a training does besides its steps: told to its launcher, and timed where the time left depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import megatron.training.training as training
from megatron.training import get_args

from megatron_muon.megatron import FIRST_STEP, LOSS
from megatron_muon.megatron.tell import tell
from megatron_muon.patching import Patches

_OF_A_STEP = 1 / 3
"""The part of a step that its forward pass takes: how long evaluations take is reckoned so until one was measured."""


class Stages:
    """Tells when a training builds, reads, evaluates and saves, and keeps how long the last of the latter two took."""

    def __init__(self) -> None:
        self._evaluation_s: float | None = None
        self._save_s = 0.0
        self._evaluates: tuple[str, int] = "", 0
        self._set = 0

    def install(self, patches: Patches) -> None:
        """Follow the functions of Megatron's training loop."""
        names = {
            "get_model": "building the model",
            "load_checkpoint": "loading the checkpoint",
            "build_train_valid_test_data_iterators": "reading the data",
            "train": FIRST_STEP,
        }
        for name, stage in names.items():
            patches.around(training, name)(_after_telling(stage))
        patches.around(training, "evaluate_and_print_results", takes=["prefix", "iteration"])(self.evaluate)
        patches.around(training, "evaluate", takes=["data_iterator", "model"])(self.evaluate_set)
        patches.around(training, "save_checkpoint_and_time", takes=["iteration"])(self.save)

    def seconds_left(self, settings: Any, iteration: int, step_s: float) -> float:
        """What evaluations and saves between this iteration and the end will take."""
        end, left = settings.train_iters or iteration, 0.0
        if getattr(settings, "do_valid", False) and settings.eval_interval:
            each = self._evaluation_s
            if each is None:
                counts = settings.eval_iters
                each = (sum(counts) if isinstance(counts, list) else counts) * step_s * _OF_A_STEP
            after = 1 + bool(getattr(settings, "do_test", False))
            left += each * (_multiples(settings.eval_interval, iteration, end) + after)
        if settings.save:
            every = settings.save_interval or 0
            at_the_end = not every or end % every != 0
            left += self._save_s * (_multiples(every, iteration, end) + at_the_end)
        return left

    def evaluate(self, call: Callable[..., Any], prefix: str, *args: Any, **kwargs: Any) -> Any:
        """Instead of megatron.training's evaluation of all sets, which writes their losses under this prefix."""
        iteration = kwargs["iteration"] if "iteration" in kwargs else args[3]
        self._evaluates, self._set = (prefix, iteration), 0
        tell("stage", stage="evaluating")
        began = time.monotonic()
        result = call(prefix, *args, **kwargs)
        self._evaluation_s = time.monotonic() - began
        tell("stage", stage=None)
        return result

    def evaluate_set(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Instead of its evaluation of one set."""
        began = time.monotonic()
        result = call(*args, **kwargs)
        settings, (prefix, iteration) = get_args(), self._evaluates
        names = getattr(settings, "validation_set_names", None) or []
        name = names[self._set] if self._set < len(names) else str(self._set)
        self._set += 1
        if result[0] and LOSS in result[0]:
            tell(
                "validation",
                step=iteration,
                loss=float(result[0][LOSS]),  # which Megatron is about to print
                set=name if getattr(settings, "multiple_validation_sets", False) else "",
                data="test" if prefix.endswith("on test set") else "validation",
                last=prefix.endswith(" set"),
                seconds=time.monotonic() - began,
            )
        return result

    def save(self, call: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
        """Instead of its save of a checkpoint."""
        tell("stage", stage="saving a checkpoint")
        began = time.monotonic()
        result = call(iteration, *args, **kwargs)
        self._save_s, settings = time.monotonic() - began, get_args()
        in_background = bool(getattr(settings, "async_save", False))
        tell("saved", step=iteration, folder=settings.save, seconds=self._save_s, background=in_background)
        tell("stage", stage=None)
        return result


def _after_telling(stage: str) -> Callable[..., Any]:
    def told(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tell("stage", stage=stage)
        return call(*args, **kwargs)

    return told


def _multiples(every: int, after: int, end: int) -> int:
    """How many multiples of `every` there are after one number and up to another."""
    return end // every - after // every if every else 0
