"""Resolves a run before it is launched: its flags and their sources, its folder, device and ranks.

All flags are validated as a rank does it (`megatron.prepare`), in this process, which imports torch
but touches no GPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_muon.errors import quiet_imports
from megatron_muon.megatron.flags import config_file
from megatron_muon.megatron.flags import flag_names as names
from megatron_muon.megatron.flags.config_file import UNSET_FLAG, given_flags
from megatron_muon.megatron.places import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    SAVE,
    TENSORBOARD,
    refuse_taken,
)

FROM_LINE, FROM_FOLDER, FILLED_IN = "command line", "run folder", "filled in"
"""Sources of settings that no file holds."""

_NEVER = "1000000000"
"""A --save-interval that no training reaches; it still saves at its end."""


@dataclass(frozen=True)
class Request:
    """The command line of `train`."""

    config: Path  # experiment file
    out: Path  # the run's folder
    flags: Sequence[str] = ()  # flags of pretrain_gpt.py
    ranks: int | None = None  # by default one for each GPU, or one without GPUs
    takes_all: bool = False  # --out: the file's --save and --tensorboard-dir do not count
    saves: bool = True  # also without --save: at the end, and before a signal ends the run
    resume: bool = False
    dry_run: bool = False


class Setting(NamedTuple):
    """A flag, its values (none for a bare flag), and the file or word it comes from."""

    flag: str
    values: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Experiment:
    """A run with every setting resolved."""

    request: Request
    settings: tuple[Setting, ...]
    env: Mapping[str, str]  # ENV_VARS of the files
    notes: tuple[str, ...]  # for the user
    device: str
    ranks: int
    args: argparse.Namespace  # Megatron's arguments

    def check_free(self) -> None:
        """Raises a UserError if the run would overwrite another."""
        if not self.request.resume:
            remedy = "give another --out DIR, go on with that run with --resume"
            refuse_taken(self.args.save, self.args.tensorboard_dir, remedy=remedy)


def resolve(request: Request) -> Experiment:
    """Resolves a run; a UserError for a mistake of the user, or a folder that is taken."""
    typed = given_flags(request.flags)
    replaced = {*typed}
    if request.takes_all and request.config != request.out / CONFIG:
        replaced |= {SAVE, EVENTS}
    if not request.saves:
        replaced.add(SAVE)
    config = config_file.load_config(request.config, overridden=replaced)
    if known := names.kept():  # before the imports that take seconds
        config_file.check_flags(config, known)
        config_file.refuse_unknown_flags(request.flags, {*known, UNSET_FLAG})
    placed = place(request, {*typed, *dict(config.flags)})
    with quiet_imports():
        return _validated(request, placed, replaced)


def place(request: Request, given: set[str]) -> list[str]:
    """Flags that put a run's files into its folder, unless these flags are `given`."""
    flags = []
    if EVENTS not in given:
        flags += [EVENTS, str(request.out / TENSORBOARD)]
    if not request.saves:
        return [*flags, UNSET_FLAG, SAVE]
    if SAVE not in given:
        flags += [SAVE, str(request.out / CHECKPOINTS)]
    if "--save-interval" not in given:
        flags += ["--save-interval", _NEVER]
    if "--exit-signal-handler" not in given:
        flags.append("--exit-signal-handler")
    return flags


def _validated(request: Request, placed: Sequence[str], replaced: set[str]) -> Experiment:
    """Validates the run as a rank would. Sets the environment, installs the CPU backend."""
    import torch

    from megatron_muon import cpu
    from megatron_muon.megatron import prepare

    has_gpus = torch.cuda.is_available() and not cpu.installed()
    gpus = torch.cuda.device_count() if has_gpus else 0
    ranks = request.ranks or gpus or 1
    argv = ["--config", str(request.config), *request.flags, *placed]
    argv += ["--resume"] if request.resume and request.saves else []
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        opened = prepare.open_line(argv, writes=not request.dry_run, overridden=replaced)
        actions = opened.parser._option_string_actions
        if not names.kept():
            names.keep(actions)
        config_file.refuse_unknown_flags(opened.rest, {*actions, UNSET_FLAG})
        checked = prepare.check(opened, opened.merged(), writes=not request.dry_run)
        notes = prepare.validate(checked.args, world_size=ranks, elsewhere=opened.elsewhere)
    finally:
        del os.environ["WORLD_SIZE"]
    config = opened.config
    assert config is not None
    settings = [Setting(flag, values, str(config.origins[flag])) for flag, values in config.flags]
    layers = {
        FROM_LINE: config_file.pairs(request.flags, actions),
        FROM_FOLDER: config_file.pairs(placed, actions),
        FILLED_IN: config_file.pairs(checked.defaults, actions),
    }
    for source, flags in layers.items():
        settings += [Setting(flag, values, source) for flag, values in flags]
    experiment = Experiment(
        request=request,
        settings=tuple(settings),
        env=config.env,
        notes=(*notes, *checked.notes),
        device=opened.device,
        ranks=ranks,
        args=checked.args,
    )
    experiment.check_free()
    return experiment
