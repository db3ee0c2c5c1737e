"""Settles an experiment before it is launched: which flags, from where, in which folder, on which device.

Megatron's parser says which flags exist, so this needs torch and megatron-core. `resolve` has a process of its own do
it: what launches and watches a training stays small, and nothing of the CPU backend or a patch gets into it. That
process goes the way of a rank up to the validation of all flags (`mcore.launch.prepare`), so that a mistake is told
here, once, and not by torchrun.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.errors import RunFailedError, UserError
from megatron_muon.runs.processes import ROOT
from megatron_muon.runs.run_folder import PLACES, RUN, RunFolder, locate, moved, read_json
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
"""Megatron's arguments that are told apart, beside the flags."""

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes torch look for GPUs without CUDA, which a process that forks must not have touched."""


@dataclass(frozen=True)
class Request:
    """What a user asks for; travels to the resolving process as JSON.

    Attributes:
        config: experiment file.
        sets: `--set`: key and value.
        flags: further flags for pretrain_gpt.py.
        ranks: processes on each machine; None takes the GPUs, or one where there are none.
        nodes: machines.
        out: the run's folder, where it is given.
        default_out: the run's folder where neither `out` nor the flags say.
        keeps_places: whether `config` is that of the run in `out` itself, whose --save and --tensorboard-dir hold.
        writes: whether data and folders may be made.
    """

    config: str
    sets: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    ranks: int | None = None
    nodes: int = 1
    out: str | None = None
    default_out: str = "runs/run"
    keeps_places: bool = False
    writes: bool = True


@dataclass(frozen=True)
class Flag:
    """One setting of a run.

    Attributes:
        name: the flag.
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

    def value(self, name: str) -> str | None:
        """The value of a flag, where it is given."""
        return next((" ".join(flag.values) for flag in self.flags if flag.name == name), None)


def resolve(request: Request, *, environ: Mapping[str, str] | None = None) -> Resolved:
    """Settles an experiment in a process of its own.

    Args:
        request: what is asked for.
        environ: environment of that process; this one's by default.

    Raises:
        UserError: what the user got wrong, as pretrain_gpt.py would say it.
        RunFailedError: the process failed; what it printed has been shown.
    """
    (answer,) = resolve_each([request], environ=environ)
    if isinstance(answer, UserError):
        raise answer
    return answer


def resolve_each(
    requests: Sequence[Request], *, environ: Mapping[str, str] | None = None
) -> list[Resolved | UserError]:
    """Settles several experiments, each in a process of its own that need not import torch anew.

    Args:
        requests: what is asked for.
        environ: environment of those processes; this one's by default.

    Returns:
        For each request what is settled, or what the user got wrong.

    Raises:
        RunFailedError: a process failed; what it printed has been shown.
    """
    environ = dict(os.environ if environ is None else environ)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="resolve-") as folder:
        asked, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps([dataclasses.asdict(request) for request in requests]), "utf-8")
        command = [sys.executable, "-m", __name__, str(asked), str(answer)]
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if not answer.exists():
            print(done.stdout + done.stderr, end="", file=sys.stderr)
            raise RunFailedError(f"the settings could not be checked (status {done.returncode}); see above")
        answers = json.loads(answer.read_text("utf-8"))
    return [UserError(said["error"]) if "error" in said else _from_json(said) for said in answers]


def _from_json(said: dict[str, Any]) -> Resolved:
    """What `_main` returned, after its way through JSON."""
    for name in ("flags", "filled_in"):
        said[name] = tuple(Flag(flag["name"], tuple(flag["values"]), flag["source"]) for flag in said[name])
    for name in ("notes", "files"):
        said[name] = tuple(said[name])
    said["folder"] = RunFolder(**{name: value and Path(value) for name, value in said["folder"].items()})
    return Resolved(**said)


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
    """The command line that a `--set KEY=VALUE` stands for.

    `true` gives a bare flag; `false` and `null` take a flag of the file away, or give its `--no-` twin.

    Args:
        key: see `flag_named`.
        value: as typed.
        actions: the parser's actions by flag.
        in_file: flags of the experiment file.

    Raises:
        UserError: no such flag, or a value that cannot be.
    """
    if value.lower() == "null" and (known := [flag for flag in in_file if _plain(flag) == _plain(key)]):
        return [token for flag in known for token in ("--unset", flag)]  # one that no parser knows, too
    flag = flag_named(key, actions)
    action = actions[flag]
    if value.lower() in ("false", "null"):
        twins = [twin for twin in action.option_strings if twin.startswith("--no-")]
        twins += [twin for twin, other in actions.items() if other.dest == action.dest and twin == f"--no-{flag[2:]}"]
        if value.lower() == "false" and action.nargs == 0 and twins:
            return [twins[0]]
        spellings = [spelling for spelling in action.option_strings if spelling in in_file]
        return [token for spelling in spellings for token in ("--unset", spelling)]
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


def _main(request: Request) -> dict[str, Any]:
    """The work of the resolving process."""
    from megatron_muon.megatron import launch
    from megatron_muon.megatron.flags.config_file import ExperimentConfig, given_flags

    gpus = _gpus()
    ranks = request.ranks or gpus or 1
    os.environ["WORLD_SIZE"] = str(ranks * request.nodes)
    devices = [value for key, value in request.sets if _plain(key) == "device"]
    sets = [(key, value) for key, value in request.sets if _plain(key) != "device"]
    given: dict[str, str] = {}
    place: dict[str, RunFolder] = {}
    notes: list[str] = []

    def amend(parser: argparse.ArgumentParser, config: ExperimentConfig | None, rest: list[str]) -> list[str]:
        assert config is not None
        actions = parser._option_string_actions
        in_file = {flag for flag, _ in config.flags} | config.overridden
        from_sets = [token for key, value in sets for token in set_flag(key, value, actions, in_file)]
        typed = [*from_sets, *rest]
        unset = given_flags(typed) - {token.partition("=")[0] for token in typed}
        given.update({flag: FROM_SET for flag in given_flags(from_sets)})
        given.update({flag: FROM_LINE for flag in given_flags(rest)})
        values = {flag: " ".join(value) for flag, value in config.flags if flag not in unset}
        chosen = {flag: " ".join(value) for flag, value in pairs(typed, actions)}
        rebased: dict[str, str] = {}
        if request.keeps_places and request.out is not None:
            root = Path(request.out)
            run = read_json(root / RUN)
            now = {flag: moved(values[flag], run, root) for flag in PLACES if flag in values and flag not in chosen}
            rebased = {flag: path for flag, path in now.items() if path != values[flag]}
            chosen = {**values, **rebased, **chosen}
            if rebased:
                notes.append(f"this run was started in {run['folder']}; it goes on with what is in {root}")
        folder, flags = locate(values, chosen, out=request.out, default=request.default_out)
        flags |= rebased
        place["folder"] = folder
        given.update({flag: FROM_FOLDER for flag in flags})
        return [*typed, *(token for item in flags.items() for token in item)]

    argv = ["--config", request.config, *(["--device", devices[-1]] if devices else []), *request.flags]
    overridden = {f"--{_plain(key)}" for key, _ in sets} | {f"--{key.lstrip('-')}" for key, _ in sets}
    if request.out is not None and not request.keeps_places:
        overridden |= {"--tensorboard-dir"}
    settled = launch.prepare(argv, root=ROOT, writes=request.writes, amend=amend, overridden=overridden)
    actions = settled.parser._option_string_actions
    chosen = pairs(settled.argv[len(settled.defaults) :], actions)
    config = settled.config
    assert config is not None
    if "device" not in {_plain(flag) for flag, _ in config.flags} and "--device" not in argv:
        chosen = [item for item in chosen if item[0] != "--device"]
    by_dest: dict[str, Flag] = {}
    for flag, values in chosen:
        dest = actions[flag].dest
        by_dest.pop(dest, None)  # the last of a repeated setting counts, in its place
        source = given.get(flag) or str(config.origins.get(flag, FROM_LINE if flag == "--device" else FILLED_IN))
        by_dest[dest] = Flag(flag, values, source)
    filled_in = [Flag(flag, values, FILLED_IN) for flag, values in pairs(settled.defaults, actions)]
    from torch.distributed.run import get_args_parser

    return dataclasses.asdict(
        Resolved(
            flags=tuple(by_dest.values()),
            filled_in=tuple(filled_in),
            env=config.env,
            notes=(*notes, *(note for note in settled.notes if not note.startswith("defaults filled in"))),
            device=settled.device,
            ranks=ranks,
            gpus=gpus,
            folder=place["folder"],
            settings={name: getattr(settled.args, name, None) for name in _SETTINGS},
            files=tuple(str(file) for file in config.files),
            can_wait="--shutdown-timeout" in get_args_parser()._option_string_actions,
        )
    )


def _gpus() -> int:
    """CUDA devices, asked for before the CPU may stand in for them."""
    from megatron_muon.quiet import quiet_imports

    with quiet_imports():
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _resolve_request(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that came as JSON."""
    sets = tuple((key, value) for key, value in asked["sets"])
    try:
        return _main(Request(**{**asked, "sets": sets, "flags": tuple(asked["flags"])}))
    except UserError as error:
        return {"error": str(error)}


def _resolve_in_child(asked: dict[str, Any], answer: Path) -> dict[str, Any]:
    """`_resolve_request` in a child process: it replaces sys.argv, patches megatron-core, sets the environment."""
    child = os.fork()
    if child == 0:
        status = 1
        os.environ.pop(_NVML_CHECK, None)  # NVML counts a GPU that its driver cannot use, and this child may ask CUDA
        try:
            answer.write_text(json.dumps(_resolve_request(asked), default=str), "utf-8")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if ended:
        sys.exit(f"a child ended with status {os.waitstatus_to_exitcode(ended)}")
    return dict(json.loads(answer.read_text("utf-8")))


def _import_once() -> None:
    """Imports what takes longest, for all children. CUDA is not touched: a child could not use it then."""
    from megatron_muon.quiet import quiet_imports

    os.environ[_NVML_CHECK] = "1"
    with quiet_imports():
        import torch

        if not torch.cuda.is_available():  # else children import what asks for a GPU by themselves
            import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: F401


def _settle_all(asked: Path, answer: Path) -> None:
    """The process that settles: an answer for each request, or none at all."""
    requests = json.loads(asked.read_text("utf-8"))
    if len(requests) == 1:
        answers = [_resolve_request(requests[0])]
    else:
        _import_once()
        answers = [_resolve_in_child(request, answer.with_name(f"{at}.json")) for at, request in enumerate(requests)]
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(answers, default=str), "utf-8")
    partial.replace(answer)


if __name__ == "__main__":
    _settle_all(Path(sys.argv[1]), Path(sys.argv[2]))
