"""Resolves and checks a command line: config, environment, device, flags; everything before torch.distributed.

In the order in which later parts need it: the environment before torch, the device before
megatron-core.

`check` asks our own rules. megatron-core refuses settings by assertions on the way from flags to a
training: in the validation of all flags, the batch-size calculator, the configurations of model and
optimizer. `validate` goes that way on a copy of the arguments, for `train`, `sweep` and `submit`,
and shows a refusal in Megatron's words. The rest is refused by the ranks, whose errors before the
first step are shown in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import linecache
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.errors import UserError, quiet_imports, unforeseen
from megatron_muon.megatron import OWNS_PLACES
from megatron_muon.megatron.data import corpus
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.flags import config_file
from megatron_muon.megatron.flags.command_line import MODEL_FLAGS, Parser
from megatron_muon.megatron.places import settle_places
from megatron_muon.megatron.provenance import check_versions
from megatron_muon.megatron.run_device import settle_device
from megatron_muon.shipped import QUICKSTART, QUICKSTART_DATA

UNNAMED = Path("runs/pretrain_gpt")
"""Where a run that names no model leaves what it writes, unless it says so itself."""

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What validation takes for arguments that nobody gave."""

_OF_PACKAGES = re.compile(
    r"\binstall(ed|ation)?\b|\b(is_\w+_min_version|has_\w+_support|HAVE_\w+|get_device_capability|\w*ImportError"
    r"|ModuleNotFoundError|nvidia_resiliency_ext)\b"
)
"""What a refusal says, or its condition asks, that depends on packages and device and not on settings."""

_CONDITION_LINES = 6
"""Source lines above a refusal in which its condition is looked for."""


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

    # all flags: `defaults` that were filled in, then the config's, then the user's
    argv: tuple[str, ...]
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
        places = {
            "--save": str(UNNAMED / "checkpoints"),
            "--tensorboard-dir": str(UNNAMED / "tensorboard"),
        }
    opened = open_line(argv, writes=True)
    if unnamed:
        opened.notes.insert(
            0, f"no model flags and no --config: taking {QUICKSTART}, writing to {UNNAMED}"
        )
    rest, config = opened.rest, opened.config
    if OWNS_PLACES not in os.environ:
        rest += _places(opened, places)
    return check(opened, rest if config is None else config_file.merge(config, rest), writes=True)


def open_line(argv: Sequence[str], *, writes: bool, overridden: Iterable[str] = ()) -> Opened:
    """Read a command line's config, set its environment, choose the device and make the parser.

    A run that `writes` is to start on this machine. Values of the config do not matter for flags of
    the command line, and for those that are `overridden`.
    """
    check_versions()
    early = Parser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    early.add_argument("--device", choices=("auto", "cuda", "cpu"))
    given, rest = early.parse_known_args(list(argv))
    notes: list[str] = []
    config, device = None, given.device
    if given.config is not None:
        config = config_file.load_config(
            given.config, overridden={*config_file.given_flags(rest), *overridden}
        )
        notes = _apply(config)
        device = device or (dict(config.flags).get("--device") or (None,))[0]
    with quiet_imports():  # what is not installed shows in the defaults that are filled in for it
        device = settle_device(device or "auto", on_paper=not writes)

        from megatron_muon import cpu
        from megatron_muon.megatron.model import gpt  # noqa: F401

        parser = arguments.build_parser()
    if config is not None:
        config_file.check_flags(config, parser._option_string_actions)
    return Opened(config, rest, device, device == "cuda" and cpu.installed(), parser, notes)


def check(opened: Opened, flags: Sequence[str], *, writes: bool, checks: bool = True) -> Launch:
    """Fill in what the flags of a command line lack, parse them, and check them by our own rules where `checks`."""
    defaults = arguments.missing_defaults(opened.parser, flags, device=opened.device)
    notes = [*opened.notes, *(["defaults filled in: " + " ".join(defaults)] if defaults else [])]
    full = (*defaults, *flags, "--device", opened.device)
    if opened.elsewhere:
        notes.append(
            "checked for a machine with CUDA: its data, tokenizers and packages are not looked at"
        )
    args = arguments.parse(opened.parser, full)
    if checks:
        is_quickstart = args.data_path == [str(QUICKSTART_DATA)]
        if is_quickstart and writes:
            corpus.prepare(
                [], QUICKSTART_DATA, corpus.CorpusSettings(stdlib=corpus.STDLIB), overwrite=True
            )
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
    notes = (
        [f"{config.path}: ignored, no meaning here: {', '.join(config.ignored)}"]
        if config.ignored
        else []
    )
    for name, value in config.env.items():
        if name not in os.environ:
            os.environ[name] = value
            notes.append(f"environment from {config.path}: {name}={value}")
        elif os.environ[name] != value:
            notes.append(
                f"environment wins over {config.path}: {name}={os.environ[name]}, not {value}"
            )
    return notes


def validate(args: argparse.Namespace, *, world_size: int, elsewhere: bool = False) -> list[str]:
    """Take a command line through what megatron-core validates without data; no process group, nothing written.

    A run with `--yaml-cfg`, whose settings are not those of the flags, is left to its start. `args`
    stay as they are.

    Raises:
        UserError: the first refusal. For a run that starts `elsewhere`, what packages of this
            machine refuse is a note, which is returned.
    """
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_muon.megatron.model.gpt import gpt_config

    if args.yaml_cfg is not None:
        return []
    checked = copy.deepcopy(args)
    checked.rank, checked.world_size = 0, world_size
    checked._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    try:
        with _as_in_training():
            _validate(checked)
            calculator.init_num_microbatches_calculator(
                rank=checked.rank,
                global_batch_size=checked.global_batch_size,
                micro_batch_size=checked.micro_batch_size,
                data_parallel_size=checked.data_parallel_size * checked.gtp_weight_remat_size,
                decrease_batch_size_if_needed=checked.decrease_batch_size_if_needed,
                step_batch_size_schedule=checked.step_batch_size_schedule,
                seq_length=checked.seq_length,
            )
            calculator.unset_num_microbatches_calculator()
            pretrain_cfg_container_from_args(checked, gpt_config(checked))
    except UserError as error:
        if not (elsewhere and _OF_PACKAGES.search(str(error))):
            raise
        return [f"not known here, and checked no further: {error}"]
    return []


def complete(args: argparse.Namespace) -> None:
    """Validate in place what a model depends on, and nothing else: for a plan; a UserError where that is refused.

    The size of the vocabulary is that of `--vocab-size`, else the tokenizer's where there is one at
    hand. Where neither is known it is 1, unless buckets that are cut by size depend on it. `args`
    have `rank` and `world_size`.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    from megatron_muon.megatron.data.tokenizers import build_megatron

    with _as_in_training():
        _validate(args)
        if args.vocab_size is None:
            try:
                build_megatron(args)  # which pads the vocabulary, too
            except UserError:
                if args.data_parallel_sharding_strategy != "optim_grads_params":
                    raise
                args.vocab_size = 1
        if args.pad_vocab_size and args.padded_vocab_size is None:
            args.padded_vocab_size = vocab_size_with_padding(
                args.vocab_size, args, logging_enabled=False
            )


def _validate(args: argparse.Namespace) -> None:
    from megatron.training.arguments import validate_args  # the patched one

    if args.use_checkpoint_args:
        from megatron.training.checkpointing import load_args_from_checkpoint

        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    validate_args(args, DEFAULTS)


@contextlib.contextmanager
def _as_in_training() -> Iterator[None]:
    """What a training changes of the validation, for a while; prints are kept back.

    `--use-checkpoint-args` loads a part of the checkpoint, so validation trusts it no more than a
    training does.
    """
    from megatron_muon.megatron.checkpoint import loading
    from megatron_muon.megatron.patches import install as patches
    from megatron_muon.patching import Patches

    with (
        explained(),
        Patches() as changes,
        contextlib.redirect_stdout(io.StringIO()),
        quiet_imports(),
    ):
        loading.run_no_pickles(changes)
        patches.accept_muon(changes)
        yield


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what megatron-core refuses into a UserError in its words, and what no check foresaw into another."""
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:
        raise refused(error) or UserError(
            f"Megatron's validation failed: {unforeseen(error)}"
        ) from error


def refused(error: BaseException) -> UserError | None:
    """A UserError of one line, with the condition that did not hold, where a statement of Megatron has raised this."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    above = [
        part.strip() for part in linecache.getlines(file)[max(0, line - _CONDITION_LINES) : line]
    ]
    is_own = frame.f_globals.get("__name__", "").startswith("megatron.") and above
    if not is_own or not re.search(r"\b(assert|raise)\b", above[-1]):
        return None
    starts = [at for at, part in enumerate(above) if part.startswith(("assert ", "if ", "elif "))]
    source = " ".join(above[starts[-1] if starts else -1 :]).partition(" raise ")[0].rstrip(", \\")
    condition = f"{source} ({os.path.basename(file)}:{line})"
    said = ": ".join(filter(None, (" ".join(str(error).split()), condition)))
    return UserError(f"megatron-core refuses these settings: {said}")
