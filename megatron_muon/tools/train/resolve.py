"""Settles an experiment before it is launched: which flags, from where, in which folder, on which device.

This needs torch and megatron-core, so `resolve_each` has a child process do it: what watches a
training stays small and free of CUDA. The child goes the way of a rank up to the validation of all
flags (`megatron.prepare`).
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_muon.errors import RunFailedError, UserError, missing_extra, quiet_imports, settling
from megatron_muon.megatron.flags import flag_names as names
from megatron_muon.megatron.flags.config_file import (
    UNSET_FLAG,
    ExperimentConfig,
    as_argv,
    check_flags,
    given_flags,
    load_config,
    pairs,
    refuse_unknown_flags,
)
from megatron_muon.megatron.flags.flag_names import did_you_mean, plain
from megatron_muon.megatron.places import (
    CHECKPOINTS,
    PLACES,
    RUN,
    RunFolder,
    beside,
    locate,
    read_json,
)
from megatron_muon.tools.train.processes import python_path
from megatron_muon.tools.train.run_folder import config_hash, moved

FROM_SET, FROM_LINE, FROM_FOLDER, FILLED_IN = "--set", "command line", "run folder", "filled in"
"""Where a setting that no file holds comes from."""

_SETTINGS = (
    *(
        "optimizer",
        "train_iters",
        "train_samples",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
    ),
    *("exit_signal_handler", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
    *("num_layers", "hidden_size", "num_attention_heads", "num_experts"),
    *("eval_iters", "eval_interval", "save", "save_interval"),
    *(
        f"{kind}_parallel_size"
        for kind in ("tensor_model", "pipeline_model", "expert_model", "context")
    ),
)
"""Megatron's arguments in `Resolved.settings` and run.json."""

_NEVER = "1000000000"
"""A --save-interval that no training reaches; it still saves at its end."""


@dataclass(frozen=True)
class Request:
    """What a user asks for."""

    config: str  # experiment file
    sets: tuple[tuple[str, str], ...] = ()  # `--set`: key and value
    flags: tuple[str, ...] = ()  # further flags for pretrain_gpt.py
    # processes on each of `nodes` machines; None takes the GPUs, or one without
    ranks: int | None = None
    nodes: int = 1
    # the run's folder, where it is given; else what the flags say, or `default_out`
    out: str | None = None
    default_out: str = "runs/run"
    # `config` is that of the run in `out` itself, whose --save and --tensorboard-dir hold
    keeps_places: bool = False
    writes: bool = True  # data and folders may be made
    # check the settings, for which `ranks` have to be known, and not only that flags exist
    checks: bool = True
    # without a --save save at the end, and by any signal first; not where --save is taken away
    saves: bool = False
    resume: bool = False
    overwrite: bool = False
    grace_s: int = 600  # for ranks to finish their step and save, once they have been asked to end
    command: str = ""  # what the user typed

    @property
    def overridden(self) -> set[str]:
        """Flags of the file that do not matter, as `sets` or the run's folder take their places."""
        flags = {f"--{name}" for key, _ in self.sets for name in (plain(key), key.lstrip("-"))}
        return flags | (
            {"--tensorboard-dir"} if self.out is not None and not self.keeps_places else set()
        )


@dataclass(frozen=True)
class Flag:
    """One setting of a run: name with dashes, values (none for a bare flag), and the file or word it comes from."""

    name: str
    values: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Resolved:
    """An experiment with every setting resolved."""

    flags: tuple[Flag, ...]  # everything that someone chose; the contents of the resolved config
    # flags that this machine needs, which pretrain_gpt.py fills in by itself
    filled_in: tuple[Flag, ...]
    # ENV_VARS of the `files` that were read, before the environment wins over them
    env: Mapping[str, str]
    notes: tuple[str, ...]  # for the user
    device: str
    ranks: int  # processes on each machine, which has `gpus` CUDA devices
    gpus: int
    folder: RunFolder
    settings: Mapping[str, Any]  # some of Megatron's arguments by name
    files: tuple[str, ...]

    @property
    def flag_values(self) -> list[tuple[str, tuple[str, ...]]]:
        """The flags as `run_folder` and `config_hash` have them."""
        return [(flag.name, flag.values) for flag in self.flags]

    @property
    def config_hash(self) -> str:
        """Equal for equal experiments."""
        return config_hash(self.flag_values, self.env)


def resolve_each(requests: Sequence[Request]) -> list[Resolved | UserError]:
    """Each request resolved, or what the user got wrong; all in one child process, which prints nothing here.

    Where each has a mistake that can be found without Megatron, no process is started. Raises a
    RunFailedError where the process failed; what it printed has been shown.
    """
    early = [_refused_early(request) for request in requests]
    if all(early):
        return list(filter(None, early))
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as this; this.answer()"],
        input=pickle.dumps(list(requests)),
        env={**os.environ, **python_path()},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        print(done.stderr.decode(errors="replace"), end="", file=sys.stderr)
        raise RunFailedError(
            f"the settings could not be checked (status {done.returncode}); see above"
        )
    return list(pickle.loads(done.stdout))


def _refused_early(request: Request) -> UserError | None:
    """A file that cannot be read, or flags and keys that are not pretrain_gpt.py's, where these are known."""
    try:
        config = load_config(
            request.config, overridden={*given_flags(request.flags), *request.overridden}
        )
        if known := names.kept():
            for key, value in request.sets:
                if value.lower() != "null":  # which may take away what nothing knows
                    flag_named(key, known)
            check_flags(config, known)
            refuse_unknown_flags(request.flags, {*known, UNSET_FLAG})
    except UserError as error:
        return error
    return None


def answer() -> None:
    """The child process: reads requests from stdin and writes the answers to stdout, and all prints to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with answers:
        pickle.dump(resolve_here(pickle.load(sys.stdin.buffer)), answers)


def resolve_here(requests: Sequence[Request]) -> list[Resolved | UserError]:
    """`resolve_each` in this process; its environment and the CPU backend are put back after each request."""
    answered: list[Resolved | UserError] = []
    environ = dict(os.environ)
    for request in requests:
        try:
            if error := _refused_early(request):
                raise error
            with settling("checking the settings"):
                answered.append(settle(request))
        except UserError as error:
            answered.append(UserError(str(error)))  # without its causes, which may not be pickled
        except ModuleNotFoundError as error:
            answered.append(UserError(missing_extra(error)))
        finally:
            os.environ.clear()
            os.environ.update(environ)
            if "megatron_muon.cpu" in sys.modules:
                sys.modules["megatron_muon.cpu"].uninstall()
    return answered


def settle(request: Request) -> Resolved:
    """Settles an experiment in this process: sets the environment, installs the CPU backend.

    Raises:
        UserError: what the user got wrong.
    """
    from megatron_muon.megatron import prepare
    from megatron_muon.megatron.flags.command_line import BY_PACKAGES

    with quiet_imports():
        import torch

        # before the CPU may stand in for them
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = request.ranks or gpus or 1
    os.environ["WORLD_SIZE"] = str(ranks * request.nodes)
    devices = [f"--device={value}" for key, value in request.sets if plain(key) == "device"]
    argv = ["--config", request.config, *devices, *request.flags]
    opened = prepare.open_line(argv, writes=request.writes, overridden=request.overridden)
    config, actions = opened.config, opened.parser._option_string_actions
    assert config is not None
    if not names.kept():
        names.keep(actions)
    flags, folder, notes = _layers(request, config, actions, opened.rest)
    if "--device" in {*given_flags(argv), *flags}:
        source = flags["--device"].source if "--device" in flags else FROM_LINE
        flags["--device"] = Flag("--device", (opened.device,), source)
    line = [*as_argv((flag.name, flag.values) for flag in flags.values())]
    checked = prepare.check(opened, line, writes=request.writes, checks=request.checks)
    if request.checks:
        world_size = ranks * request.nodes
        notes += prepare.validate(checked.args, world_size=world_size, elsewhere=opened.elsewhere)
    if request.writes and opened.device == "cuda":  # a dry run or submit is for another machine
        check_gpus(ranks, gpus)
    return Resolved(
        flags=tuple(flags.values()),
        filled_in=tuple(
            Flag(flag, values, FILLED_IN)
            for flag, values in pairs(checked.defaults, actions)
            if not (opened.elsewhere and flag in BY_PACKAGES)
        ),
        env=config.env,
        notes=(
            *notes,
            *(note for note in checked.notes if not note.startswith("defaults filled in")),
        ),
        device=opened.device,
        ranks=ranks,
        gpus=gpus,
        folder=folder,
        settings={name: getattr(checked.args, name, None) for name in _SETTINGS},
        files=tuple(map(str, config.files)),
    )


def check_gpus(ranks: int, gpus: int, *, jobs: int = 1) -> None:
    """Raises a UserError for more processes, of all `jobs` at once, than this machine has GPUs."""
    if jobs * ranks > gpus:
        fewer = f" or --jobs {max(1, gpus // ranks)}" if jobs > 1 else ""
        raise UserError(
            f"{jobs * ranks} processes at once on this machine need as many GPUs, and it has"
            f" {gpus}; give --nproc {max(1, gpus // jobs)}{fewer}, or --device cpu"
        )


def _layers(
    request: Request,
    config: ExperimentConfig,
    actions: Mapping[str, argparse.Action],
    typed: Sequence[str],
) -> tuple[dict[str, Flag], RunFolder, list[str]]:
    """The flags of file, --set, command line and run folder, each over those before it; the folder; notes."""
    refuse_unknown_flags(typed, {*actions, UNSET_FLAG})
    flags = {flag: Flag(flag, given, str(config.origins[flag])) for flag, given in config.flags}

    def put(flag: str, given: tuple[str, ...], source: str) -> None:
        for name in [name for name in flags if actions[name].dest == actions[flag].dest]:
            del flags[name]  # the last of a repeated setting counts, in its place
        flags[flag] = Flag(flag, given, source)

    sets = [(key, value) for key, value in request.sets if plain(key) != "device"]
    for key, value in sets:
        setting = set_flag(key, value, actions, {*flags, *config.overridden})
        for name in [name for name in flags if plain(name) == plain(key)]:
            del flags[name]
        if setting is not None:
            put(*setting, FROM_SET)
    for flag, given in pairs(typed, actions):
        put(flag, given, FROM_LINE)
    values = {flag.name: " ".join(flag.values) for flag in flags.values()}
    chosen = {
        flag: value for flag, value in values.items() if flags[flag].source in (FROM_SET, FROM_LINE)
    }
    said = {plain(name) for name in (*chosen, *given_flags(typed), *(key for key, _ in sets))}
    added, notes = dict[str, str](), list[str]()
    if request.keeps_places and request.out is not None:
        run, root = read_json(Path(request.out, RUN)), Path(request.out)
        now = {
            flag: moved(values[flag], run, root) for flag in PLACES if flag in {*values} - {*chosen}
        }
        added = {flag: path for flag, path in now.items() if path != values[flag]}
        notes += (
            [f"this run was started in {run['folder']}; it continues with what is in {root}"]
            if added
            else []
        )
        chosen = values = {**values, **added}
    folder, places = locate(values, chosen, out=request.out, default=request.default_out)
    if request.out is None and not (
        request.resume or request.overwrite or {"--save", "--tensorboard-dir"} & {*chosen}
    ):
        folder, moves, note = beside(folder, values)
        places |= moves
        notes += [note] if note else []
    added = {**places, **added}
    if request.saves and (folder.checkpoints is not None or "save" not in said):
        saving = _saving(folder, values, said)
        folder = replace(folder, checkpoints=Path(saving.get("--save", folder.checkpoints or "")))
        added |= saving
    for flag, path in added.items():
        put(flag, (path,) if path else (), FROM_FOLDER)
    return flags, folder, notes


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


def set_flag(
    key: str, value: str, actions: Mapping[str, argparse.Action], in_file: Collection[str] = ()
) -> tuple[str, tuple[str, ...]] | None:
    """The flag and its values that a `--set KEY=VALUE` stands for, given the parser's actions and the file's flags.

    `true` gives a bare flag, `false` its `--no-` twin; None where `false` or `null` take the file's
    flag away.
    """
    word = value.lower()
    if word == "null":
        flag_named(key, {*actions, *in_file})  # the file may have one that no parser knows
        return None
    flag = flag_named(key, actions)
    action, twin = actions[flag], f"--no-{flag[2:]}"
    if word == "false":
        has_twin = action.nargs == 0 and twin in actions and actions[twin].dest == action.dest
        return (twin, ()) if has_twin else None
    if action.nargs == 0:
        if word != "true":
            raise UserError(
                f"--set {key}={value}: {flag} takes no value; type {key}=true or {key}=false"
            )
        return flag, ()
    is_list = action.nargs in ("*", "+") or isinstance(action.nargs, int)
    return flag, tuple(value.split()) if is_list else (value,)
