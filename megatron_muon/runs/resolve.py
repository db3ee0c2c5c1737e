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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_muon.errors import RunFailedError, UserError
from megatron_muon.megatron.flags.config_file import UNSET_FLAG, ExperimentConfig, given_flags
from megatron_muon.runs.processes import ROOT, THIS_MACHINE, Nodes
from megatron_muon.runs.run_folder import PLACES, RUN, RunFolder, config_hash, locate, moved, read_json
from megatron_muon.suggest import did_you_mean

FROM_SET, FROM_LINE, FROM_FOLDER, FILLED_IN = "--set", "command line", "run folder", "filled in"
"""Where a setting that no file holds comes from."""

_SETTINGS = (
    "optimizer",
    "train_iters",
    "train_samples",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "exit_signal_handler",
    "data_parallel_sharding_strategy",
)
"""Megatron's arguments in `Resolved.settings` and run.json."""

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
        nodes: the machines.
        out: the run's folder, where it is given.
        default_out: the run's folder where neither `out` nor the flags say.
        keeps_places: whether `config` is that of the run in `out` itself, whose --save and --tensorboard-dir hold.
        writes: whether data and folders may be made.
        resume: whether the run goes on from its own checkpoint, where there is one.
        overwrite: whether what lies in its folder is deleted first.
        grace_s: how long ranks may take to finish their step and save, once they have been asked to end.
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
    resume: bool = False
    overwrite: bool = False
    grace_s: int = 600
    command: str = ""


@dataclass(frozen=True)
class Flag:
    """One setting of a run.

    Attributes:
        name: with its dashes.
        values: none for a bare flag.
        source: the file it stands in, or one of the names above.
    """

    name: str
    values: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Resolved:
    """A settled experiment.

    Attributes:
        flags: everything that someone chose, without what is filled in; the contents of the resolved config.
        filled_in: flags that this machine needs, which pretrain_gpt.py fills in by itself.
        env: ENV_VARS of the files, before the environment wins over them.
        notes: what a user should be told.
        device: "cuda" or "cpu".
        ranks: processes on each machine.
        gpus: CUDA devices of this machine.
        folder: where the run's files go.
        settings: some of Megatron's arguments by name.
        files: experiment files read.
        can_wait: whether torchrun has --shutdown-timeout.
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
    can_wait: bool

    @property
    def flag_values(self) -> list[tuple[str, tuple[str, ...]]]:
        """The flags as `run_folder` and `config_file` have them."""
        return [(flag.name, flag.values) for flag in self.flags]

    @property
    def config_hash(self) -> str:
        """Equal for equal experiments."""
        return config_hash(self.flag_values, self.env)


def resolve_each(requests: Sequence[Request]) -> list[Resolved | UserError]:
    """Settles several experiments, each in a process of its own that need not import torch anew.

    Returns:
        For each request what is settled, or what the user got wrong.

    Raises:
        RunFailedError: a process failed; what it printed has been shown.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="resolve-") as folder:
        asked, answers = Path(folder, "asked"), Path(folder, "answers")
        asked.write_bytes(pickle.dumps(list(requests)))
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(asked), str(answers)],
            env={**os.environ, "PYTHONPATH": path},
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


def flag_named(key: str, actions: Mapping[str, argparse.Action]) -> str:
    """The flag that a key of `--set` means: `lr`, `--lr`, `muon_lr` and `muon-lr` are flags without or with dashes.

    Raises:
        UserError: there is none; names the nearest.
    """
    flags = {_plain(flag): flag for flag in actions if flag.startswith("--")}
    if f"--{key.lstrip('-')}" in actions:
        return f"--{key.lstrip('-')}"
    if _plain(key) in flags:
        return flags[_plain(key)]
    hint = did_you_mean(_plain(key), flags) or "; see pretrain_gpt.py --help"
    raise UserError(f"--set {key}: there is no flag --{_plain(key)}{hint}")


def set_flag(key: str, value: str, actions: Mapping[str, argparse.Action], in_file: Collection[str]) -> list[str]:
    """The command line that a `--set KEY=VALUE` stands for, given the parser's actions and the file's flags.

    `true` gives a bare flag; `false` and `null` take a flag of the file away, or give its `--no-` twin.

    Raises:
        UserError: no such flag, or a value that cannot be.
    """
    if value.lower() == "null" and (known := [flag for flag in in_file if _plain(flag) == _plain(key)]):
        return [token for flag in known for token in (UNSET_FLAG, flag)]  # one that no parser knows, too
    flag = flag_named(key, actions)
    action = actions[flag]
    if value.lower() in ("false", "null"):
        twins = [twin for twin in action.option_strings if twin.startswith("--no-")]
        twins += [twin for twin, other in actions.items() if other.dest == action.dest and twin == f"--no-{flag[2:]}"]
        if value.lower() == "false" and action.nargs == 0 and twins:
            return [twins[0]]
        spellings = [spelling for spelling in action.option_strings if spelling in in_file]
        return [token for spelling in spellings for token in (UNSET_FLAG, spelling)]
    if action.nargs == 0:
        if value.lower() != "true":
            raise UserError(f"--set {key}={value}: {flag} takes no value; type {key}=true or {key}=false")
        return [flag]
    if action.nargs in ("*", "+") or isinstance(action.nargs, int):
        return [flag, *value.split()]
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]


def _plain(key: str) -> str:
    return key.lstrip("-").replace("_", "-").lower()


def pairs(argv: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[tuple[str, tuple[str, ...]]]:
    """The flags of a command line with their values; a value may begin with dashes if no flag is named so."""
    found: list[tuple[str, list[str]]] = []
    for token in argv:
        flag, equals, value = token.partition("=")
        if flag in actions and token.startswith("--"):
            found.append((flag, [value] if equals else []))
        elif found:
            found[-1][1].append(token)
    return [(flag, tuple(values)) for flag, values in found]


@dataclass
class _Amendment:
    """Puts `--set` before the typed flags and the run folder's behind them; remembers where each comes from.

    Attributes:
        sets: the request's, without the device.
        sources: where a flag that no file holds comes from.
    """

    request: Request
    sets: Sequence[tuple[str, str]]
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folder: RunFolder | None = None

    def __call__(self, parser: argparse.ArgumentParser, config: ExperimentConfig | None, rest: list[str]) -> list[str]:
        """The flags to take instead of `rest`, for `launch.prepare`."""
        assert config is not None
        actions = parser._option_string_actions
        in_file = {flag for flag, _ in config.flags} | config.overridden
        from_sets = [token for key, value in self.sets for token in set_flag(key, value, actions, in_file)]
        typed = [*from_sets, *rest]
        unset = given_flags(typed) - {token.partition("=")[0] for token in typed}
        values = {flag: " ".join(value) for flag, value in config.flags if flag not in unset}
        chosen = {flag: " ".join(value) for flag, value in pairs(typed, actions)}
        rebased = self._rebased({flag: value for flag, value in values.items() if flag not in chosen})
        if self.request.keeps_places:
            chosen = {**values, **rebased, **chosen}
        self.folder, flags = locate(values, chosen, out=self.request.out, default=self.request.default_out)
        flags |= rebased
        self.sources |= dict.fromkeys(given_flags(from_sets), FROM_SET)
        self.sources |= dict.fromkeys(given_flags(rest), FROM_LINE) | dict.fromkeys(flags, FROM_FOLDER)
        return [*typed, *(token for item in flags.items() for token in item)]

    def _rebased(self, values: Mapping[str, str]) -> dict[str, str]:
        """The places of a run whose folder was copied or renamed, which are not where its flags `values` say."""
        if not self.request.keeps_places or self.request.out is None:
            return {}
        root = Path(self.request.out)
        run = read_json(root / RUN)
        now = {flag: moved(values[flag], run, root) for flag in PLACES if flag in values}
        rebased = {flag: path for flag, path in now.items() if path != values[flag]}
        if rebased:
            self.notes.append(f"this run was started in {run['folder']}; it goes on with what is in {root}")
        return rebased


def settle(request: Request) -> Resolved:
    """Settles an experiment in this process: sets the environment, replaces sys.argv, patches megatron-core.

    Raises:
        UserError: what the user got wrong, as pretrain_gpt.py would say it.
    """
    from torch.distributed.run import get_args_parser

    from megatron_muon.megatron import launch

    gpus = _gpus()
    ranks = request.ranks or gpus or 1
    os.environ["WORLD_SIZE"] = str(ranks * request.nodes.count)
    devices = [value for key, value in request.sets if _plain(key) == "device"]
    amendment = _Amendment(request, [(key, value) for key, value in request.sets if _plain(key) != "device"])
    argv = ["--config", request.config, *(["--device", devices[-1]] if devices else []), *request.flags]
    overridden = {f"--{name}" for key, _ in amendment.sets for name in (_plain(key), key.lstrip("-"))}
    if request.out is not None and not request.keeps_places:
        overridden |= {"--tensorboard-dir"}
    settled = launch.prepare(argv, root=ROOT, writes=request.writes, amend=amendment, overridden=overridden)
    config, folder, actions = settled.config, amendment.folder, settled.parser._option_string_actions
    assert config is not None
    assert folder is not None
    chosen = pairs(settled.argv[len(settled.defaults) :], actions)
    if "device" not in {_plain(flag) for flag, _ in config.flags} and "--device" not in argv:
        chosen = [item for item in chosen if item[0] != "--device"]
    by_dest: dict[str, Flag] = {}
    for flag, values in chosen:
        dest = actions[flag].dest
        by_dest.pop(dest, None)  # the last of a repeated setting counts, in its place
        default = config.origins.get(flag, FROM_LINE if flag == "--device" else FILLED_IN)
        by_dest[dest] = Flag(flag, values, amendment.sources.get(flag) or str(default))
    return Resolved(
        flags=tuple(by_dest.values()),
        filled_in=tuple(Flag(flag, values, FILLED_IN) for flag, values in pairs(settled.defaults, actions)),
        env=config.env,
        notes=(*amendment.notes, *(note for note in settled.notes if not note.startswith("defaults filled in"))),
        device=settled.device,
        ranks=ranks,
        gpus=gpus,
        folder=folder,
        settings={name: getattr(settled.args, name, None) for name in _SETTINGS},
        files=tuple(map(str, config.files)),
        can_wait="--shutdown-timeout" in get_args_parser()._option_string_actions,
    )


def _gpus() -> int:
    """CUDA devices, asked for before the CPU may stand in for them."""
    from megatron_muon.quiet import quiet_imports

    with quiet_imports():
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _answer_in_child(request: Request) -> Resolved | UserError:
    """What is settled, or what the user got wrong, from a fork of this process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send_answer() -> None:
        os.environ.pop(_NVML_CHECK, None)  # NVML counts a GPU that its driver cannot use, and this child may ask CUDA
        try:
            sender.send(settle(request))
        except UserError as error:
            sender.send(error)

    child = context.Process(target=send_answer)
    child.start()
    sender.close()
    try:
        answer: Resolved | UserError = receiver.recv()
    except EOFError:
        child.join()
        sys.exit(f"a child ended with status {child.exitcode}")
    child.join()
    return answer


def _import_once() -> None:
    """Imports what takes longest, for all children. CUDA is not touched: a child could not use it then."""
    from megatron_muon.quiet import quiet_imports

    os.environ[_NVML_CHECK] = "1"
    with quiet_imports():
        import torch

        if not torch.cuda.is_available():  # else children import what asks for a GPU by themselves
            import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: F401


def main(asked: Path, answers: Path) -> None:
    """The process that settles: reads requests and writes an answer for each."""
    _import_once()
    answers.write_bytes(pickle.dumps([_answer_in_child(request) for request in pickle.loads(asked.read_bytes())]))


if __name__ == "__main__":
    from megatron_muon.runs import resolve as this  # whose classes are those that were pickled

    this.main(Path(sys.argv[1]), Path(sys.argv[2]))
