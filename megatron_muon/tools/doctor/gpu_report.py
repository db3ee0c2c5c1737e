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
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from megatron_muon.errors import ExitStatus, UserError, quiet_imports
from megatron_muon.megatron.run_device import settle_device, unusable_gpu
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.train import processes

OK, WRONG, LATE, FAILED = "ok", "wrong", "too late", "failed"  # from best to worst
LIMIT_S = 120

type Result = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Runs the checks on all ranks; the first rank prints verdicts and writes the report."""
    from megatron_muon.core.ranks import is_first_rank, of_all_ranks, say
    from megatron_muon.megatron.provenance import provenance
    from megatron_muon.tools.doctor.private_names import private_names, public

    with quiet_imports():
        import torch.distributed as dist
        from torch.distributed.elastic.utils.distributed import get_free_port

        from megatron_muon.tools.doctor.step_checks import CHECKS
        from megatron_muon.tools.plan.estimate import profile
    device = args.device or "cuda"
    _check_device(device)
    _check_arguments(args, list(CHECKS))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        # each check has a limit of its own
        dist.init_process_group("gloo", timeout=timedelta(days=1))
    results: dict[str, Result] = {}
    with processes.sigterm_unwinds(), tempfile.TemporaryDirectory(prefix="doctor-") as made:
        folder = Path(of_all_ranks(made)[0])
        if not all(of_all_ranks(folder.is_dir())):
            raise UserError("set TMPDIR to a directory that all nodes share")
        for name in args.only or CHECKS:
            check = CHECKS[name]
            port = of_all_ranks(get_free_port())[0]
            limit = check.limit * (args.limit or LIMIT_S)
            of_ranks = of_all_ranks(_run_check(name, device, folder / name, port, limit))
            found = _merged(of_ranks)
            results[name] = found
            found["explanation"] = inspect.cleandoc(check.run.__doc__ or "")
            found["remedy"] = check.remedy
            if found["status"] == LATE:
                again = f"--only {name} --limit {max(240, 2 * (args.limit or 0))}"
                again = f"on an idle machine repeat with {again}"
                hangs = f"if it stops at the same place, it hangs: {check.remedy}"
                found["remedy"] = f"{again}; {hangs}"
            say("\n    ".join(_lines(name, found)))
    where = f"{device}, ranks: {ranks}"
    report = {**provenance("megatron-muon"), "where": where, "checks": results}
    if not args.verbose:
        report = public(report, set[str]().union(*of_all_ranks(private_names())))
    if is_first_rank():
        print(_verdict(results))
        if args.report is not None:
            args.report.write_text("\n".join(markdown(report)) + "\n", "utf-8")
            write_json(args.report.with_suffix(".json"), report)
        if args.write_profile is not None and results["machine"]["status"] in (OK, WRONG):
            args.write_profile.write_text(profile(results["machine"]["figures"]), "utf-8")
    passed = all(one["status"] == OK for one in results.values())
    return ExitStatus.OK if passed else ExitStatus.FAILURE


def _check_device(device: str) -> None:
    import torch

    if device != "cuda":
        return
    if not torch.cuda.is_available():
        why = unusable_gpu() or "torch finds none"
        remedy = "use a machine with one, or --device cpu to try the checks themselves"
        raise UserError(f"no GPU here: {why}; {remedy}")
    settle_device(device)  # each rank has one


def _check_arguments(args: argparse.Namespace, checks: Sequence[str]) -> None:
    only = args.only or checks
    for name in only:
        if name not in checks:
            choices = " ".join(checks)
            raise UserError(f"--only: {name!r} is not a check; choose some of: {choices}")
    if args.write_profile is not None and "machine" not in only:
        raise UserError("--write-profile needs the check machine; add it to --only")
    if args.report is not None and args.report.suffix != ".md":
        raise UserError(f"--report {args.report}: the name must end in .md")
    for file in (args.report, args.write_profile):
        if file is None:
            continue
        if file.is_dir() or not os.access(file.resolve().parent, os.W_OK):
            raise UserError(f"cannot write {str(file)!r}: give a file in a writable directory")


def _run_check(name: str, device: str, folder: Path, port: int, limit: int) -> Result:
    """Runs a check in its own process on this rank; its findings, and output if it failed."""
    rank = os.environ.get("RANK", "0")
    folder.mkdir(exist_ok=True)
    log = folder / f"check.{rank}.log"
    output = folder / f"figures.{rank}.json"
    env = processes.environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), port=port)
    command = [sys.executable, "-m", __name__, name, device, str(folder), str(limit)]
    start = time.perf_counter()
    # if it hangs, it reports that and ends
    ended = processes.watch(command, log, env=env, grace_s=1.0)
    seconds = time.perf_counter() - start
    if ended.signal is not None:
        processes.unwind(ended.signal)
    found: Result = {"figures": {}, "skipped": {}, "wrong": [], "now": ""}
    if output.exists():
        found = json.loads(output.read_text("utf-8"))
    status = WRONG if found["wrong"] else OK
    if ended.status:
        is_late = seconds > limit
        status = LATE if is_late and status == OK else FAILED
        if is_late:
            part = found["now"] or "its imports"
            found["wrong"].append(f"stopped after {limit} s, in {part}")
    tail = [] if status == OK else log.read_text("utf-8", "replace").splitlines()[-200:]
    return {"status": status, "seconds": seconds, **found, "log": tail}


def _merged(of_ranks: Sequence[Result]) -> Result:
    """The first rank's result with the worst status of all ranks and all their faults."""
    worst = max(of_ranks, key=lambda one: (OK, WRONG, LATE, FAILED).index(one["status"]))
    faults = {text: None for one in of_ranks for text in one["wrong"]}
    return {
        **of_ranks[0],
        "status": worst["status"],
        "log": worst["log"],
        "wrong": list(faults),
    }


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
        CHECKS[name].run(context)
    except Exception:
        status = 1
        context.wrong.append(traceback.format_exc(limit=-6))
    context.keep()
    sys.stdout.flush()
    os._exit(status)  # threads of failed collectives would keep the process alive


def _lines(name: str, one: Result) -> Iterator[str]:
    """The printed lines of a check."""
    summary = one["explanation"].splitlines()[0]
    yield f"{one['status']:<8} {name:<11}{one['seconds']:6.1f} s  {summary}"
    for why, names in one["skipped"].items():
        yield f"skipped: {why}: {'; '.join(names)}"
    for text in one["wrong"][:5]:
        yield text.strip().splitlines()[-1]
    if one["status"] != OK:
        yield f"remedy: {one['remedy']}"


def _verdict(checks: Mapping[str, Result]) -> str:
    bad = {name: one["status"] for name, one in checks.items() if one["status"] != OK}
    if not bad:
        is_partial = any(one["skipped"] for one in checks.values())
        return "all checks pass that can run here" if is_partial else "all checks pass"
    names = ", ".join(bad)
    send = "attach both files of --report to an issue on the project's issue tracker"
    if set(bad.values()) == {LATE}:
        return f"out of time: {names}; nothing wrong was found. Try the remedies; else {send}"
    return f"not ok: {names}; please {send}"


def markdown(report: Mapping[str, Any]) -> Iterator[str]:
    """The report: its origin, the verdicts, then each check's figures and faults."""
    checks: Mapping[str, Result] = report["checks"]
    yield f"# megatron-muon doctor --gpu\n\n**{_verdict(checks)}**\n"
    for key in ("time", "command", "where", "commit", "versions", "machine"):
        yield f"- {key}: {_text(report[key])}"
    for name, one in checks.items():
        yield f"\n## {name}: {one['status']}\n\n{one['explanation']}\n"
        yield f"```\n{'\n'.join(_lines(name, one))}\n```\n"
        for text in one["wrong"]:
            yield f"```\n{text}\n```\n"
        if one["log"]:
            yield f"```\n{'\n'.join(one['log'])}\n```\n"
        for key, value in one["figures"].items():
            yield f"- {key}: {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "\n".join(("", "```", *value, "```"))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_here(*sys.argv[1:])
