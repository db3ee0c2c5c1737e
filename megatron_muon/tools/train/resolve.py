"""Settles an experiment before it is launched: which flags, from where, in which folder, on which device.

Megatron's parser says which flags exist, so this needs torch and megatron-core. `resolve_each` has a process of its own
do it: what launches and watches a training stays small, and nothing of the CPU backend or a patch gets into it. That
process goes the way of a rank up to the validation of all flags (`launch.prepare`), so that a mistake is told here,
once, and not by torchrun.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_muon.errors import RunFailedError, UserError, missing_extra, settling
from megatron_muon.megatron.flags import names
from megatron_muon.megatron.flags.config_file import (
    UNSET_FLAG,
    ExperimentConfig,
    given_flags,
    load_config,
    pairs,
    refuse_unknown,
    refuse_unknown_flags,
)
from megatron_muon.megatron.flags.suggest import did_you_mean, plain
from megatron_muon.megatron.places import CHECKPOINTS, PLACES, RUN, RunFolder, beside, locate, read_json
from megatron_muon.tools.train import traces
from megatron_muon.tools.train.processes import THIS_MACHINE, Nodes, python_path
from megatron_muon.tools.train.run_folder import config_hash, moved

FROM_SET, FROM_LINE, FROM_FOLDER, FILLED_IN = "--set", "command line", "run folder", "filled in"
"""Where a setting that no file holds comes from."""

_SETTINGS = (
    *("optimizer", "train_iters", "train_samples", "seq_length", "micro_batch_size", "global_batch_size"),
    *("exit_signal_handler", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
    *("num_layers", "hidden_size", "num_attention_heads", "num_experts"),
    *("eval_iters", "eval_interval", "save", "save_interval"),
    *(f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model", "context")),
)
"""Megatron's arguments in `Resolved.settings` and run.json."""

_NEVER = "1000000000"
"""A --save-interval that no training reaches; it still saves at its end."""

_CHECKING = "checking the settings"
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes torch look for GPUs without CUDA, which a process that forks must not have touched."""


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        config: experiment file.
        sets: `--set`: key and value.
        flags: further flags for pretrain_gpt.py.
        ranks: processes on each machine; None takes the GPUs, or one where there are none.
        out: the run's folder, where it is given; else what the flags say, or `default_out`.
        keeps_places: whether `config` is that of the run in `out` itself, whose --save and --tensorboard-dir hold.
        writes: whether data and folders may be made.
        saves: whether settings without a --save get one, with a checkpoint at the end, and whether a signal that ends
            the training has it save first; settings that take --save away (`save=null`) get neither.
        grace_s: how long ranks may take to finish their step and save, once they have been asked to end.
        profile: whether to record some steps, or the first of them and the one after the last.
        command: what the user typed.
    """

    config: str
    sets: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    ranks: int | None = None
    nodes: Nodes = THIS_MACHINE
    out: str | None = None
    default_out: str = "runs/run"
    keeps_places: bool = False
    writes: bool = True
    saves: bool = False
    resume: bool = False
    overwrite: bool = False
    grace_s: int = 600
    profile: bool | tuple[int, int] = False
    command: str = ""


@dataclass(frozen=True)
class Flag:
    """One setting of a run: name with dashes, values (none for a bare flag), and the file or word it comes from."""

    name: str
    values: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Resolved:
    """A settled experiment.

    Attributes:
        flags: everything that someone chose; the contents of the resolved config.
        filled_in: flags that this machine needs, which pretrain_gpt.py fills in by itself.
        env: ENV_VARS of the `files` that were read, before the environment wins over them.
        notes: what a user should be told.
        ranks: processes on each machine, which has `gpus` CUDA devices.
        settings: some of Megatron's arguments by name.
    """

    flags: tuple[Flag, ...]
    filled_in: tuple[Flag, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...]
    device: str
    ranks: int
    gpus: int
    folder: RunFolder
    settings: Mapping[str, Any]
    files: tuple[str, ...]

    @property
    def flag_values(self) -> list[tuple[str, tuple[str, ...]]]:
        """The flags as `run_folder` and `config_file` have them."""
        return [(flag.name, flag.values) for flag in self.flags]

    @property
    def config_hash(self) -> str:
        """Equal for equal experiments."""
        return config_hash(self.flag_values, self.env)


def resolve_each(requests: Sequence[Request]) -> list[Resolved | UserError]:
    """What is settled for each request, or what the user got wrong; each in a fork of one process.

    What needs no Megatron to find is found first: where each has such a mistake, no process is started.

    Raises:
        RunFailedError: a process failed; what it printed has been shown.
    """
    early = [_refused_early(request) for request in requests]
    if all(early):
        return [error for error in early if error is not None]
    with tempfile.TemporaryDirectory(prefix="resolve-") as folder:
        asked, answers = Path(folder, "asked"), Path(folder, "answers")
        asked.write_bytes(pickle.dumps(list(requests)))
        done = subprocess.run(
            [sys.executable, "-c", f"import {__name__} as this; this.answer()", str(asked), str(answers)],
            env={**os.environ, **python_path()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if not answers.exists():
            print(done.stdout + done.stderr, end="", file=sys.stderr)
            raise RunFailedError(f"the settings could not be checked (status {done.returncode}); see above")
        return list(pickle.loads(answers.read_bytes()))


def _refused_early(request: Request) -> UserError | None:
    """A file that cannot be read, or flags and keys that are not pretrain_gpt.py's, where these are known."""
    try:
        config = load_config(request.config, overridden={*given_flags(request.flags), *_overridden(request)})
        if known := names.kept():
            for key, value in request.sets:
                if value.lower() != "null":  # which may take away what nothing knows
                    flag_named(key, known)
            refuse_unknown(config, known, software=f"megatron-core {metadata.version('megatron-core')}")
            refuse_unknown_flags(request.flags, {*known, UNSET_FLAG})
    except UserError as error:
        return error
    return None


def _overridden(request: Request) -> set[str]:
    """Flags of the file that do not matter, as `request.sets` or its folder take their places."""
    flags = {f"--{name}" for key, _ in request.sets for name in (plain(key), key.lstrip("-"))}
    return flags | ({"--tensorboard-dir"} if request.out is not None and not request.keeps_places else set())


def answer() -> None:
    """The process that settles: reads requests from the file `sys.argv[1]` and writes the answers to `sys.argv[2]`."""
    asked, answers = map(Path, sys.argv[1:])
    requests = pickle.loads(asked.read_bytes())
    answered: list[Resolved | UserError]
    try:
        with settling(_CHECKING):
            _import_once()
            answered = [_answer_in_fork(request) for request in requests]
    except (UserError, ModuleNotFoundError) as error:
        reason = missing_extra(error) if isinstance(error, ModuleNotFoundError) else str(error)
        answered = [UserError(reason)] * len(requests)
    answers.write_bytes(pickle.dumps(answered))


def _import_once() -> None:
    """Imports what takes longest, for all forks. CUDA is not touched: a fork could not use it then."""
    from megatron_muon.errors import quiet_imports

    os.environ[_NVML_CHECK] = "1"
    with quiet_imports():
        import torch

        if not torch.cuda.is_available():  # else forks import what asks for a GPU by themselves
            import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: F401


def _answer_in_fork(request: Request) -> Resolved | UserError:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as fork:
        try:
            return fork.submit(_settle_in_fork, request).result()
        except UserError as error:
            return error


def _settle_in_fork(request: Request) -> Resolved:
    os.environ.pop(_NVML_CHECK, None)  # NVML counts a GPU that its driver cannot use, and this fork may ask CUDA
    with settling(_CHECKING):
        return settle(request)


def settle(request: Request) -> Resolved:
    """Settles an experiment in this process: sets the environment, replaces sys.argv, patches megatron-core.

    Raises:
        UserError: what the user got wrong, as pretrain_gpt.py would say it.
    """
    from megatron_muon.errors import quiet_imports
    from megatron_muon.megatron import launch
    from megatron_muon.megatron.flags.arguments import BY_PACKAGES

    with quiet_imports():
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # before the CPU may stand in for them
    ranks = request.ranks or gpus or 1
    os.environ["WORLD_SIZE"] = str(ranks * request.nodes.count)
    devices = [value for key, value in request.sets if plain(key) == "device"]
    sets = [(key, value) for key, value in request.sets if plain(key) != "device"]
    argv = ["--config", request.config, *(["--device", devices[-1]] if devices else []), *request.flags]
    amended: _Amended

    def amend(parser: argparse.ArgumentParser, config: ExperimentConfig | None, typed: list[str]) -> list[str]:
        nonlocal amended
        assert config is not None
        if not names.kept():
            names.keep(parser._option_string_actions)
        amended = _amend(request, sets, parser._option_string_actions, config, typed, ranks)
        return amended.argv

    settled = launch.prepare(argv, writes=request.writes, amend=amend, overridden=_overridden(request))
    if request.writes and settled.device == "cuda":  # a dry run or submit is for another machine
        check_gpus(ranks, gpus)
    config, actions = settled.config, settled.parser._option_string_actions
    assert config is not None
    chosen = pairs(settled.argv[len(settled.defaults) :], actions)
    if "device" not in {plain(flag) for flag, _ in config.flags} and "--device" not in argv:
        chosen = [item for item in chosen if item[0] != "--device"]
    sources = {"--device": FROM_LINE, **{flag: str(file) for flag, file in config.origins.items()}, **amended.sources}
    by_dest: dict[str, Flag] = {}
    for flag, values in chosen:
        by_dest.pop(actions[flag].dest, None)  # the last of a repeated setting counts, in its place
        by_dest[actions[flag].dest] = Flag(flag, values, sources.get(flag, FILLED_IN))
    return Resolved(
        flags=tuple(by_dest.values()),
        filled_in=tuple(
            Flag(flag, values, FILLED_IN)
            for flag, values in pairs(settled.defaults, actions)
            if not (settled.elsewhere and flag in BY_PACKAGES)
        ),
        env=config.env,
        notes=(*amended.notes, *(note for note in settled.notes if not note.startswith("defaults filled in"))),
        device=settled.device,
        ranks=ranks,
        gpus=gpus,
        folder=amended.folder,
        settings={name: getattr(settled.args, name, None) for name in _SETTINGS},
        files=tuple(map(str, config.files)),
    )


def check_gpus(ranks: int, gpus: int, *, jobs: int = 1) -> None:
    """Raises a UserError for more processes, of all `jobs` at once, than this machine has GPUs."""
    if jobs * ranks > gpus:
        fewer = f" or --jobs {max(1, gpus // ranks)}" if jobs > 1 else ""
        raise UserError(
            f"{jobs * ranks} processes at once on this machine need as many GPUs, and it has {gpus}; give "
            f"--nproc {max(1, gpus // jobs)}{fewer}, or --device cpu"
        )


@dataclass(frozen=True)
class _Amended:
    """A command line to which --set and the run's folder have been added; `sources` are of flags that no file holds."""

    argv: list[str]
    sources: Mapping[str, str]
    folder: RunFolder
    notes: Sequence[str]


def _amend(
    request: Request,
    sets: Sequence[tuple[str, str]],
    actions: Mapping[str, argparse.Action],
    config: ExperimentConfig,
    typed: Sequence[str],
    ranks: int,
) -> _Amended:
    """Puts `sets` before the typed flags and the run folder's behind them; what --profile stands for comes first."""
    in_file = {flag for flag, _ in config.flags} | config.overridden
    from_sets = [token for key, value in sets for token in set_flag(key, value, actions, in_file)]
    line = [*from_sets, *typed]
    unset = given_flags(line) - {token.partition("=")[0] for token in line}
    values = {flag: " ".join(value) for flag, value in config.flags if flag not in unset}
    chosen = {flag: " ".join(value) for flag, value in pairs(line, actions)}
    typed_flags = chosen.keys()
    rebased: dict[str, str] = {}
    notes = []
    if request.keeps_places:
        if request.out is not None:  # a run whose folder was copied or renamed: its places are not where its flags say
            root, run = Path(request.out), read_json(Path(request.out, RUN))
            now = {flag: moved(values[flag], run, root) for flag in PLACES if flag in values and flag not in chosen}
            rebased = {flag: path for flag, path in now.items() if path != values[flag]}
            notes = [f"this run was started in {run['folder']}; it goes on with what is in {root}"] if rebased else []
        chosen = {**values, **rebased, **chosen}
    folder, flags = locate(values, chosen, out=request.out, default=request.default_out)
    if request.out is None and not (request.resume or request.overwrite or {"--save", "--tensorboard-dir"} & {*chosen}):
        folder, moves, note = beside(folder, {**values, **chosen})
        flags |= moves
        notes += [note] if note else []
    flags |= rebased
    said = {plain(name) for name in (*chosen, *(key for key, _ in sets))}
    if request.saves and (folder.checkpoints is not None or "save" not in said):
        saving = _saving(folder, {**values, **chosen}, said)
        folder = replace(folder, checkpoints=Path(saving.get("--save", folder.checkpoints or "")))
        flags |= saving
    profiled = traces.flags(request, folder, ranks, {**values, **chosen, **flags}, typed_flags)
    sources = {**dict.fromkeys(given_flags(profiled), FROM_LINE), **dict.fromkeys(given_flags(from_sets), FROM_SET)}
    sources |= dict.fromkeys(given_flags(typed), FROM_LINE) | dict.fromkeys(flags, FROM_FOLDER)
    added = [token for flag, value in flags.items() for token in ((flag, value) if value else (flag,))]
    return _Amended([*profiled, *line, *added], sources, folder, notes)


def _saving(folder: RunFolder, values: Mapping[str, str], said: Collection[str]) -> dict[str, str]:
    """Flags by which a run saves at its end and when a signal ends it; `said` are names in --set and on the line."""
    flags = {}
    if folder.checkpoints is None:
        flags["--save"] = str(folder.root / CHECKPOINTS)
        if "--save-interval" not in values:  # at the end alone
            flags["--save-interval"] = values.get("--train-iters", _NEVER)
    if "--exit-signal-handler" not in values and "exit-signal-handler" not in said:
        flags["--exit-signal-handler"] = ""
    return flags


def flag_named(key: str, actions: Collection[str]) -> str:
    """The flag that a key of `--set` means: `lr`, `--lr`, `muon_lr` and `muon-lr`; a UserError where there is none."""
    flags = {plain(flag): flag for flag in actions if flag.startswith("--")}
    flag = f"--{key.lstrip('-')}"
    flag = flag if flag in actions else flags.get(plain(key), "")
    if not flag:
        hint = did_you_mean(plain(key), flags) or "; see pretrain_gpt.py --help"
        raise UserError(f"--set {key}: there is no flag --{plain(key)}{hint}")
    return flag


def set_flag(key: str, value: str, actions: Mapping[str, argparse.Action], in_file: Collection[str]) -> list[str]:
    """The command line that a `--set KEY=VALUE` stands for, given the parser's actions and the file's flags.

    `true` gives a bare flag; `false` and `null` take a flag of the file away, or give its `--no-` twin.

    Raises:
        UserError: no such flag, or a value that cannot be.
    """

    def without(flags: Iterable[str]) -> list[str]:
        return [token for flag in flags for token in (UNSET_FLAG, flag)]

    word = value.lower()
    if word == "null" and (known := [flag for flag in in_file if plain(flag) == plain(key)]):
        return without(known)  # one that no parser knows, too
    flag = flag_named(key, actions)
    action, twin = actions[flag], f"--no-{flag[2:]}"
    if word == "false" and action.nargs == 0 and twin in actions and actions[twin].dest == action.dest:
        return [twin]
    if word in ("false", "null"):
        return without(spelling for spelling in action.option_strings if spelling in in_file)
    if action.nargs == 0:
        if word != "true":
            raise UserError(f"--set {key}={value}: {flag} takes no value; type {key}=true or {key}=false")
        return [flag]
    if action.nargs in ("*", "+") or isinstance(action.nargs, int):
        return [flag, *value.split()]
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]
