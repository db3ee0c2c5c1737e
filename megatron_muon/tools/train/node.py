"""Runs the ranks of one machine: torchrun with the workers' exit status and SIGTERM forwarded.

    python -m megatron_muon.tools.train.node [TORCHRUN OPTIONS] pretrain_gpt.py [FLAGS]

`megatron-muon train` starts it, and scripts/slurm/pretrain.sbatch once on each node, with
`--resume`. torchrun itself kills workers 30 seconds after SIGTERM, and its status is always 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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

from megatron_muon.errors import ExitStatus
from megatron_muon.megatron import REPORTS, STATUS_FOLDER
from megatron_muon.megatron.places import read_json

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ERROR = "node: error: "  # begins the line with the error of the rank that failed first
_REQUEUED = (ExitStatus.TEMPFAIL, 128 + signal.SIGTERM)  # a cluster starts the run again


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the workers of this machine; returns their exit status, see `status`."""
    signal.signal(signal.SIGTERM, _forward)  # first, as the imports take seconds
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import parse_args, run

    args = parse_args(list(sys.argv[1:] if argv is None else argv))
    args.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # SIGTERM is handled here
    if REPORTS in os.environ:  # started by `train`, which has chosen flags and places
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    else:
        args.training_script_args += ["--resume", "--exit-signal-handler"]
        set_options(args, os.environ)
    with tempfile.TemporaryDirectory(prefix="node-") as reports:
        os.environ[STATUS_FOLDER] = reports
        try:
            run(args)
        except ChildFailedError as error:
            ended = status(error)
            if ended in _REQUEUED:
                _say_ended_by_sigterm()
            else:
                _say(f"error: {cause(error, Path(reports))}")
            return ended
        except RendezvousConnectionError as error:
            _say(f"the first node has ended before this one: {error}")
            ends = [read_json(file).get("status") for file in Path(reports).glob("*.json")]
            has_saved = ExitStatus.TEMPFAIL in ends
            return ExitStatus.TEMPFAIL if has_saved else ExitStatus.FAILURE
    return ExitStatus.OK


def set_options(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Sets torchrun's options from SLURM's variables SLURM_NODEID and SLURMD_NODENAME."""
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


def status(error: ChildFailedError) -> int:
    """The exit status of workers that failed: 75 if one has it, a common one, or else 1.

    143 after SIGTERM before training had begun: it ends some ranks; others already have Megatron's
    handler, wait for these, and are killed by torchrun.
    """
    codes = {failure.exitcode for failure in error.failures.values()}
    if ExitStatus.TEMPFAIL in codes:
        return ExitStatus.TEMPFAIL
    if -signal.SIGTERM in codes and codes <= {-signal.SIGTERM, -signal.SIGKILL}:
        return 128 + signal.SIGTERM
    own = {code for code in codes if code > 0}  # torchrun ends the others by signals
    return own.pop() if len(own) == 1 else ExitStatus.FAILURE


def cause(error: ChildFailedError, reports: Path) -> str:
    """The error of the rank that failed first, in one line."""
    rank, first = error.get_first_failure()
    for killed, failure in error.failures.items():
        # later ones were aborted by NCCL, or killed by torchrun
        was_first = failure.timestamp <= first.timestamp
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and was_first:
            remedy = "; if nobody sent it, the host ran out of memory: see dmesg"
            name = failure.signal_name()
            return f"rank {killed} was ended by {name}{remedy if name == 'SIGKILL' else ''}"
    found = [read_json(file) for file in reports.glob("*.json")]
    failed = [report for report in found if report.get("error")]
    if not failed:
        return f"rank {rank} ended with status {first.exitcode} and no error; see its output"
    return str(min(failed, key=lambda report: report["time"])["error"])


def _say(text: str) -> None:
    print(f"node: {text}", file=sys.stderr, flush=True)


def _say_ended_by_sigterm() -> None:
    """Prints the line that pretrain.sbatch looks for: another node's status may win."""
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    _say(f"start {start} ended by SIGTERM")


def _forward(number: int, _: FrameType | None) -> None:
    """Sends SIGTERM to the workers: SLURM may have sent it to this process alone."""
    workers = psutil.Process().children()
    _say(f"SIGTERM; {len(workers)} ranks are to write a checkpoint and end")
    if not workers:
        _say_ended_by_sigterm()
        os._exit(128 + number)  # an exception may be lost, as within an import
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
