"""Runs the checks of `megatron-muon doctor --gpu`, and reports them.

Every check runs in a process of its own on each rank, with a time limit, so that one that crashes
or hangs does not end the others.
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from megatron_muon.errors import ExitStatus, UserError, quiet_imports
from megatron_muon.megatron.run_device import settle_device
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.train import processes

OK, WRONG, FAILED = "ok", "wrong", "failed"  # from best to worst
LIMIT_S = 900  # of a check

type Result = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Runs the checks on all ranks; the first rank prints verdicts and writes the report."""
    from megatron_muon.megatron.provenance import provenance
    from megatron_muon.ranks import is_first_rank, of_all_ranks, say
    from megatron_muon.tools.doctor.private_names import private_names, public

    with quiet_imports():
        import torch.distributed as dist
        from torch.distributed.elastic.utils.distributed import get_free_port

        from megatron_muon.tools.doctor.step_checks import CHECKS
        from megatron_muon.tools.plan.estimate import profile
    if args.device == "cuda":
        settle_device("cuda")  # each rank has one
    only = args.only or list(CHECKS)
    if unknown := set(only) - CHECKS.keys():
        raise UserError(
            f"--only: {', '.join(unknown)} is not a check; choose some of: {' '.join(CHECKS)}"
        )
    if args.write_profile is not None and "machine" not in only:
        raise UserError("--write-profile needs the check machine; add it to --only")
    if is_first_rank():
        write_json(args.json, {})  # an error now, not after the checks
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        # each check has a limit of its own
        dist.init_process_group("gloo", timeout=timedelta(days=1))
    results: dict[str, Result] = {}
    with processes.sigterm_unwinds(), tempfile.TemporaryDirectory(prefix="doctor-") as made:
        folder = Path(of_all_ranks(made)[0])
        if not all(of_all_ranks(folder.is_dir())):
            raise UserError("set TMPDIR to a directory that all nodes share")
        for name in only:
            port = of_all_ranks(get_free_port())[0]
            found = _merged(of_all_ranks(_run_check(name, args.device, folder / name, port)))
            found["explanation"] = inspect.cleandoc(CHECKS[name].__doc__ or "")
            results[name] = found
            say("\n    ".join(_lines(name, found)))
    bad = [name for name, found in results.items() if found["status"] != OK]
    where = f"{args.device}, ranks: {ranks}"
    report = {**provenance("megatron-muon"), "where": where, "checks": results}
    names = set[str]().union(*of_all_ranks(private_names()))
    if is_first_rank():
        send = "please attach the FILE of --json to an issue on the project's issue tracker"
        print(f"not ok: {', '.join(bad)}; {send}" if bad else "all checks pass that can run here")
        write_json(args.json, public(report, names))
        if args.write_profile is not None and results["machine"]["status"] != FAILED:
            args.write_profile.write_text(profile(results["machine"]["figures"]), "utf-8")
    return ExitStatus.FAILURE if bad else ExitStatus.OK


def _run_check(name: str, device: str, folder: Path, port: int) -> Result:
    """Runs a check in its own process on this rank; its findings, and its log's end if not OK."""
    rank = os.environ.get("RANK", "0")
    folder.mkdir(exist_ok=True)
    log = folder / f"check.{rank}.log"
    output = folder / f"figures.{rank}.json"
    env = processes.environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), port=port)
    command = [sys.executable, "-m", __name__, name, device, str(folder), str(LIMIT_S)]
    start = time.perf_counter()
    # after LIMIT_S a check ends itself, so nothing here waits longer
    ended = processes.watch(command, log, env=env, grace_s=1.0)
    seconds = time.perf_counter() - start
    if ended.signal is not None:
        processes.unwind(ended.signal)
    found: Result = {"figures": {}, "skipped": [], "wrong": []}
    if output.exists():
        found = json.loads(output.read_text("utf-8"))
    status = WRONG if found["wrong"] else OK
    if ended.status:
        status = FAILED
        if seconds > LIMIT_S:
            found["wrong"].append(f"stopped after {LIMIT_S} s; `log` shows where")
    found |= {"status": status, "seconds": seconds, "log": []}
    if status != OK:
        found["log"] = log.read_text("utf-8", "replace").splitlines()[-200:]
    return found


def _merged(of_ranks: Sequence[Result]) -> Result:
    """The first rank's result with the worst status of all ranks and all their faults."""
    worst = max(of_ranks, key=lambda one: (OK, WRONG, FAILED).index(one["status"]))
    faults = {text: None for one in of_ranks for text in one["wrong"]}
    return {
        **of_ranks[0],
        "status": worst["status"],
        "log": worst["log"],
        "wrong": list(faults),
    }


def _lines(name: str, found: Result) -> Iterator[str]:
    """The printed lines of a check."""
    summary = found["explanation"].splitlines()[0]
    yield f"{found['status']:<8} {name:<11}{found['seconds']:6.1f} s  {summary}"
    for text in found["skipped"]:
        yield f"skipped: {text}"
    for text in found["wrong"][:5]:
        yield text.strip().splitlines()[-1]


def run_here(name: str, device: str, folder: str, limit: str) -> NoReturn:
    """In the process of a check: runs it, and writes its findings as JSON."""
    faulthandler.dump_traceback_later(int(limit), exit=True)
    import torch
    import torch.distributed as dist

    from megatron_muon.tools.doctor.gpu_checks import Context
    from megatron_muon.tools.doctor.step_checks import CHECKS

    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    context = Context(torch.device(device), Path(folder), rank, ranks)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # steps switch it, and threads would do so at the same time
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    status = 0
    try:
        CHECKS[name](context)
    except Exception:
        status = 1
        context.wrong.append(traceback.format_exc(limit=-6))
    context.write_findings()
    sys.stdout.flush()
    os._exit(status)  # threads of failed collectives would keep the process alive


if __name__ == "__main__":
    run_here(*sys.argv[1:])
