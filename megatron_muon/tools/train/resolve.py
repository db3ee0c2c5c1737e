"""Resolves a run before it is launched: its flags and their sources, folder, device and ranks.

This needs torch and megatron-core, so `resolve` has a child process do it: the process that watches
a training stays small and free of CUDA. The child validates all flags as a rank does
(`megatron.prepare`).
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_muon.errors import RunFailedError, UserError, missing_extra, quiet_imports, settling
from megatron_muon.megatron.flags import config_file
from megatron_muon.megatron.flags import flag_names as names
from megatron_muon.megatron.flags.config_file import UNSET_FLAG, ExperimentConfig, given_flags
from megatron_muon.megatron.places import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    PLACES,
    RUN,
    SAVE,
    RunFolder,
    beside,
    locate,
    read_json,
)
from megatron_muon.tools.train.processes import python_path
from megatron_muon.tools.train.run_folder import config_hash, moved, name_of

FROM_LINE, FROM_FOLDER, FILLED_IN = "command line", "run folder", "filled in"
"""Sources of settings that no file holds."""

_SETTINGS = (
    "optimizer",
    "train_iters",
    "train_samples",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "exit_signal_handler",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_experts",
    "eval_iters",
    "eval_interval",
    "save",
    "save_interval",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
)
"""Megatron's arguments in `Resolved.settings` and run.json."""

_NEVER = "1000000000"
"""A --save-interval that no training reaches; it still saves at its end."""


@dataclass(frozen=True)
class Request:
    """The command line of `train`."""

    config: str  # experiment file
    flags: tuple[str, ...] = ()  # flags of pretrain_gpt.py
    ranks: int | None = None  # by default one for each GPU, or one without GPUs
    out: str | None = None  # by default, as the flags say, or `default_out`
    default_out: str = "runs/run"
    saves: bool = True  # also without --save: at the end, and before a signal ends the run
    resume: bool = False
    dry_run: bool = False
    command: str = ""  # as typed

    @property
    def continues_own_config(self) -> bool:
        """Whether `config` is that of the run in `out`, whose places hold."""
        return self.out is not None and self.config == str(Path(self.out, CONFIG))

    @property
    def name(self) -> str:
        """The run's name in headings."""
        return name_of(Path(self.config))

    @property
    def overridden(self) -> set[str]:
        """Flags of the file that have no effect, so that their placeholders may be unset."""
        flags = set(given_flags(self.flags))
        if self.out is not None and not self.continues_own_config:
            flags.add(EVENTS)
        if not self.saves:
            flags.add(SAVE)
        return flags


@dataclass(frozen=True)
class Flag:
    """A setting: its flag, values (none for a bare flag), and the file or word it comes from."""

    name: str
    values: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Resolved:
    """A run with every setting resolved."""

    flags: tuple[Flag, ...]  # chosen by someone; the contents of config.yaml
    filled_in: tuple[Flag, ...]  # needed by this machine, added by pretrain_gpt.py
    env: Mapping[str, str]  # ENV_VARS of the files
    notes: tuple[str, ...]  # for the user
    device: str
    ranks: int
    folder: RunFolder
    settings: Mapping[str, Any]  # some of Megatron's arguments by name
    files: tuple[str, ...]  # experiment files that were read

    @property
    def flag_values(self) -> list[tuple[str, tuple[str, ...]]]:
        """The flags as `config_text` and `config_hash` take them."""
        return [(flag.name, flag.values) for flag in self.flags]

    @property
    def config_hash(self) -> str:
        """Equal for equal experiments."""
        return config_hash(self.flag_values, self.env)


def resolve(request: Request) -> Resolved:
    """Resolves a run in a child process, which prints nothing here.

    Raises:
        UserError: a mistake of the user. One that shows without Megatron starts no process.
        RunFailedError: the process failed; its output has been shown.
    """
    _check_names(request)
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as this; this.answer()"],
        input=pickle.dumps(request),
        env={**os.environ, **python_path()},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        print(done.stderr.decode(errors="replace"), end="", file=sys.stderr)
        raise RunFailedError(
            f"the settings could not be checked (status {done.returncode}); see above"
        )
    answer: Resolved | UserError = pickle.loads(done.stdout)
    if isinstance(answer, UserError):
        raise answer
    return answer


def _check_names(request: Request) -> None:
    """Refuses an unreadable file, and unknown flags if those of pretrain_gpt.py are cached."""
    config = config_file.load_config(request.config, overridden=request.overridden)
    if known := names.kept():
        config_file.check_flags(config, known)
        config_file.refuse_unknown_flags(request.flags, {*known, UNSET_FLAG})


def answer() -> None:
    """The child: reads a request from stdin, answers on stdout, and prints to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = pickle.load(sys.stdin.buffer)
    answer: Resolved | UserError
    try:
        with settling("checking the settings"):
            answer = settle(request)
    except UserError as error:
        answer = UserError(str(error))  # its causes may not be picklable
    except ModuleNotFoundError as error:
        answer = UserError(missing_extra(error))
    with answers:
        pickle.dump(answer, answers)


def settle(request: Request) -> Resolved:
    """Resolves a run in this process: sets the environment, installs the CPU backend."""
    from megatron_muon.megatron import prepare
    from megatron_muon.megatron.flags.command_line import BY_PACKAGES

    with quiet_imports():
        import torch

        # before the CPU backend replaces it
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = request.ranks or gpus or 1
    os.environ["WORLD_SIZE"] = str(ranks)
    argv = ["--config", request.config, *request.flags]
    writes = not request.dry_run
    opened = prepare.open_line(argv, writes=writes, overridden=request.overridden)
    config = opened.config
    actions = opened.parser._option_string_actions
    assert config is not None
    if not names.kept():
        names.keep(actions)
    config_file.refuse_unknown_flags(opened.rest, {*actions, UNSET_FLAG})
    flags, folder, notes = _layers(request, config, actions, opened.rest)
    if "--device" in given_flags(argv):
        flags["--device"] = Flag("--device", (opened.device,), FROM_LINE)
    line = list(config_file.as_argv((flag.name, flag.values) for flag in flags.values()))
    checked = prepare.check(opened, line, writes=writes)
    notes += prepare.validate(checked.args, world_size=ranks, elsewhere=opened.elsewhere)
    if writes and opened.device == "cuda" and ranks > gpus:
        raise UserError(
            f"{ranks} ranks need as many GPUs, and this machine has {gpus}; give --nproc {gpus},"
            " or --device cpu"
        )
    filled_in = []
    for name, values in config_file.pairs(checked.defaults, actions):
        if not (opened.elsewhere and name in BY_PACKAGES):
            filled_in.append(Flag(name, values, FILLED_IN))
    notes += [note for note in checked.notes if not note.startswith("defaults filled in")]
    return Resolved(
        flags=tuple(flags.values()),
        filled_in=tuple(filled_in),
        env=config.env,
        notes=tuple(notes),
        device=opened.device,
        ranks=ranks,
        folder=folder,
        settings={name: getattr(checked.args, name, None) for name in _SETTINGS},
        files=tuple(map(str, config.files)),
    )


def _layers(
    request: Request,
    config: ExperimentConfig,
    actions: Mapping[str, argparse.Action],
    typed: Sequence[str],
) -> tuple[dict[str, Flag], RunFolder, list[str]]:
    """Flags of the file, the command line and the run's folder, the later ones winning; notes."""
    flags: dict[str, Flag] = {}

    def put(name: str, values: tuple[str, ...], source: str) -> None:
        same = [other for other in flags if actions[other].dest == actions[name].dest]
        for other in same:
            del flags[other]
        flags[name] = Flag(name, values, source)

    for name, values in config.flags:
        flags[name] = Flag(name, values, str(config.origins[name]))
    for name, values in config_file.pairs(typed, actions):
        put(name, values, FROM_LINE)
    values_of = {flag.name: " ".join(flag.values) for flag in flags.values()}
    chosen = {name: value for name, value in values_of.items() if flags[name].source == FROM_LINE}
    added: dict[str, str] = {}
    if request.continues_own_config and request.out is not None:
        run = read_json(Path(request.out, RUN))
        for name in PLACES:
            if name in values_of and name not in chosen:
                added[name] = moved(values_of[name], run, Path(request.out))
        values_of |= added
        chosen = values_of
    folder, places = locate(values_of, chosen, out=request.out, default=request.default_out)
    added |= places
    notes = []
    if not (request.out or request.resume or SAVE in chosen or EVENTS in chosen):
        folder, places, note = beside(folder, values_of)
        added |= places
        notes += [note] if note else []
    is_unset = folder.checkpoints is None and SAVE in given_flags(typed)
    if request.saves and not is_unset:
        if folder.checkpoints is None:
            folder = replace(folder, checkpoints=folder.root / CHECKPOINTS)
            added[SAVE] = str(folder.checkpoints)
            if "--save-interval" not in values_of:  # at the end alone
                added["--save-interval"] = values_of.get("--train-iters", _NEVER)
        if "--exit-signal-handler" not in {*values_of, *given_flags(typed)}:
            added["--exit-signal-handler"] = ""
    for name, value in added.items():
        values = (value,) if value else ()
        if name not in flags or flags[name].values != values:
            put(name, values, FROM_FOLDER)
    return flags, folder, notes
