"""Resolves a run before it is launched: its flags and their sources, its folder, device and ranks.

All flags are validated as by a rank (`megatron.prepare`), in this process, which touches no GPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron import places
from megatron_muon.megatron.flags import config_file
from megatron_muon.megatron.flags import flag_names as names
from megatron_muon.megatron.flags.config_file import UNSET_FLAG, given_flags

FROM_LINE, FROM_FOLDER, FILLED_IN = "command line", "run folder", "filled in"  # sources

_NEVER = "1000000000"  # a --save-interval that no training reaches; it still saves at its end


class Setting(NamedTuple):
    """A flag, its values (none for a bare flag), and the file or word it comes from."""

    flag: str
    values: tuple[str, ...]
    source: str

    @property
    def is_place(self) -> bool:
        """A place in the run's folder, which config.yaml leaves out: the folder may be copied."""
        return self.source == FROM_FOLDER and self.flag in (places.EVENTS, places.SAVE)


@dataclass(frozen=True)
class Experiment:
    """A run with every setting resolved."""

    root: Path  # its folder
    resumes: bool
    settings: tuple[Setting, ...]
    env: Mapping[str, str]  # ENV_VARS of the files
    notes: tuple[str, ...]  # for the user
    device: str
    ranks: int
    args: argparse.Namespace  # Megatron's arguments

    def check_free(self) -> None:
        """Raises a UserError if the run would overwrite another, or a config.yaml of the user's."""
        config = self.root / places.CONFIG
        if config.exists() and not (self.root / places.RUN).exists():
            raise UserError(f"{config} does not belong to a run; give another --out DIR")
        if not self.resumes:
            remedy = "give another --out DIR, or continue that run with --resume"
            places.refuse_taken(self.args.save, self.args.tensorboard_dir, remedy=remedy)


def resolve(line: argparse.Namespace) -> Experiment:
    """Resolves a command line of `train`; a UserError for a mistake, or a folder that is taken."""
    typed = given_flags(line.flags)
    root = line.out
    replaced = {*typed}
    if root is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # unique
        root = Path("runs", f"{line.config.stem}-{stamp}")
    elif line.config != root / places.CONFIG:
        replaced |= {places.SAVE, places.EVENTS}  # of another run
    if line.no_save:
        replaced.add(places.SAVE)
    config = config_file.load_config(line.config, overridden=replaced)
    if known := names.kept():  # before the imports that take seconds
        config_file.check_flags(config, known)
        config_file.refuse_unknown_flags(line.flags, {*known, UNSET_FLAG})
    placed = place(root, {*typed, *dict(config.flags)}, saves=not line.no_save)
    with quiet_imports():
        return _validated(line, root, placed, replaced)


def place(root: Path, given: set[str], *, saves: bool) -> list[str]:
    """Flags that put a run's files into its folder, unless these flags are `given`."""
    flags = []
    if places.EVENTS not in given:
        flags += [places.EVENTS, str(root / places.TENSORBOARD)]
    if not saves:
        return [*flags, UNSET_FLAG, places.SAVE]
    if places.SAVE not in given:
        flags += [places.SAVE, str(root / places.CHECKPOINTS)]
    if "--save-interval" not in given:
        flags += ["--save-interval", _NEVER]
    if "--exit-signal-handler" not in given:
        flags.append("--exit-signal-handler")
    return flags


def _validated(
    line: argparse.Namespace, root: Path, placed: Sequence[str], replaced: set[str]
) -> Experiment:
    """Validates the run as a rank would. Sets the environment, installs the CPU backend."""
    import torch

    from megatron_muon import cpu
    from megatron_muon.megatron import prepare

    has_gpus = torch.cuda.is_available() and not cpu.installed()
    gpus = torch.cuda.device_count() if has_gpus else 0
    ranks = line.nproc or gpus or 1
    argv = ["--config", str(line.config), *line.flags, *placed]
    if line.resume and not line.no_save:
        argv.append("--resume")
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        opened = prepare.open_line(argv, writes=not line.dry_run, overridden=replaced)
        actions = opened.parser._option_string_actions
        if not names.kept():
            names.keep(actions)
        config_file.refuse_unknown_flags(opened.rest, {*actions, UNSET_FLAG})
        checked = prepare.check(opened, opened.merged(), writes=not line.dry_run)
        notes = prepare.validate(checked.args, world_size=ranks, elsewhere=opened.elsewhere)
    finally:
        del os.environ["WORLD_SIZE"]
    config = opened.config
    assert config is not None
    left_out = config_file.of_muon(config, line.flags)
    settings = [
        Setting(flag, values, str(config.origins[flag]))
        for flag, values in config.flags
        if flag not in left_out
    ]
    layers = {
        FROM_LINE: config_file.pairs(line.flags, actions),
        FROM_FOLDER: config_file.pairs(placed, actions),
        FILLED_IN: config_file.pairs(checked.defaults, actions),
    }
    for source, flags in layers.items():
        settings += [Setting(flag, values, source) for flag, values in flags]
    experiment = Experiment(
        root=root,
        resumes=line.resume,
        settings=tuple(settings),
        env=config.env,
        notes=(*notes, *checked.notes),
        device=opened.device,
        ranks=ranks,
        args=checked.args,
    )
    experiment.check_free()
    return experiment
