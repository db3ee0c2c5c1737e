"""Settles and checks a command line: config, environment, device, flags; everything before torch.distributed.

In the order in which later parts need it: the environment before torch, the device before megatron-core.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron_muon.errors import quiet_imports
from megatron_muon.megatron import OWNS_PLACES
from megatron_muon.megatron.data import corpus
from megatron_muon.megatron.flags import arguments, config_file
from megatron_muon.megatron.flags.arguments import MODEL_FLAGS, Parser
from megatron_muon.megatron.gpu import settle_device
from megatron_muon.megatron.places import settle_places
from megatron_muon.megatron.version import check_versions
from megatron_muon.shipped import QUICKSTART, QUICKSTART_DATA

UNNAMED = Path("runs/pretrain_gpt")
"""Where a run that names no model leaves what it writes, unless it says so itself."""


@dataclass(frozen=True)
class Opened:
    """A command line whose config is read and whose environment and device are set."""

    config: config_file.ExperimentConfig | None
    rest: list[str]  # the command line without --config and --device
    device: str  # "cuda" or "cpu"
    elsewhere: bool  # this machine has no CUDA, and the settings are checked for one that has
    parser: Parser
    notes: list[str]


@dataclass(frozen=True)
class Launch:
    """A command line with every setting resolved."""

    argv: tuple[str, ...]  # all flags: `defaults` that were filled in, then the config's, then the user's
    args: argparse.Namespace  # `argv` parsed; megatron-core's validation still to come
    config: config_file.ExperimentConfig | None
    notes: tuple[str, ...]  # for the user, one line each
    defaults: tuple[str, ...]


def prepare(argv: Sequence[str]) -> Launch:
    """Resolve and check a rank's command line; a UserError says what is wrong.

    A run that names no model takes `QUICKSTART` and writes to `UNNAMED`.
    """
    places: dict[str, str] = {}
    unnamed = not {token.split("=")[0] for token in argv} & {"--config", *MODEL_FLAGS}
    if unnamed:
        argv = ["--config", str(QUICKSTART), *argv]
        places = {"--save": str(UNNAMED / "checkpoints"), "--tensorboard-dir": str(UNNAMED / "tensorboard")}
    opened = open_line(argv, writes=True)
    if unnamed:
        opened.notes.insert(0, f"no model flags and no --config: taking {QUICKSTART}, writing to {UNNAMED}")
    rest, config = opened.rest, opened.config
    if OWNS_PLACES not in os.environ:
        rest += _places(opened, places)
    return check(opened, rest if config is None else config_file.merge(config, rest), writes=True)


def open_line(argv: Sequence[str], *, writes: bool, overridden: Iterable[str] = ()) -> Opened:
    """Read a command line's config, set its environment, choose the device and make the parser.

    A run that `writes` is to start on this machine. Values of the config do not matter for flags of the command line,
    and for those that are `overridden`.
    """
    check_versions()
    early = Parser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    early.add_argument("--device", choices=("auto", "cuda", "cpu"))
    given, rest = early.parse_known_args(list(argv))
    notes: list[str] = []
    config, device = None, given.device
    if given.config is not None:
        config = config_file.load_config(given.config, overridden={*config_file.given_flags(rest), *overridden})
        notes = _apply(config)
        device = device or (dict(config.flags).get("--device") or (None,))[0]
    with quiet_imports():  # what is not installed shows in the defaults that are filled in for it
        device = settle_device(device or "auto", on_paper=not writes)

        from megatron_muon import cpu
        from megatron_muon.megatron.model import gpt  # noqa: F401

        parser = arguments.build_parser()
    if config is not None:
        config_file.check_flags(
            config, parser._option_string_actions, software=f"megatron-core {metadata.version('megatron-core')}"
        )
    return Opened(config, rest, device, device == "cuda" and cpu.installed(), parser, notes)


def check(opened: Opened, flags: Sequence[str], *, writes: bool, checks: bool = True) -> Launch:
    """Fill in what the flags of a command line lack, parse them, and check them by our own rules where `checks`."""
    defaults = arguments.missing_defaults(opened.parser, flags, device=opened.device)
    notes = [*opened.notes, *(["defaults filled in: " + " ".join(defaults)] if defaults else [])]
    full = (*defaults, *flags, "--device", opened.device)
    if opened.elsewhere:
        notes.append("checked for a machine with CUDA: its data, tokenizers and packages are not looked at")
    args = arguments.parse(opened.parser, full)
    if checks:
        is_quickstart = args.data_path == [str(QUICKSTART_DATA)]
        if is_quickstart and writes:
            corpus.prepare([], QUICKSTART_DATA, corpus.Settings(stdlib=corpus.STDLIB), overwrite=True)
        arguments.check_settings(
            args,
            device=opened.device,
            writes=writes,
            check_data=not opened.elsewhere and (writes or not is_quickstart),
            elsewhere=opened.elsewhere,
        )
    return Launch(full, args, opened.config, tuple(notes), tuple(defaults))


def _places(opened: Opened, defaults: Mapping[str, str]) -> list[str]:
    """What to add to a command line so that its start writes over no other run; see `settle_places`."""
    pairs = config_file.pairs(opened.rest, opened.parser._option_string_actions)
    chosen = {flag: " ".join(values) for flag, values in pairs}
    unset = config_file.given_flags(opened.rest) - chosen.keys()
    of_file = opened.config.flags if opened.config else ()
    in_file = {flag: " ".join(values) for flag, values in of_file if flag not in unset}
    found, note = settle_places({**in_file, **defaults}, chosen)
    opened.notes.extend(filter(None, [note]))
    flags = {flag: path for flag, path in defaults.items() if flag not in chosen} | found
    return [token for item in flags.items() for token in item]


def _apply(config: config_file.ExperimentConfig) -> list[str]:
    """Set a config's environment; what to tell of it."""
    notes = [f"{config.path}: ignored, no meaning here: {', '.join(config.ignored)}"] if config.ignored else []
    for name, value in config.env.items():
        if name not in os.environ:
            os.environ[name] = value
            notes.append(f"environment from {config.path}: {name}={value}")
        elif os.environ[name] != value:
            notes.append(f"environment wins over {config.path}: {name}={os.environ[name]}, not {value}")
    return notes
