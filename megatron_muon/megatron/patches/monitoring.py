"""TensorBoard and Weights & Biases show the same metrics under the same names.

megatron-core 0.19 logs some of its metrics to one of the two alone, and to Weights & Biases only in a run that logs to
TensorBoard. Here whatever goes to the first goes to the second. Both are written by the last rank.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.training.global_vars as global_vars

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.megatron import WANDB_RUN
from megatron_muon.megatron.places import read_json
from megatron_muon.patching import Patches


def log_to_both(patches: Patches) -> None:
    """Give Weights & Biases what TensorBoard gets, in every run of `--wandb-project`.

    0.19 keeps memory (--log-memory-to-tensorboard) and validation perplexity for TensorBoard, and without
    --tensorboard-dir logs neither losses nor validation anywhere. Metrics over samples stay TensorBoard's: their steps
    are not iterations.
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
            writer = SimpleNamespace(**dict.fromkeys(("add_scalar", "add_text", "flush"), lambda *_, **__: None))
            patches.replace(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)

        @patches.around(writer, "add_scalar")
        def add_scalar(
            add: Callable[..., None], name: str, value: Any, step: int | None = None, *rest: Any, **kwargs: Any
        ) -> None:
            add(name, value, step, *rest, **kwargs)
            if not name.endswith(" vs samples"):
                wandb.log({name: float(value)}, step)


def choose_run(args: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    """Choose the run of Weights & Biases and where its files go, unless flags or the environment do.

    A run that goes on from a checkpoint of its own is the same run, by the id in `WANDB_RUN`; one that starts anew, or
    goes back with --ckpt-step, is another, so that nothing of the first is overwritten.
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
    goes_on = own and not args.finetune and args.ckpt_step is None and isinstance(files.latest(Path(args.load)), int)
    before = read_json(folder / WANDB_RUN).get("id") if goes_on else None
    environ["WANDB_RUN_ID"] = before or secrets.token_hex(4)
    if before:
        environ.setdefault("WANDB_RESUME", "allow")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with files.written_at_once(folder / WANDB_RUN) as stream:
        stream.write(json.dumps({"id": environ["WANDB_RUN_ID"]}) + "\n")
