"""TensorBoard and Weights & Biases show the same metrics under the same names, and the same facts about the run.

megatron-core 0.19 logs some of its metrics to one of the two alone, and to Weights & Biases only in a run that logs to
TensorBoard. Here whatever goes to the first goes to the second. Both are written by the last rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.training.global_vars as global_vars

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS_PREFIX, WANDB_RUN
from megatron_muon.patching import Patches

OF_SAMPLES = " vs samples"
"""Ends the name of a TensorBoard metric that is plotted over samples instead of iterations."""

_SPEED = {"tokens-per-second": "tokens_per_s", "mfu": "mfu", "optimizer-share": "optimizer_share"}


def speed_metrics(speed: Mapping[str, float | None]) -> dict[str, float]:
    """The speed metrics that are known, under the names they are logged by."""
    return {name: value for name, key in _SPEED.items() if (value := speed.get(key)) is not None}


def log_to_both(patches: Patches) -> None:
    """Give Weights & Biases what TensorBoard gets, in every run of `--wandb-project`.

    0.19 keeps memory (--log-memory-to-tensorboard) and validation perplexity for TensorBoard, and without
    --tensorboard-dir logs neither losses nor validation anywhere. Metrics over samples stay TensorBoard's: their steps
    are not iterations. A run without a name gets its folder's, writes its files there, and goes on as the same run from
    a checkpoint.
    """

    @patches.around(global_vars, "_set_wandb_writer", takes=["args"])
    def set_wandb_writer(make: Callable[..., None], args: argparse.Namespace) -> None:
        if not args.wandb_project or args.rank != args.world_size - 1:
            return make(args)
        settle_run(args, os.environ)
        try:
            make(args)
        except Exception as error:
            if not type(error).__module__.startswith("wandb"):
                raise
            raise UserError(
                f"--wandb-project {args.wandb_project}: {error}; type wandb login, or set WANDB_MODE=offline and "
                "upload later with wandb sync"
            ) from error
        wandb, writer = global_vars.get_wandb_writer(), global_vars.get_tensorboard_writer()
        if writer is None:  # without one Megatron logs neither losses nor validation
            nothing = dict.fromkeys(("add_scalar", "add_text", "flush"), lambda *_, **__: None)
            writer = SimpleNamespace(**nothing)
            patches.replace(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)

        @patches.around(writer, "add_scalar")
        def add_scalar(
            add: Callable[..., None], name: str, value: Any, step: int | None = None, *rest: Any, **kwargs: Any
        ) -> None:
            add(name, value, step, *rest, **kwargs)
            if not name.endswith(OF_SAMPLES):
                wandb.log({name: float(value)}, step)


def settle_run(args: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    """Choose the run of Weights & Biases and where its files go, unless flags or the environment do.

    A run that goes on from a checkpoint of its own is the same run, by the id in `WANDB_RUN`; one that starts anew, or
    goes back with --ckpt-step, is another, so that nothing of the first is overwritten. So is a copy of a run's folder.
    """
    folder = folder_of(args)
    args.wandb_save_dir = args.wandb_save_dir or str(folder)
    args.wandb_exp_name = args.wandb_exp_name or _name(folder, environ.get("WANDB_RUN_GROUP"))
    if "WANDB_RUN_ID" in environ:
        return
    file, here = folder / WANDB_RUN, str(folder.resolve())
    before: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):  # there is none, or none that can be read
        before = dict(json.loads(file.read_text("utf-8")))
    was = Path(before.get("folder", here))
    is_copy = str(was) != here and was.exists()
    own = args.load and args.save and Path(args.load).resolve() == Path(args.save).resolve()
    goes_on = own and not args.finetune and args.ckpt_step is None and isinstance(files.latest(Path(args.load)), int)
    if goes_on and "id" in before and not is_copy:
        environ.setdefault("WANDB_RESUME", "allow")
        environ["WANDB_RUN_ID"] = before["id"]
        return
    environ["WANDB_RUN_ID"] = secrets.token_hex(4)
    folder.mkdir(parents=True, exist_ok=True)
    with files.written_at_once(file) as stream:
        stream.write(json.dumps({"id": environ["WANDB_RUN_ID"], "folder": here}) + "\n")


def folder_of(args: argparse.Namespace) -> Path:
    """Where the files of a run lie, by its flags: beside a folder `tensorboard` or `checkpoints`, else in it."""
    for place, name in ((args.tensorboard_dir, "tensorboard"), (args.save, "checkpoints")):
        if place:
            return Path(place).parent if Path(place).name == name else Path(place)
    return Path()


def _name(folder: Path, group: str | None) -> str:
    """A run's name: its folder's, within a sweep with the point's before it."""
    *_, sweep, point, run = ("", "", *folder.resolve().parts)
    return f"{point}/{run}" if sweep == group else run


def show_facts(facts: Mapping[str, Any]) -> None:
    """Show what is known of the run: as TensorBoard's texts, and in the config of Weights & Biases."""
    named = {f"{FACTS_PREFIX}{name}": value for name, value in _flat(facts)}
    if (writer := global_vars.get_tensorboard_writer()) is not None:
        for name, value in named.items():
            writer.add_text(name, str(value))
    if (wandb := global_vars.get_wandb_writer()) is not None:
        wandb.config.update(named, allow_val_change=True)


def _flat(facts: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}/")
        else:
            yield f"{within}{name}", value
