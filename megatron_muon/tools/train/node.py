"""Runs the ranks of one machine: torchrun, whose workers' exit status it has, and to which SIGTERM is handed on.

    python -m megatron_muon.tools.train.node [TORCHRUN OPTIONS] pretrain_gpt.py [FLAGS]

`megatron-muon train` starts it, and scripts/slurm/pretrain.sbatch once on each node. torchrun
itself would kill workers 30 seconds after SIGTERM, and its status is always 1. Without `train`, on
nodes of SLURM, Kubernetes or one's own, the same command again goes on with the run
(`requeueable`). Under SLURM the first node holds the rendezvous.
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
"""Flags that say how to begin, and not how to go on from the run's own checkpoint."""

TO_GO_BACK = (
    "a run goes on from its latest checkpoint; to go back, start another run in a folder of its"
    " own, with the first one's checkpoints as --load and --ckpt-step N"
)
"""The refusal of a --ckpt-step that was typed, where the run loads no other checkpoints than its own."""

_asked_to_end = False
_made = ""  # the `STATUS_FOLDER` of a run that no `train` watches


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the workers of this machine; their exit status, see `status`."""
    global _made
    signal.signal(signal.SIGTERM, _hand_on)  # first of all: what follows takes seconds
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import parse_args, run

    args = parse_args(list(sys.argv[1:] if argv is None else argv))
    args.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # SIGTERM is ours
    watched = os.environ.get(STATUS_FOLDER)  # by `train`, which has chosen flags and places
    if watched is None:
        try:
            args.training_script_args = requeueable(args.training_script_args)
        except UserError as error:
            print(f"node: error: {error}", file=sys.stderr, flush=True)
            return ExitStatus.USAGE
        set_options(args, os.environ)
        os.environ[STATUS_FOLDER] = _made = tempfile.mkdtemp(prefix="node-")
        # a start cut off before its first checkpoint is put back into the queue
        os.environ[OWNS_PLACES] = "1"
    else:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    ends = Path(os.environ[STATUS_FOLDER])
    try:
        run(args)
    except ChildFailedError as error:
        if watched is not None:
            report_killed(error, ends)
            return status(error)
        ended = status(error, is_requeued=_asked_to_end)
        print(
            _ended_by_sigterm() if ended == ExitStatus.TEMPFAIL else error,
            file=sys.stderr,
            flush=True,
        )
        return ended
    except RendezvousConnectionError as error:
        has_saved = any(
            read_json(file).get("status") == ExitStatus.TEMPFAIL for file in ends.glob("*.json")
        )
        why = "after SIGTERM, as it should" if has_saved or _asked_to_end else error
        print(f"node: the first node has ended before this one: {why}", file=sys.stderr, flush=True)
        return ExitStatus.TEMPFAIL if has_saved else ExitStatus.FAILURE
    finally:
        shutil.rmtree(_made, ignore_errors=True)
    return ExitStatus.OK


def requeueable(flags: Sequence[str]) -> list[str]:
    """The flags `flags` of pretrain_gpt.py for a run that SIGTERM may end, and that SLURM may have put back.

    `--exit-signal-handler` is added. Where the folder of `--save` holds a checkpoint, the run goes
    on from there: with `--load`, and without `FIRST_START_ONLY`.

    Raises:
        UserError: no `--save`, a configuration that cannot be read, or `TO_GO_BACK`, but not of a
            requeued job.
    """
    given, rest = _split(flags, "--config")
    start, in_file, merged = [], set(), rest
    if given.config is not None:
        config = config_file.load_config(given.config, overridden=config_file.given_flags(rest))
        start, in_file = ["--config", given.config], {flag for flag, _ in config.flags}
        merged = config_file.merge(config, rest)
    places = _split(merged, "--save", "--load")[0]
    save = places.save
    if save is None:
        raise UserError(
            "no --save, so the run could not be resumed; add --save DIR, on a disk that all nodes"
            " share"
        )
    found = folders.latest(Path(save))
    if found is None:
        print(f"node: no checkpoint in {save} yet: a first start", flush=True)
        return [*start, *rest, "--exit-signal-handler"]
    is_own_step = config_file.pairs(rest, ("--ckpt-step",)) and places.load in (None, save)
    if is_own_step and not int(os.environ.get("SLURM_RESTART_COUNT", "0")):
        raise UserError(TO_GO_BACK)
    print(f"node: going on from {save}, iteration {found}", flush=True)
    unset = [
        token
        for flag in FIRST_START_ONLY
        if flag in in_file
        for token in (config_file.UNSET_FLAG, flag)
    ]
    return [
        *start,
        *_split(rest, *FIRST_START_ONLY)[1],
        *unset,
        "--load",
        save,
        "--exit-signal-handler",
    ]


def _split(argv: Sequence[str], *flags: str) -> tuple[argparse.Namespace, list[str]]:
    """The values of some flags, and the command line without them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in flags:
        parser.add_argument(
            flag,
            action=(
                "store" if flag in ("--config", "--save", "--load", "--ckpt-step") else "store_true"
            ),
        )
    return parser.parse_known_args(list(argv))


def set_options(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Sets torchrun's options `args` from what SLURM says of this node: SLURM_NODEID, SLURMD_NODENAME."""
    # torchrun's own would start a rank for each core of a machine without GPUs
    if args.nproc_per_node == "auto":
        import torch

        args.nproc_per_node = str(torch.cuda.device_count() or 1)
    if "SLURM_NODEID" in environ and args.rdzv_backend == "c10d":
        # By itself torchrun compares names, and those of SLURM, of DNS and of the machine need not
        # agree.
        is_host = f"is_host={environ['SLURM_NODEID'] == '0'}"
        args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, is_host)))
    if args.local_addr is None and (name := environ.get("SLURMD_NODENAME")):
        with contextlib.suppress(OSError):  # a name that does not resolve
            socket.getaddrinfo(name, None)
            args.local_addr = name


def status(error: ChildFailedError, *, is_requeued: bool = False) -> int:
    """The exit status of a machine whose workers failed: 75 where one says so, else theirs if they agree, else 1.

    With `is_requeued` SIGTERM before training had begun is a 75 too. It ends some ranks; others
    have Megatron's handler already, wait for these, and are killed by torchrun.
    """
    codes = {failure.exitcode for failure in error.failures.values()}
    before_training = -signal.SIGTERM in codes and codes <= {-signal.SIGTERM, -signal.SIGKILL}
    if ExitStatus.TEMPFAIL in codes or (is_requeued and before_training):
        return ExitStatus.TEMPFAIL
    code = codes.pop() if len(codes) == 1 else 1
    return code if code > 0 else 1


def report_killed(error: ChildFailedError, folder: Path) -> None:
    """Writes to `folder`, for workers that a signal ended, what they could not leave there: what others say follows."""
    _, first = error.get_first_failure()
    for rank, failure in error.failures.items():
        is_cause = failure.exitcode != -signal.SIGTERM or (failure is first and not _asked_to_end)
        # others were aborted by NCCL, or killed by torchrun
        came_first = failure.timestamp <= first.timestamp
        if failure.exitcode < 0 and is_cause and came_first:
            why = (
                "; if nobody sent it, the host ran out of memory: see dmesg"
                if failure.exitcode == -9
                else ""
            )
            found = {"error": f"rank {rank} was ended by {failure.signal_name()}{why}", "time": 0.0}
            (folder / f"{failure.local_rank}.json").write_text(json.dumps(found), "utf-8")


def _ended_by_sigterm() -> str:
    """The line that pretrain.sbatch looks for in the logs: other nodes may end later, with a higher status."""
    return f"node: start {int(os.environ.get('SLURM_RESTART_COUNT', '0')) + 1} ended by SIGTERM"


def _hand_on(number: int, _: FrameType | None) -> None:
    """Send SIGTERM to the workers: SLURM may have sent it to this process alone. Twice does no harm."""
    global _asked_to_end
    _asked_to_end = True
    workers = psutil.Process().children()
    print(
        f"node: SIGTERM; {len(workers)} ranks are to write a checkpoint and end",
        file=sys.stderr,
        flush=True,
    )
    if not workers:
        print(_ended_by_sigterm(), file=sys.stderr, flush=True)
        shutil.rmtree(_made, ignore_errors=True)
        os._exit(ExitStatus.TEMPFAIL)  # an exception may be lost, as within an import
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            worker.send_signal(number)


def _end_with(parent: int) -> None:
    """End the run, with a checkpoint, once the `train` that shows it was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
