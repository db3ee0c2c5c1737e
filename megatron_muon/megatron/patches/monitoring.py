"""TensorBoard and Weights & Biases show the same metrics under the same names, and the same facts about the run.

megatron-core 0.19 logs some of its metrics to one of the two alone, and to Weights & Biases only in a run that logs to
TensorBoard. Here whatever goes to the first goes to the second. Both are written by the last rank.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.training.global_vars as global_vars

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS_PREFIX, WANDB_RUN
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
    goes back with --ckpt-step, is another, so that nothing of the first is overwritten. So is a copy of a run's folder.
    """
    folder = Path()  # beside a folder `tensorboard` or `checkpoints`, else in it
    for place, name in ((args.save, "checkpoints"), (args.tensorboard_dir, "tensorboard")):
        if place:
            folder = Path(place).parent if Path(place).name == name else Path(place)
    here = folder.resolve()
    *_, sweep, point, run = ("", "", *here.parts)
    is_of_sweep = sweep == environ.get("WANDB_RUN_GROUP")
    args.wandb_save_dir = args.wandb_save_dir or str(folder)
    args.wandb_exp_name = args.wandb_exp_name or (f"{point}/{run}" if is_of_sweep else run)
    if "WANDB_RUN_ID" in environ:
        return
    before = read_json(folder / WANDB_RUN)
    was = Path(before.get("folder", here))
    is_copy = was != here and was.exists()
    own = args.load and args.save and Path(args.load).resolve() == Path(args.save).resolve()
    goes_on = own and not args.finetune and args.ckpt_step is None and isinstance(files.latest(Path(args.load)), int)
    if goes_on and "id" in before and not is_copy:
        environ.setdefault("WANDB_RESUME", "allow")
        environ["WANDB_RUN_ID"] = before["id"]
        return
    environ["WANDB_RUN_ID"] = secrets.token_hex(4)
    folder.mkdir(parents=True, exist_ok=True)
    with files.written_at_once(folder / WANDB_RUN) as stream:
        stream.write(json.dumps({"id": environ["WANDB_RUN_ID"], "folder": str(here)}) + "\n")


def show_facts(facts: Mapping[str, Any]) -> None:
    """Show what is known of the run: as TensorBoard's texts, and in the config of Weights & Biases."""
    named = _flat(facts, FACTS_PREFIX)
    if (writer := global_vars.get_tensorboard_writer()) is not None:
        for name, value in named.items():
            writer.add_text(name, str(value))
    if (wandb := global_vars.get_wandb_writer()) is not None:
        wandb.config.update(named, allow_val_change=True)


def _flat(facts: Mapping[str, Any], within: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= _flat(value, f"{within}{name}/") if isinstance(value, Mapping) else {f"{within}{name}": value}
    return found
