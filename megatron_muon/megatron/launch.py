"""A rank of a training run: check the command line, patch megatron-core, train, and end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_muon import shipped
from megatron_muon.checkpoint.locks import locked
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
from megatron_muon.megatron import STATUS_FOLDER, tell
from megatron_muon.megatron.flags.command_line import add_run_arguments, build_parser
from megatron_muon.megatron.prepare import DEFAULTS, Launch, explained, prepare, refused
from megatron_muon.megatron.provenance import check_versions
from megatron_muon.ranks import is_first_rank

_SECONDS_FOR_FIRST_RANK = 30.0


def run() -> NoReturn:
    """Run `main` and exit; after a failure exit at once, as other ranks may wait for this one."""
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
    """Train a GPT by the command line; the exit status, of `ExitStatus`.

    A user's mistake, or a checkpoint that cannot be written, is one line on the first rank of each
    node.
    """
    argv = sys.argv[1:] if argv is None else argv
    status, error = 1, ""
    failed_at = time.time()
    try:
        if {"--help", "-h"} & set(argv):
            _help()
        else:
            _start(argv)
        status = 0
    except (UserError, SaveError, OffloadError, RunFailedError) as failure:
        status = 2 if isinstance(failure, UserError) else 1
        error, failed_at = str(failure), time.time()
        _print_error(error)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status or not _ended_by_signal():
            raise
        status = ExitStatus.TEMPFAIL
    except BaseException as failure:
        error, failed_at = "".join(traceback.format_exception_only(failure)), time.time()
        raise
    finally:
        folder = os.environ.get(STATUS_FOLDER)
        if folder:
            line = error.splitlines()[0] if error else None
            found = {"status": status, "error": line, "time": failed_at}
            file = Path(folder, f"{os.environ.get('LOCAL_RANK', '0')}.json")
            file.write_text(json.dumps(found), "utf-8")
    return status


def _start(argv: Sequence[str]) -> None:
    """Check the command line, print the resolved settings, patch megatron-core, and train."""
    tell("stage", stage="importing Megatron")
    with settling("checking the settings"):
        launch = prepare(argv)
        _install(launch)
    notes = list(launch.notes)
    if launch.config:
        notes.insert(0, shipped.note(launch.config.path))
    if not _has_group():
        notes.append(settle_one_process(os.environ) or "")
    with contextlib.ExitStack() as held, own_warnings_in_one_line():
        if is_first_rank():
            for note in filter(None, notes):
                print(f"megatron-muon: {note}", flush=True)
            if launch.args.save is not None:  # keeps a second training away, on behalf of all ranks
                held.enter_context(locked(Path(launch.args.save)))
        _train()


def _install(launch: Launch) -> None:
    """Set sys.argv, which Megatron parses, and have megatron-core patched when it does."""
    from megatron_muon.megatron.patches import install
    from megatron_muon.patching import Patches

    install.follow(Patches(), every_run=True)
    config = ["--config", str(launch.config.path)] if launch.config else []
    sys.argv = [sys.argv[0], *launch.argv, *config]


def settle_one_process(environ: MutableMapping[str, str]) -> str | None:
    """Set torchrun's variables for one process, unless this is a launched rank; return a note.

    Raises:
        UserError: a launcher other than torchrun has started several processes.
    """
    if {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    # srun's and mpirun's process counts
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        count = environ.get(name, "1")
        if count != "1":
            raise UserError(
                f"{name}={count}: each process would train alone; start one torchrun on each"
                " machine"
            )
    # This machine's address, whatever a batch script has exported; port 0 takes a free one.
    environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return "one process; for more: torchrun --nproc-per-node N"


def _has_group() -> bool:
    """True if a process group exists; torch may not be imported yet."""
    return bool(getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)())


def _help() -> None:
    """Print all flags, on the first rank."""
    check_versions()
    if not is_first_rank():
        return
    with quiet_imports():
        parser = build_parser()
    try:
        parser.print_help()
        sys.stdout.flush()
    except BrokenPipeError:  # `python pretrain_gpt.py --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_trained() -> bool:
    """True if a run took its first step, or had none left; Megatron ends with status 0 anyway."""
    from megatron_muon.megatron.upstream import get_args

    args = get_args()
    if args.skip_train:
        return True
    if getattr(args, "iteration", 0) >= (args.train_iters or args.train_samples or 0):
        return True
    return bool(getattr(args, "do_train", False) and hasattr(args, "curr_iteration"))


def _ended_by_signal() -> bool:
    """True if a signal reached a rank of a run with --exit-signal-handler."""
    from megatron_muon.megatron.upstream import get_args, get_signal_handler

    return get_args().exit_signal_handler and getattr(get_signal_handler(), "any_received", False)


def _print_error(error: str) -> None:
    """Print a user's mistake, or a failed save, once per node.

    All ranks find most mistakes, and torchrun ends the others as soon as one has ended; a rank that
    is still there after a while has found a mistake that the first did not.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(_SECONDS_FOR_FIRST_RANK)
    for line in error.splitlines():
        print(f"pretrain_gpt.py: error: {line}", file=sys.stderr, flush=True)


def _train() -> None:
    import torch

    from megatron_muon.megatron.model.gpt import forward_step, gpt_config, train_valid_test_datasets
    from megatron_muon.megatron.upstream import (
        ModelType,
        parse_and_validate_args,
        pretrain,
        pretrain_cfg_container_from_args,
    )

    tell("stage", stage="initializing Megatron")
    with explained():
        args = parse_and_validate_args(
            extra_args_provider=add_run_arguments, args_defaults=DEFAULTS
        )
        config = pretrain_cfg_container_from_args(args, gpt_config(args))
    together = False
    try:
        pretrain(config, train_valid_test_datasets, ModelType.encoder_or_decoder, forward_step)
        together = True
        tell("stage", stage="ending the ranks")
    except SystemExit as end:  # of all ranks: after a signal, at a time limit, for a fault
        together = True
        if isinstance(end.code, str):
            raise RunFailedError(end.code) from end
        if end.code or _ended_by_signal() or _has_trained():
            raise
    except (AssertionError, ValueError) as failure:
        # Before the first step Megatron refuses settings in this way.
        refusal = None if hasattr(args, "curr_iteration") else refused(failure)
        if refusal is None:
            raise
        raise refusal from failure
    finally:
        # A rank that ends alone would wait for the others: see `end_alone`.
        if together and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if not _has_trained():
        raise RunFailedError(
            "nothing was trained: Megatron ended before the first step; see its output above"
        )
