"""A rank of a training run: its command line resolved and checked, patches, megatron.training.pretrain, its end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_muon import shipped
from megatron_muon.checkpoint import folders
from megatron_muon.core.ranks import is_first_rank
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
from megatron_muon.megatron.flags import arguments
from megatron_muon.megatron.prepare import DEFAULTS, Launch, explained, prepare, refused
from megatron_muon.megatron.provenance import check_versions

_SECONDS_FOR_FIRST_RANK = 30.0
_SECONDS_BETWEEN_LOOKS = 1.0


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
    """Train a GPT as the command line says; the exit status, of `ExitStatus`.

    A user's mistake, or a checkpoint that cannot be written, is one line on the first rank of each
    node.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    status, error, failed_at, trace = 1, None, time.time(), ""
    try:
        if {"--help", "-h"} & set(argv):
            _help()
        else:
            _start(argv)
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
            found = {
                "status": status,
                "error": error and error.splitlines()[0],
                "time": failed_at,
                "trace": trace,
            }
            Path(folder, f"{os.environ.get('LOCAL_RANK', '0')}.json").write_text(
                json.dumps(found), "utf-8"
            )
    return status


def _start(argv: Sequence[str]) -> None:
    """Check the command line, print what was resolved, patch megatron-core, and train."""
    tell("stage", stage="importing Megatron")
    with settling("checking the settings"):
        launch = prepare(argv)
        _install(launch)
    alone = None if _has_group() else settle_one_process(os.environ)
    with contextlib.ExitStack() as held, own_warnings_in_one_line():
        if is_first_rank():
            config = shipped.note(launch.config.path) if launch.config else ""
            for note in filter(None, (config, *launch.notes, alone)):
                print(f"megatron-muon: {note}", flush=True)
            if launch.args.save is not None:  # keeps a second training away, on behalf of all ranks
                lock = folders.lock_of(Path(launch.args.save))
                held.enter_context(lock.held(wait_s=folders.SECONDS_FOR_A_DEAD_MACHINE))
        _train()


def _install(launch: Launch) -> None:
    """Replace sys.argv, which Megatron parses, and have megatron-core patched when it does."""
    from megatron_muon.megatron.patches import install
    from megatron_muon.patching import Patches

    install.follow(Patches(), every_run=True)
    sys.argv = [
        sys.argv[0],
        *launch.argv,
        *(["--config", str(launch.config.path)] if launch.config else []),
    ]


def _end_with(parent: int) -> None:
    """End this rank if torchrun is killed before the ranks have met: it would wait for the others for many minutes.

    torchrun holds the store where they meet. With --exit-signal-handler no signal ends a rank at
    that time.
    """
    # it may be half imported
    while not getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)():
        if os.getppid() != parent:
            print(
                "pretrain_gpt.py: error: torchrun has ended; so does this rank",
                file=sys.stderr,
                flush=True,
            )
            os._exit(ExitStatus.FAILURE)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def settle_one_process(environ: MutableMapping[str, str]) -> str | None:
    """Set in `environ` what torchrun would have set for one process, unless this is a launched rank; a note on it.

    Raises:
        UserError: another launcher than torchrun has started several processes.
    """
    if {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    # srun's and mpirun's process counts
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (count := environ.get(name, "1")) != "1":
            raise UserError(
                f"{name}={count}: each process would train alone; start one torchrun on each"
                " machine"
            )
    # The address is this machine, whatever a batch script has exported; the store takes a free port
    # for 0.
    environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    return "one process; for more: torchrun --nproc-per-node N"


def _has_group() -> bool:
    """Whether whoever called has made the process group already."""
    import torch.distributed as dist

    return dist.is_initialized()


def _help() -> None:
    """Print all flags, on the first rank."""
    check_versions()
    if not is_first_rank():
        return
    with quiet_imports():
        parser = arguments.build_parser()
    try:
        parser.print_help()
        sys.stdout.flush()
    except BrokenPipeError:  # `python pretrain_gpt.py --help | head`: whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_trained() -> bool:
    """Whether a run got to its first step, or had nothing left to do; Megatron ends with status 0 in any case."""
    from megatron.training import get_args

    args = get_args()
    is_done = getattr(args, "iteration", 0) >= (args.train_iters or args.train_samples or 0)
    return (
        args.skip_train
        or is_done
        or bool(getattr(args, "do_train", False) and hasattr(args, "curr_iteration"))
    )


def _ended_by_signal() -> bool:
    """Whether a signal reached a rank of a run with --exit-signal-handler."""
    from megatron.training import get_args
    from megatron.training.global_vars import get_signal_handler

    return get_args().exit_signal_handler and getattr(get_signal_handler(), "any_received", False)


def _tell(error: str) -> None:
    """Print a user's mistake, or a failed save, once per node.

    All ranks find most mistakes, and torchrun ends the others as soon as one has ended; one that is
    not ended in time found a mistake that the first did not.
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

    tell("stage", stage="initializing Megatron")
    with explained():
        args = parse_and_validate_args(
            extra_args_provider=arguments.add_run_arguments, args_defaults=DEFAULTS
        )
        config = pretrain_cfg_container_from_args(args, gpt_config(args))
    together = False
    try:
        pretrain(config, train_valid_test_datasets, ModelType.encoder_or_decoder, forward_step)
        together = True
        tell("stage", stage="ending the ranks")
    # so Megatron ends all ranks: after a signal, at a time limit, for a fault that it found
    except SystemExit as end:
        together = True
        if end.code or _ended_by_signal() or _has_trained():
            raise
    except (AssertionError, ValueError) as failure:
        if hasattr(args, "curr_iteration") or (refusal := refused(failure)) is None:
            raise
        raise refusal from failure  # before the first step it is the settings that Megatron refuses
    finally:
        # else it would wait for the others: see `end_alone`
        if together and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if not _has_trained():
        raise RunFailedError(
            "nothing was trained: Megatron ended before the first step; what it printed says why"
        )
