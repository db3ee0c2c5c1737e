"""Runs the ranks of one machine: torchrun, but with the workers' exit status, and SIGTERM forwarded.

    python -m megatron_muon.tools.train.node [TORCHRUN OPTIONS] pretrain_gpt.py [FLAGS]

`megatron-muon train` starts it, and scripts/slurm/pretrain.sbatch once on each node. torchrun
itself kills workers 30 seconds after SIGTERM, and its status is always 1. On the nodes of a cluster
the same command continues the run (`requeueable`). Under SLURM the first node holds the rendezvous.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from megatron_muon.checkpoint import folders
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.megatron import OWNS_PLACES, STATUS_FOLDER
from megatron_muon.megatron.flags import config_file
from megatron_muon.megatron.places import read_json

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

FIRST_START_ONLY = ("--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step")
"""Flags for a run's first start, not for a continuation from its own checkpoint."""

_WITH_VALUE = ("--config", "--save", "--load", "--ckpt-step")

TO_GO_BACK = (
    "a run continues from its latest checkpoint; to go back, start another run in its own folder,"
    " with --load of the first one's checkpoints and --ckpt-step N"
)
"""The refusal of a --ckpt-step that was typed for a run which loads its own checkpoints."""

_received_sigterm = False
_own_status_folder = ""  # the `STATUS_FOLDER` of a run without `train`


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the workers of this machine; returns their exit status, see `status`."""
    signal.signal(signal.SIGTERM, _forward)  # first, as the imports take seconds
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import parse_args, run

    args = parse_args(list(sys.argv[1:] if argv is None else argv))
    args.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # SIGTERM is handled here
    has_launcher = STATUS_FOLDER in os.environ  # `train`, which has chosen flags and places
    if has_launcher:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    else:
        try:
            args.training_script_args = requeueable(args.training_script_args)
        except UserError as error:
            _say(f"error: {error}")
            return ExitStatus.USAGE
        set_options(args, os.environ)
        _make_status_folder()
    reports = Path(os.environ[STATUS_FOLDER])
    try:
        run(args)
    except ChildFailedError as error:
        if has_launcher:
            report_killed(error, reports)
            return status(error)
        ended = status(error, is_requeued=_received_sigterm)
        if ended == ExitStatus.TEMPFAIL:
            _say_ended_by_sigterm()
        else:
            print(error, file=sys.stderr, flush=True)
        return ended
    except RendezvousConnectionError as error:
        ends = [read_json(file).get("status") for file in reports.glob("*.json")]
        has_saved = ExitStatus.TEMPFAIL in ends
        is_expected = has_saved or _received_sigterm
        why = "after SIGTERM, as expected" if is_expected else error
        _say(f"the first node has ended before this one: {why}")
        return ExitStatus.TEMPFAIL if has_saved else ExitStatus.FAILURE
    finally:
        shutil.rmtree(_own_status_folder, ignore_errors=True)
    return ExitStatus.OK


def _make_status_folder() -> None:
    global _own_status_folder
    _own_status_folder = tempfile.mkdtemp(prefix="node-")
    os.environ[STATUS_FOLDER] = _own_status_folder
    # a requeued start finds what one without a checkpoint has left
    os.environ[OWNS_PLACES] = "1"


def requeueable(flags: Sequence[str]) -> list[str]:
    """The flags of pretrain_gpt.py for a run that SIGTERM may end, and that may be requeued.

    `--exit-signal-handler` is added. If the folder of `--save` holds a checkpoint, the run
    continues from there: with `--load`, and without `FIRST_START_ONLY`.

    Raises:
        UserError: no `--save`, a configuration that cannot be read, or `TO_GO_BACK`, except in a
            requeued job.
    """
    given, rest = _split(flags, "--config")
    start: list[str] = []
    unset: list[str] = []
    merged = rest
    if given.config is not None:
        overridden = config_file.given_flags(rest)
        config = config_file.load_config(given.config, overridden=overridden)
        start = ["--config", given.config]
        merged = config_file.merge(config, rest)
        for flag, _ in config.flags:
            if flag in FIRST_START_ONLY:
                unset += [config_file.UNSET_FLAG, flag]
    places, _ = _split(merged, "--save", "--load")
    save = places.save
    if save is None:
        remedy = "add --save DIR, on a disk that all nodes share"
        raise UserError(f"no --save, so the run could not be resumed; {remedy}")
    found = folders.latest(Path(save))
    if found is None:
        print(f"node: no checkpoint in {save} yet: a first start", flush=True)
        return [*start, *rest, "--exit-signal-handler"]
    goes_back = config_file.pairs(rest, ("--ckpt-step",)) and places.load in (None, save)
    if goes_back and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        raise UserError(TO_GO_BACK)
    print(f"node: going on from {save}, iteration {found}", flush=True)
    _, kept = _split(rest, *FIRST_START_ONLY)
    return [*start, *kept, *unset, "--load", save, "--exit-signal-handler"]


def _split(argv: Sequence[str], *flags: str) -> tuple[argparse.Namespace, list[str]]:
    """The values of some flags, and the command line without them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in flags:
        action = "store" if flag in _WITH_VALUE else "store_true"
        parser.add_argument(flag, action=action)
    return parser.parse_known_args(list(argv))


def set_options(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Sets torchrun's options from SLURM's variables SLURM_NODEID and SLURMD_NODENAME."""
    # torchrun's own "auto" starts a rank for each core of a machine without GPUs
    if args.nproc_per_node == "auto":
        import torch

        args.nproc_per_node = str(torch.cuda.device_count() or 1)
    node = environ.get("SLURM_NODEID")
    if node is not None and args.rdzv_backend == "c10d":
        # torchrun compares names; those of SLURM, DNS and the machine may differ
        is_host = f"is_host={node == '0'}"
        args.rdzv_conf = f"{args.rdzv_conf},{is_host}" if args.rdzv_conf else is_host
    name = environ.get("SLURMD_NODENAME")
    if name and args.local_addr is None:
        with contextlib.suppress(OSError):  # a name that does not resolve
            socket.getaddrinfo(name, None)
            args.local_addr = name


def status(error: ChildFailedError, *, is_requeued: bool = False) -> int:
    """The exit status of workers that failed: 75 if one has it, a common one, or else 1.

    With `is_requeued` SIGTERM before training had begun is 75, too. It ends some ranks; others
    already have Megatron's handler, wait for these, and are killed by torchrun.
    """
    codes = {failure.exitcode for failure in error.failures.values()}
    before_training = -signal.SIGTERM in codes and codes <= {-signal.SIGTERM, -signal.SIGKILL}
    if ExitStatus.TEMPFAIL in codes or (is_requeued and before_training):
        return ExitStatus.TEMPFAIL
    code = codes.pop() if len(codes) == 1 else 1
    return code if code > 0 else 1


def report_killed(error: ChildFailedError, folder: Path) -> None:
    """Writes to `folder` the reports of workers that a signal ended, the cause of all others."""
    _, first = error.get_first_failure()
    for rank, failure in error.failures.items():
        was_asked = failure.exitcode == -signal.SIGTERM and (
            failure is not first or _received_sigterm
        )
        # later ones were aborted by NCCL, or killed by torchrun
        is_later = failure.timestamp > first.timestamp
        if failure.exitcode >= 0 or was_asked or is_later:
            continue
        why = f"rank {rank} was ended by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            why += "; if nobody sent it, the host ran out of memory: see dmesg"
        report = json.dumps({"error": why, "time": 0.0})
        (folder / f"{failure.local_rank}.json").write_text(report, "utf-8")


def _say(text: str) -> None:
    print(f"node: {text}", file=sys.stderr, flush=True)


def _say_ended_by_sigterm() -> None:
    """Prints the line for which pretrain.sbatch searches the logs: another node's status may win."""
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    _say(f"start {start} ended by SIGTERM")


def _forward(number: int, _: FrameType | None) -> None:
    """Sends SIGTERM to the workers: SLURM may have sent it to this process alone."""
    global _received_sigterm
    _received_sigterm = True
    workers = psutil.Process().children()
    _say(f"SIGTERM; {len(workers)} ranks are to write a checkpoint and end")
    if not workers:
        _say_ended_by_sigterm()
        shutil.rmtree(_own_status_folder, ignore_errors=True)
        os._exit(ExitStatus.TEMPFAIL)  # an exception may be lost, as within an import
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            worker.send_signal(number)


def _end_with(parent: int) -> None:
    """Ends the run, with a checkpoint, if its launcher was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
