"""TensorBoard and Weights & Biases show a run alike: the same names with the same values, and what is known of the run.

megatron-core 0.19 logs some of its metrics to one of the two alone, and to Weights & Biases only in a run that logs to
TensorBoard. Here whatever goes to the first goes to the second. Both are written by the last rank.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import megatron.training.global_vars as global_vars

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS_PREFIX, WANDB_RUN
from megatron_muon.patching import Patches

OF_SAMPLES = " vs samples"
"""How Megatron ends the names of TensorBoard's metrics whose axis is the number of samples, not of iterations."""

_SPEED = {"tokens-per-second": "tokens_per_s", "mfu": "mfu", "optimizer-share": "optimizer_share"}


def speed_metrics(speed: Mapping[str, float | None]) -> dict[str, float]:
    """What is logged of a run's speed, as far as it is known."""
    known = {name: speed.get(key) for name, key in _SPEED.items()}
    return {name: value for name, value in known.items() if value is not None}


def log_to_both(patches: Patches) -> None:
    """Give Weights & Biases what TensorBoard gets, in every run of `--wandb-project`.

    0.19 keeps memory (--log-memory-to-tensorboard) and validation perplexity for TensorBoard, and without
    --tensorboard-dir logs neither losses nor validation anywhere. Metrics over samples stay TensorBoard's: their steps
    are no iterations. The run goes by the name of its folder where it has no other, writes its files there, and goes on
    as the same run from a checkpoint.
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
        if writer is None:
            patches.replace(global_vars, "_GLOBAL_TENSORBOARD_WRITER", _WandbAlone(wandb))
        else:
            patches.around(writer, "add_scalar")(_also_to(wandb))


def _also_to(wandb: Any) -> Callable[..., None]:
    def add_scalar(
        add: Callable[..., None], name: str, value: Any, step: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        add(name, value, step, *args, **kwargs)
        if not name.endswith(OF_SAMPLES):
            wandb.log({name: float(value)}, step)

    return add_scalar


class _WandbAlone:
    """What Megatron takes for TensorBoard's writer in a run without one."""

    def __init__(self, wandb: Any) -> None:
        self._log = _also_to(wandb)

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        """Log a metric."""
        self._log(lambda *_, **__: None, *args, **kwargs)

    def add_text(self, *_: Any, **__: Any) -> None:
        """Texts are the run's arguments, which Weights & Biases has."""

    def flush(self) -> None:
        """Nothing is kept here."""


def settle_run(args: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    """Say which run of Weights & Biases this is, and where its files go, as far as nobody has said so.

    A run that goes on from a checkpoint of its own is the same run, by the id in `WANDB_RUN`; one that starts anew, or
    goes back with --ckpt-step, is another, so that nothing of the first is overwritten. So is a copy of a run's folder.
    """
    folder = folder_of(args)
    args.wandb_save_dir = args.wandb_save_dir or str(folder)
    args.wandb_exp_name = args.wandb_exp_name or _name(folder, environ.get("WANDB_RUN_GROUP"))
    if "WANDB_RUN_ID" in environ:
        return
    file, here = folder / WANDB_RUN, str(folder.resolve())
    before = _read(file)
    was = Path(before.get("folder", here))
    is_copy = str(was) != here and was.exists()
    goes_on = args.load and not args.finetune and args.ckpt_step is None and files.latest(Path(args.load)) is not None
    if goes_on and "id" in before and not is_copy:
        environ.setdefault("WANDB_RESUME", "allow")
        environ["WANDB_RUN_ID"] = before["id"]
        return
    environ["WANDB_RUN_ID"] = secrets.token_hex(4)
    folder.mkdir(parents=True, exist_ok=True)
    with files.written_at_once(file) as stream:
        stream.write(json.dumps({"id": environ["WANDB_RUN_ID"], "folder": here}) + "\n")


def folder_of(args: argparse.Namespace) -> Path:
    """Where the files of a run lie, by its flags: beside a folder `tensorboard`, or in that of --save."""
    if args.tensorboard_dir:
        events = Path(args.tensorboard_dir)
        return events.parent if events.name == "tensorboard" else events
    return Path(args.save or ".")


def _name(folder: Path, group: str | None) -> str:
    """A run's name: its folder's, within a sweep the path from the sweep's."""
    parts = folder.resolve().parts
    return "/".join(parts[parts.index(group) + 1 :] if group in parts[:-1] else parts[-1:])


def _read(file: Path) -> dict[str, str]:
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError):
        return {}


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
