"""From a command line to a training run: config, device, patches, flags, megatron.training.pretrain.

`prepare` settles everything that can be settled without torch.distributed, in the order in which later parts need it:
the environment before torch, the device before megatron-core, the patches before arguments are validated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from megatron_muon import shipped
from megatron_muon.checkpoint import files
from megatron_muon.errors import (
    ExitStatus,
    OffloadError,
    RunFailedError,
    SaveError,
    UserError,
    end_alone,
    own_warnings_in_one_line,
    quiet_imports,
    settling,
)
from megatron_muon.megatron import OWNS_PLACES, STATUS_FOLDER
from megatron_muon.megatron.data import ensure_stdlib_corpus
from megatron_muon.megatron.flags import arguments, config_file
from megatron_muon.megatron.flags.arguments import MODEL_FLAGS, Parser
from megatron_muon.megatron.flags.path_checks import check_vocabularies, check_writable
from megatron_muon.megatron.flags.refusals import MUONS
from megatron_muon.megatron.gpu import refuse_unusable_gpu, take_own_gpu
from megatron_muon.megatron.places import settle_places
from megatron_muon.megatron.tell import tell
from megatron_muon.megatron.version import check_versions
from megatron_muon.shipped import QUICKSTART, QUICKSTART_DATA

UNNAMED = Path("runs/pretrain_gpt")
"""Where a run that names no model leaves what it writes, unless it says so itself."""

_SECONDS_FOR_FIRST_RANK = 30.0
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Launch:
    """A settled command line."""

    argv: tuple[str, ...]  # all flags: defaults that were filled in, then the config's, then the user's
    args: argparse.Namespace  # `argv` parsed; megatron-core's validation still to come
    device: str  # "cuda" or "cpu"
    notes: tuple[str, ...]  # what a user should be told, one line each
    defaults: tuple[str, ...]
    elsewhere: bool  # checked for a machine with CUDA, which this one is not
    parser: Parser
    config: config_file.ExperimentConfig | None


def prepare(
    argv: Sequence[str],
    *,
    writes: bool = True,
    amend: Callable[[Parser, config_file.ExperimentConfig | None, list[str]], list[str]] | None = None,
    overridden: Iterable[str] = (),
) -> Launch:
    """Settle a command line and make this process ready for it: environment, CPU backend, patches, sys.argv.

    A run that names no model takes `QUICKSTART` and writes to `UNNAMED`. Without `writes` neither the quickstart's
    corpus nor the folder of --save is made. `amend`, given the parser, the config and the rest of the command line,
    returns what to take instead of that rest; flags that it gives are `overridden`, so that the config's values do not
    matter.

    Raises:
        UserError: anything that a user got wrong.
    """
    check_versions()
    early = Parser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    early.add_argument("--device", choices=("auto", "cuda", "cpu"))
    given, rest = early.parse_known_args(list(argv))
    notes: list[str] = []
    places: dict[str, str] = {}
    if given.config is None and not {token.split("=")[0] for token in rest} & {*MODEL_FLAGS}:
        given.config = QUICKSTART
        notes.append(f"no model flags and no --config: taking {QUICKSTART}, writing to {UNNAMED}")
        places = {"--save": str(UNNAMED / "checkpoints"), "--tensorboard-dir": str(UNNAMED / "tensorboard")}
    config, device = None, given.device
    if given.config is not None:
        config = config_file.load_config(given.config, overridden={*config_file.given_flags(rest), *overridden})
        notes += _apply(config)
        device = device or (dict(config.flags).get("--device") or (None,))[0]
    with quiet_imports():  # what is not installed shows in the defaults that are filled in for it
        device = settle_device(device or "auto", on_paper=not writes)

        from megatron_muon.megatron.model import gpt  # noqa: F401
        from megatron_muon.megatron.patches import install as patches
        from megatron_muon.patching import Patches

        parser = arguments.build_parser()
    if amend is not None:
        rest = amend(parser, config, rest)
    elif OWNS_PLACES not in os.environ:
        found, note = _settle_places(parser, config, rest, places)
        rest, notes = [*rest, *found], [*notes, *filter(None, [note])]
    if config is not None:
        config_file.check_flags(config, parser, software=f"megatron-core {metadata.version('megatron-core')}")
        rest = config_file.merge(config, rest)
    defaults = arguments.missing_defaults(parser, rest, device=device)
    if defaults:
        notes.append("defaults filled in: " + " ".join(defaults))
    full = (*defaults, *rest, "--device", device)
    args = arguments.parse(parser, full)
    elsewhere = _is_elsewhere(device)
    notes += _check(args, device=device, writes=writes)
    if args.save and writes:
        check_writable(Path(args.save), "--save")
    muon_under_fsdp = args.optimizer in MUONS and args.use_megatron_fsdp
    patches.install(
        Patches(), muon_under_fsdp=muon_under_fsdp, megatron_fsdp=args.use_megatron_fsdp, profile=args.profile
    )
    sys.argv = [sys.argv[0], *full, *(["--config", str(given.config)] if given.config else [])]
    return Launch(full, args, device, tuple(notes), tuple(defaults), elsewhere, parser, config)


def _settle_places(
    parser: Parser, config: config_file.ExperimentConfig | None, rest: list[str], places: Mapping[str, str]
) -> tuple[list[str], str]:
    """What to add to a command line so that its start writes over no other run, and a note; see `settle_places`."""
    chosen = {flag: " ".join(values) for flag, values in config_file.pairs(rest, parser._option_string_actions)}
    unset = config_file.given_flags(rest) - chosen.keys()
    in_file = {flag: " ".join(values) for flag, values in (config.flags if config else ()) if flag not in unset}
    found, note = settle_places({**in_file, **places}, chosen)
    flags = {**{flag: path for flag, path in places.items() if flag not in chosen}, **found}
    return [token for item in flags.items() for token in item], note


def _apply(config: config_file.ExperimentConfig) -> list[str]:
    """Set a config's environment; what to tell of it."""
    notes = [f"{config.path}: no meaning here, passed over: {', '.join(config.ignored)}"] if config.ignored else []
    applied = config_file.apply_env(config, os.environ)
    for name, value in config.env.items():
        if name in applied:
            notes.append(f"environment from {config.path}: {name}={value}")
        elif os.environ[name] != value:
            notes.append(f"environment wins over {config.path}: {name}={os.environ[name]}, not {value}")
    return notes


def _is_elsewhere(device: str) -> bool:
    """Whether settings are checked for a machine with CUDA on one without it."""
    from megatron_muon import cpu

    return device == "cuda" and cpu.installed()


def _check(args: argparse.Namespace, *, device: str, writes: bool) -> list[str]:
    """Check the settings by our rules and by Megatron's, and the data; what to tell of it."""
    from megatron_muon.megatron import validation

    is_quickstart = args.data_path == [str(QUICKSTART_DATA)]
    if is_quickstart and writes:
        ensure_stdlib_corpus(QUICKSTART_DATA)
    elsewhere = _is_elsewhere(device)
    check_data = not elsewhere and (writes or not is_quickstart)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments.check_settings(args, device=device, writes=writes, check_data=check_data, elsewhere=elsewhere)
    unknown: list[str] | None = [] if elsewhere else None
    validated = validation.check(args, world_size=ranks, elsewhere=unknown)
    if not elsewhere:
        check_vocabularies(validated)
        return []
    return [
        "checked for a machine with CUDA, which this one is not: data, tokenizer files and Transformer Engine are "
        "not looked for here, other packages are taken to be those of this machine; flags in place of Transformer "
        "Engine or Apex are filled in there if they are missing",
        *(unknown or []),
    ]


def settle_device(wanted: str, *, on_paper: bool = False) -> str:
    """Turn "auto" into "cuda" or "cpu", for a rank its own GPU, and install the CPU backend for the latter.

    `on_paper` nothing is to run: without CUDA the CPU backend answers for it while settings are checked. Raises a
    UserError where CUDA was asked for and is not there, the machine has fewer GPUs than ranks, or "auto" finds a GPU
    that cannot be used.
    """
    import torch

    from megatron_muon import cpu

    has_cuda = torch.cuda.is_available() and not cpu.installed()
    if has_cuda and wanted != "cpu":
        if not on_paper:
            take_own_gpu()
        return "cuda"
    if wanted == "cuda" and not on_paper:
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu, or check nvidia-smi")
    if not has_cuda:
        refuse_unusable_gpu(wanted)
    cpu.install(force=wanted == "cpu")
    cpu.keep_freed_memory()
    return "cuda" if wanted == "cuda" else "cpu"


def run() -> NoReturn:
    """`main` and the end of the process; of one that failed while other ranks may wait for it at once."""
    try:
        status = main()
    except SystemExit:
        raise
    except BaseException:
        if not _has_group():
            raise
        end_alone(1)
    if status and _has_group():
        end_alone(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Train a GPT as the command line says; the exit status.

    A user's mistake is one line on the first rank of each node and status 2, a checkpoint that cannot be written one
    line and status 1. A run that a signal ended after it had written a checkpoint has status 75, to be started again.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    is_first = int(os.environ.get("RANK", "0")) == 0
    status, error, failed_at, trace = 1, None, time.time(), ""
    try:
        if {"--help", "-h"} & set(argv):
            _help(is_first)
        else:
            tell("stage", stage="importing Megatron")
            with settling("checking the settings"):
                launch = prepare(argv)
            alone = None if _has_group() else settle_one_process(os.environ)
            with contextlib.ExitStack() as held, own_warnings_in_one_line():
                if is_first:
                    config = shipped.note(launch.config.path) if launch.config else ""
                    for note in filter(None, (config, *launch.notes, alone)):
                        print(f"megatron-muon: {note}", flush=True)
                if is_first and launch.args.save is not None:  # keeps a second training away, on behalf of all ranks
                    lock = files.lock_of(Path(launch.args.save))
                    held.enter_context(lock.held(wait_s=files.SECONDS_FOR_A_DEAD_MACHINE))
                _train()
        status = 0
    except (UserError, SaveError, OffloadError, RunFailedError) as failure:
        status = 2 if isinstance(failure, UserError) else 1
        error, failed_at = str(failure), time.time()
        _tell(error)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status or not _ended_by_signal():
            raise
        status = ExitStatus.TEMPFAIL
    except BaseException as failure:
        error, failed_at = "".join(traceback.format_exception_only(failure)), time.time()
        trace = traceback.format_exc()
        raise
    finally:
        if folder := os.environ.get(STATUS_FOLDER):
            found = {"status": status, "error": error and error.splitlines()[0], "time": failed_at, "trace": trace}
            Path(folder, f"{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(found), "utf-8")
    return status


def _end_with(parent: int) -> None:
    """End this rank if torchrun is killed before the ranks have met: it would wait for the others for many minutes.

    torchrun holds the store where they meet. With --exit-signal-handler no signal ends a rank at that time.
    """
    while not getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)():  # it may be half imported
        if os.getppid() != parent:
            print("pretrain_gpt.py: error: torchrun has ended; so does this rank", file=sys.stderr, flush=True)
            os._exit(ExitStatus.FAILURE)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def settle_one_process(environ: MutableMapping[str, str]) -> str | None:
    """Set in `environ` what torchrun would have set for one process, unless this is a launched rank; a note on it.

    Raises a UserError where half of what a launcher sets is there, or where another launcher than torchrun has started
    several processes, each of which would train alone.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if not missing:
        return None
    if "RANK" in environ or "WORLD_SIZE" in environ:
        raise UserError(
            f"the environment has {'RANK' if 'RANK' in environ else 'WORLD_SIZE'} and lacks {', '.join(missing)}; "
            "start with torchrun, which sets all of them, or type: unset RANK WORLD_SIZE, for a run of one process"
        )
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # srun's and mpirun's process counts
        if environ.get(name, "1") != "1":
            raise UserError(
                f"{name}={environ[name]}: each of these processes would train alone; start one torchrun on each machine"
            )
    # The address is this machine, whatever a batch script has exported; the store takes a free port for 0.
    environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return "one process; for more: torchrun --nproc-per-node N"


def _has_group() -> bool:
    """Whether whoever called has made the process group already."""
    import torch.distributed as dist

    return dist.is_initialized()


def _help(is_first: bool) -> None:
    """Print all flags, on the first rank."""
    check_versions()
    if not is_first:
        return
    with quiet_imports():
        parser = arguments.build_parser()
    try:
        parser.print_help()
        sys.stdout.flush()
    except BrokenPipeError:  # `python pretrain_gpt.py --help | head`: whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_trained() -> bool:
    """Whether a run that was to train got as far as its first step, or had nothing left to do.

    megatron-core ends with status 0 where it cannot read a checkpoint, and leaves training out where it has no data.
    """
    from megatron.training import get_args

    args = get_args()
    is_done = getattr(args, "iteration", 0) >= (args.train_iters or args.train_samples or 0)
    return args.skip_train or is_done or bool(getattr(args, "do_train", False) and hasattr(args, "curr_iteration"))


def _ended_by_signal() -> bool:
    """Whether a signal reached a rank of a run with --exit-signal-handler."""
    from megatron.training import get_args
    from megatron.training.global_vars import get_signal_handler

    return get_args().exit_signal_handler and getattr(get_signal_handler(), "any_received", False)


def _tell(error: str) -> None:
    """Print a user's mistake, or a failed save, once per node.

    All ranks find most mistakes, and torchrun ends the others as soon as one has ended. One that waits for that in vain
    found a mistake that the first did not, and speaks then.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(_SECONDS_FOR_FIRST_RANK)
    for line in error.splitlines():
        print(f"pretrain_gpt.py: error: {line}", file=sys.stderr, flush=True)


def _train() -> None:
    import torch
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_muon.megatron.model.gpt import forward_step, gpt_config, train_valid_test_datasets
    from megatron_muon.megatron.validation import DEFAULTS

    tell("stage", stage="initializing Megatron")
    args = parse_and_validate_args(extra_args_provider=arguments.add_muon_arguments, args_defaults=DEFAULTS)
    together = False
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, gpt_config(args)),
            train_valid_test_datasets,
            ModelType.encoder_or_decoder,
            forward_step,
        )
        together = True
        tell("stage", stage="ending the ranks")
    except SystemExit as end:  # so Megatron ends all ranks: after a signal, at a time limit, for a fault that it found
        together = True
        if end.code or _ended_by_signal() or _has_trained():
            raise
    finally:
        if together and torch.distributed.is_initialized():  # else it would wait for the others: see `end_alone`
            torch.distributed.destroy_process_group()
    if not _has_trained():
        raise RunFailedError("nothing was trained: Megatron ended before the first step; what it printed says why")
