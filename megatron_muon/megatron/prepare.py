"""Resolves and checks a command line: everything before torch.distributed.

The order is that in which later parts need it: the environment before torch, the device before
megatron-core. `check` applies this package's rules; `validate` those of megatron-core, for `train`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import linecache
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError, quiet_imports, unforeseen
from megatron_muon.megatron import STATUS_FOLDER
from megatron_muon.megatron.data import corpus
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.flags import config_file
from megatron_muon.megatron.flags.command_line import MODEL_FLAGS, Parser
from megatron_muon.megatron.places import EVENTS, LOAD, SAVE, refuse_taken
from megatron_muon.megatron.provenance import check_versions
from megatron_muon.megatron.run_device import settle_device
from megatron_muon.shipped import QUICKSTART, QUICKSTART_DATA

UNNAMED = Path("runs/pretrain_gpt")  # folder of a run without a model and without a folder
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}  # of arguments that were not given

FIRST_START_ONLY = ("--finetune", "--no-load-optim", "--no-load-rng")
"""Flags for a run's first start, as is --ckpt-step, not for a continuation from its checkpoint."""


@dataclass(frozen=True)
class Opened:
    """A command line whose config is read and whose environment and device are set."""

    config: config_file.ExperimentConfig | None
    rest: list[str]  # the command line without --config, --device and --resume
    resumes: bool
    device: str  # "cuda" or "cpu"
    elsewhere: bool  # checked for CUDA on a machine without it
    parser: Parser
    notes: list[str]

    def merged(self) -> list[str]:
        """All flags: the config's and the user's, changed for a run that continues."""
        flags = self.rest
        if self.config is not None:
            flags = config_file.merge(self.config, flags)
            if left_out := config_file.of_muon(self.config, self.rest):
                shown = " ".join(left_out)
                self.notes.append(f"left out of {self.config.path}, as they are Muon's: {shown}")
        return resumed(flags, self.notes) if self.resumes else flags


@dataclass(frozen=True)
class Launch:
    """A command line with every setting resolved."""

    argv: tuple[str, ...]  # all flags: `defaults` filled in, the config's, the user's
    args: argparse.Namespace  # `argv` parsed, before megatron-core's validation
    config: config_file.ExperimentConfig | None
    notes: tuple[str, ...]  # for the user, one line each
    defaults: tuple[str, ...]


def prepare(argv: Sequence[str]) -> Launch:
    """Resolve and check a rank's command line; a UserError says what is wrong.

    A run that names no model takes `QUICKSTART` and writes to `UNNAMED`.
    """
    is_unnamed = not {token.split("=")[0] for token in argv} & {"--config", *MODEL_FLAGS}
    if is_unnamed:
        places = (SAVE, f"{UNNAMED}/checkpoints", EVENTS, f"{UNNAMED}/tensorboard")
        argv = ["--config", str(QUICKSTART), *places, *argv]
    opened = open_line(argv, writes=True)
    if is_unnamed:
        note = f"no model flags and no --config: taking {QUICKSTART}, writing to {UNNAMED}"
        opened.notes.insert(0, note)
    launch = check(opened, opened.merged(), writes=True)
    if not opened.resumes and STATUS_FOLDER not in os.environ:
        _refuse_taken(launch.args)
    return launch


def _refuse_taken(args: argparse.Namespace) -> None:
    """Keep ranks that no launcher started off another run; all find the same, as none has begun."""
    continues = args.load is not None and not args.finetune
    own = args.save or args.load
    if continues and os.path.realpath(own) == os.path.realpath(args.load):
        return
    # one that continues another's checkpoint may log to the same place
    events = None if continues else args.tensorboard_dir
    remedy = f"give another {SAVE} DIR and {EVENTS} DIR, or continue that run with --resume"
    refuse_taken(args.save, events, remedy=remedy)


def resumed(flags: Sequence[str], notes: list[str]) -> list[str]:
    """The flags that continue the run in --save from its latest checkpoint, or begin it.

    With --finetune or --ckpt-step a second time, it would begin again and lose what it had trained.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(SAVE)
    parser.add_argument("--ckpt-step")
    for flag in FIRST_START_ONLY:
        parser.add_argument(flag, action="store_true")
    given, rest = parser.parse_known_args(list(flags))
    if given.save is None:
        raise UserError("no --save, so the run could not be resumed; add --save DIR")
    found = folders.latest(Path(given.save))
    if found is None:
        notes.append(f"no checkpoint in {given.save} yet: a first start")
        return list(flags)
    notes.append(f"continuing from {given.save}, iteration {found}")
    if given.ckpt_step is not None:
        notes.append(f"--ckpt-step {given.ckpt_step} is ignored: it is for a run's first start")
    return [*rest, SAVE, given.save, LOAD, given.save]


def open_line(argv: Sequence[str], *, writes: bool, overridden: Iterable[str] = ()) -> Opened:
    """Read a command line's config, set its environment, choose the device and make the parser.

    A run that `writes` starts on this machine. `overridden` flags may be unusable in the config.
    """
    warning = check_versions()
    early = Parser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    early.add_argument("--device", choices=("auto", "cuda", "cpu"))
    early.add_argument("--resume", action="store_true")
    given, rest = early.parse_known_args(list(argv))
    notes: list[str] = []
    config = None
    device = given.device
    if given.config is not None:
        overrides = {*config_file.given_flags(rest), *overridden}
        config = config_file.load_config(given.config, overridden=overrides)
        notes = _apply(config)
        (in_file,) = dict(config.flags).get("--device", (None,))
        device = device or in_file
    with quiet_imports():  # missing packages show in the defaults that are filled in for them
        device = settle_device(device or "auto", on_paper=not writes)

        from megatron_muon import cpu
        from megatron_muon.megatron.model import gpt  # noqa: F401

        parser = arguments.build_parser()
    if config is not None:
        config_file.check_flags(config, parser._option_string_actions)
    notes = [*filter(None, [warning]), *notes]
    elsewhere = device == "cuda" and cpu.installed()
    return Opened(config, rest, given.resume, device, elsewhere, parser, notes)


def check(opened: Opened, flags: Sequence[str], *, writes: bool) -> Launch:
    """Fill in the flags that a command line lacks, parse it, and check it by our own rules."""
    defaults = arguments.missing_defaults(opened.parser, flags, device=opened.device)
    full = (*defaults, *flags, "--device", opened.device)
    notes = list(opened.notes)
    if defaults:
        notes.append("defaults filled in: " + " ".join(defaults))
    if opened.elsewhere:
        notes.append("checked for CUDA, without the data, tokenizers and packages of that machine")
    args = arguments.parse(opened.parser, full)
    is_quickstart = args.data_path == [str(QUICKSTART_DATA)]
    if is_quickstart and writes:
        stdlib = corpus.CorpusSettings(stdlib=corpus.STDLIB)
        corpus.prepare([], QUICKSTART_DATA, stdlib)
    arguments.check_settings(
        args,
        device=opened.device,
        writes=writes,
        check_data=not opened.elsewhere and (writes or not is_quickstart),
    )
    return Launch(full, args, opened.config, tuple(notes), tuple(defaults))


def _apply(config: config_file.ExperimentConfig) -> list[str]:
    """Set a config's environment; notes on it."""
    notes = []
    if config.ignored:
        notes.append(f"{config.path}: ignored, no meaning here: {', '.join(config.ignored)}")
    for name, value in config.env.items():
        present = os.environ.setdefault(name, value)
        notes.append(f"environment from {config.path}: {name}={value}")
        if present != value:
            notes[-1] = f"environment wins over {config.path}: {name}={present}, not {value}"
    return notes


def validate(args: argparse.Namespace, *, world_size: int, elsewhere: bool = False) -> list[str]:
    """Apply megatron-core's own validation to a copy of `args`, without data or a process group.

    Raises a UserError for the first refusal; for a run that starts `elsewhere` it is returned as a
    note, as it may depend on packages that this machine lacks.
    """
    from megatron_muon.megatron.model.gpt import gpt_config
    from megatron_muon.megatron.upstream import pretrain_cfg_container_from_args

    if args.yaml_cfg is not None:  # holds the settings, which the ranks validate
        return []
    checked = copy.deepcopy(args)
    checked.rank = 0
    checked.world_size = world_size
    checked._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    try:
        with _as_in_training():
            _validate(checked)
            pretrain_cfg_container_from_args(checked, gpt_config(checked))
    except UserError as error:
        if not elsewhere:
            raise
        return [f"refused on this machine, which may lack the other's packages: {error}"]
    return []


def complete(args: argparse.Namespace) -> None:
    """Validate in place, for a plan, what a model depends on.

    The vocabulary's size is `--vocab-size`, or else that of the tokenizer. If neither is known it
    is 1, unless buckets that are cut by size depend on it. `args` have `rank` and `world_size`.
    """
    from megatron_muon.megatron.data.tokenizers import build_megatron
    from megatron_muon.megatron.upstream import installed, vocab_size_with_padding

    with _as_in_training():
        _validate(args)
        if args.vocab_size is None:
            try:
                build_megatron(args)  # which pads the vocabulary, too
            except UserError:
                if args.data_parallel_sharding_strategy not in installed().CUT_BY_LAYER:
                    raise
                args.vocab_size = 1
        if args.pad_vocab_size and args.padded_vocab_size is None:
            padded = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)
            args.padded_vocab_size = padded


def _validate(args: argparse.Namespace) -> None:
    from megatron_muon.megatron.upstream import validate_args  # the patched one

    if args.use_checkpoint_args:
        from megatron_muon.megatron.upstream import load_args_from_checkpoint

        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    validate_args(args, DEFAULTS)


@contextlib.contextmanager
def _as_in_training() -> Iterator[None]:
    """Validate as a training does, with its patches; no pickle of a checkpoint is run."""
    from megatron_muon.megatron.checkpoint import loading
    from megatron_muon.megatron.patches import install as patches
    from megatron_muon.patching import Patches

    no_prints = contextlib.redirect_stdout(io.StringIO())
    with explained(), Patches() as changes, no_prints, quiet_imports():
        loading.run_no_pickles(changes)
        patches.accept_muon(changes)
        yield


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn any error into a UserError: in Megatron's words if Megatron refuses the settings."""
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:
        unknown = UserError(f"Megatron's validation failed: {unforeseen(error)}")
        raise refused(error) or unknown from error


def refused(error: BaseException) -> UserError | None:
    """A UserError with Megatron's words, or its condition, if a statement of it raised `error`."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    statement = linecache.getline(file, line).strip()
    is_megatron = frame.f_globals.get("__name__", "").startswith("megatron.")
    if not is_megatron or not statement.startswith(("assert", "raise")):
        return None
    said = " ".join(str(error).split()) or statement
    place = f"{os.path.basename(file)}:{line}"
    return UserError(f"megatron-core refuses these settings: {said} ({place})")
