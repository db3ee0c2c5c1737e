"""Reports what a training does besides steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import megatron.training.training as training
from megatron.training import get_args

from megatron_muon.megatron import FIRST_STEP, LOSS
from megatron_muon.megatron.tell import tell
from megatron_muon.patching import Patches


class Stages:
    """Reports when a training builds, reads, evaluates and saves."""

    def __init__(self) -> None:
        self._evaluates: tuple[str, int] = "", 0
        self._set = 0

    def install(self, patches: Patches) -> None:
        """Follow the functions of Megatron's training loop."""
        names = {
            "setup_model_and_optimizer": "building the model",
            "load_checkpoint": "loading the checkpoint",
            "build_train_valid_test_data_iterators": "reading the data",
            "train": FIRST_STEP,
        }
        for name, stage in names.items():
            patches.around(training, name)(functools.partial(_tell_and_call, stage))
        patches.around(training, "evaluate_and_print_results", takes=["prefix", "iteration"])(self.evaluate)
        patches.around(training, "evaluate", takes=["data_iterator", "model"])(self.evaluate_set)
        patches.around(training, "save_checkpoint_and_time", takes=["iteration"])(self.save)

    def evaluate(
        self, call: Callable[..., Any], prefix: str, forward_step: Any, data: Any, model: Any, iteration: int,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Replaces `evaluate_and_print_results`, which evaluates all sets and writes their losses under the prefix."""
        self._evaluates, self._set = (prefix, iteration), 0
        tell("stage", stage="evaluating")
        result = call(prefix, forward_step, data, model, iteration, *args, **kwargs)
        tell("stage", stage=None)
        return result

    def evaluate_set(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces `evaluate`, which evaluates one set."""
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
        """Replaces `save_checkpoint_and_time`."""
        tell("stage", stage="saving a checkpoint")
        began = time.monotonic()
        result = call(iteration, *args, **kwargs)
        seconds, settings = time.monotonic() - began, get_args()
        in_background = bool(getattr(settings, "async_save", False))
        tell("saved", step=iteration, folder=settings.save, seconds=seconds, background=in_background)
        tell("stage", stage=None)
        return result


def _tell_and_call(stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tell("stage", stage=stage)
    return call(*args, **kwargs)
