"""`megatron-muon doctor --gpu`, and under torchrun `-m megatron_muon.tools.doctor.gpu`: the checks, and their report.

Every check runs in a process of its own on each rank, with a limit, so that one that crashes or
hangs ends no other.
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
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from megatron_muon.errors import ExitStatus, UserError, quiet_imports
from megatron_muon.megatron.run_device import settle_device, unusable_gpu
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.train import processes

MODULE = "megatron_muon.tools.doctor.gpu"
OK, WRONG, FAILED, LATE = "ok", "wrong", "failed", "too late"


def run(args: argparse.Namespace) -> int:
    """Run the checks one after the other on all ranks; the first rank prints verdicts and writes the report."""
    from megatron_muon.core.ranks import is_first_rank, of_all_ranks, say
    from megatron_muon.megatron.provenance import private_names, provenance, public

    with quiet_imports():
        import torch.distributed as dist
        from torch.distributed.elastic.utils.distributed import get_free_port

        from megatron_muon.tools.doctor.steps import CHECKS
        from megatron_muon.tools.plan.estimate import profile
    device = args.device or "cuda"
    _check_arguments(args, device, CHECKS)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        # each check has a limit of its own
        dist.init_process_group("gloo", timeout=timedelta(days=1))
    results: dict[str, dict[str, Any]] = {}
    with processes.sigterm_unwinds(), tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        folder = of_all_ranks(folder)[0]
        if not all(of_all_ranks(Path(folder).is_dir())):
            raise UserError(
                "set TMPDIR to a directory that all nodes see, for files that checks keep while"
                " they run"
            )
        for name in args.only or CHECKS:
            check, port = CHECKS[name], of_all_ranks(get_free_port())[0]
            found = of_all_ranks(
                _run_check(
                    name, device, Path(folder, name), port, check.limit * (args.limit or 120)
                )
            )
            worst = max(found, key=lambda one: (OK, WRONG, LATE, FAILED).index(one["status"]))
            one = results[name] = found[0] | {key: worst[key] for key in ("status", "log")}
            one["wrong"] = list(dict.fromkeys(text for each in found for text in each["wrong"]))
            one |= {
                "proves": check.proves,
                "what": inspect.cleandoc(check.run.__doc__ or ""),
                "remedy": check.remedy,
            }
            if one["status"] == LATE:
                again = (
                    f"where the machine is idle repeat with --only {name} --limit"
                    f" {max(240, 2 * (args.limit or 0))}"
                )
                one["remedy"] = f"{again}; if it stops at the same place, it hangs: {check.remedy}"
            say(_line(name, one))
    program = "megatron-muon" if "--gpu" in sys.argv else f"python -m {MODULE}"
    report = {**provenance(program), "where": f"{device}, ranks: {ranks}", "checks": results}
    if not args.verbose:
        report = public(report, set[str]().union(*of_all_ranks(private_names())))
    if is_first_rank():
        print(_verdict(results))
        if args.report is not None:
            args.report.write_text("\n".join(markdown(report)) + "\n", "utf-8")
            write_json(args.report.with_suffix(".json"), report)
        if args.write_profile is not None and results["machine"]["status"] in (OK, WRONG):
            args.write_profile.write_text(profile(results["machine"]["figures"]), "utf-8")
    return (
        ExitStatus.OK
        if all(one["status"] == OK for one in results.values())
        else ExitStatus.FAILURE
    )


def _check_arguments(args: argparse.Namespace, device: str, checks: Mapping[str, Any]) -> None:
    import torch

    if device == "cuda":
        if not torch.cuda.is_available():
            why = f"no GPU here: {unusable_gpu() or 'torch finds none'}"
            raise UserError(
                f"{why}; use a machine that has one, or --device cpu to try the checks themselves"
            )
        settle_device(device)  # each rank has one
    if unknown := [name for name in args.only or () if name not in checks]:
        raise UserError(
            f"--only: {unknown[0]!r} is not a check; choose some of: {' '.join(checks)}"
        )
    if args.write_profile is not None and args.only and "machine" not in args.only:
        raise UserError(
            "--write-profile writes what the check machine has measured; add it to --only"
        )
    if args.report is not None and args.report.suffix != ".md":
        raise UserError(
            f"--report {args.report}: give a name that ends in .md; the JSON lies beside it"
        )
    for file in filter(None, (args.report, args.write_profile)):
        if file.is_dir() or not os.access(file.resolve().parent, os.W_OK):
            raise UserError(
                f"cannot write {str(file)!r}: give a file in a directory that exists and can be"
                " written to"
            )


def _run_check(name: str, device: str, folder: Path, port: int, limit: int) -> dict[str, Any]:
    """What a check found on this rank, in a process of its own; the end of its output where it failed."""
    start, rank = time.perf_counter(), os.environ.get("RANK", "0")
    folder.mkdir(exist_ok=True)
    log, output = folder / f"check.{rank}.log", folder / f"figures.{rank}.json"
    env = processes.environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), port=port)
    command = [sys.executable, "-m", MODULE, "--run", name, device, str(folder), str(limit)]
    # where it hangs, it says so and ends
    ended = processes.watch(command, log, env=env, grace_s=1.0)
    if ended.signal is not None:
        processes.unwind(ended.signal)
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {"figures": {}, "skipped": {}, "wrong": [], "now": ""}
    if output.exists():
        found = json.loads(output.read_text("utf-8"))
    status, is_late = WRONG if found["wrong"] else OK, bool(ended.status) and seconds > limit
    if ended.status:
        status = LATE if is_late and status == OK else FAILED
    if is_late:
        found["wrong"].append(f"stopped after {limit} s, in {found['now'] or 'its imports'}")
    tail = log.read_text("utf-8", errors="replace").splitlines()[-200:] if status != OK else []
    return {"status": status, "seconds": seconds, **found, "log": tail}


def run_here(name: str, device: str, folder: str, limit: str) -> NoReturn:
    """In the process of a check: its figures as JSON. A check notes what is wrong, and does what else it can."""
    faulthandler.dump_traceback_later(int(limit), exit=True)
    import torch
    import torch.distributed as dist

    from megatron_muon.tools.doctor.checks import Context
    from megatron_muon.tools.doctor.steps import CHECKS

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    context = Context(torch.device(device), Path(folder), int(os.environ.get("RANK", "0")), ranks)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # steps switch it, threads at once
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
    os._exit(status)  # threads of collectives that failed would hold the process


def _skipped(one: Mapping[str, Any]) -> list[str]:
    return [f"skipped: {why}: {'; '.join(what)}" for why, what in one["skipped"].items()]


def _line(name: str, one: Mapping[str, Any]) -> str:
    faults = [text.strip().splitlines()[-1] for text in one["wrong"][:5]]
    remedies = [f"remedy: {one['remedy']}"] * (one["status"] != OK)
    line = f"{one['status']:<7} {name:<11}{one['seconds']:6.1f} s  {one['proves']}"
    return "\n    ".join((line, *_skipped(one), *faults, *remedies))


def _verdict(checks: Mapping[str, Mapping[str, Any]]) -> str:
    bad = {name: one["status"] for name, one in checks.items() if one["status"] != OK}
    if not bad:
        skipped = sum(len(what) for one in checks.values() for what in one["skipped"].values())
        return "all checks pass" + f" that can run here; parts that are skipped: {skipped}" * bool(
            skipped
        )
    send = "attach both files of --report to an issue on the project's issue tracker"
    if set(bad.values()) == {LATE}:
        return (
            f"out of time: {', '.join(bad)}; nothing wrong was found. See the remedies; if they do"
            f" not help, {send}"
        )
    return f"not ok: {', '.join(bad)}; please {send}"


def markdown(report: Mapping[str, Any]) -> Iterator[str]:
    """The report: where it was made, a table of verdicts, then each check's figures and what it found wrong."""
    from megatron_muon.tools.screen import table

    checks: Mapping[str, Mapping[str, Any]] = report["checks"]
    yield f"# megatron-muon doctor --gpu\n\n**{_verdict(checks)}**\n"
    yield (
        f"Made {report['time']} by `{report['command']}`, commit {report['commit']}, on"
        f" {report['where']}.\n"
    )
    yield f"{_text(report['versions'])}; {_text(report['machine'])}.\n"
    rows = [
        (name, one["status"], f"{one['seconds']:.1f}", one["proves"])
        for name, one in checks.items()
    ]
    yield table(("check", "verdict", "seconds", "what it checks"), rows, numbers=[2])
    for name, one in checks.items():
        yield f"\n## {name}: {one['status']}\n\n{one['what']}\n"
        if one["status"] != OK:
            yield f"Remedy: {one['remedy']}.\n"
        yield from (
            f"```\n{text}\n```\n" for text in (*one["wrong"], "\n".join(one["log"])) if text
        )
        several = {key: value for key, value in one["figures"].items() if isinstance(value, dict)}
        if columns := dict.fromkeys(key for value in several.values() for key in value):
            cells = [
                (key, *(_text(value.get(column, "-")) for column in columns))
                for key, value in several.items()
            ]
            yield table(("case", *columns), cells, numbers=range(1, 1 + len(columns))) + "\n"
        plain = [
            f"{key}: {_text(value)}" for key, value in one["figures"].items() if key not in several
        ]
        yield from (f"- {line}" for line in (*plain, *_skipped(one)))
    yield f"\n{_verdict(checks)}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(of)}" for key, of in value.items())
    if isinstance(value, list):
        return "\n".join(("", "```", *value, "```"))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Run `megatron-muon doctor --gpu`, under torchrun on several ranks, and return the exit status."""
    from megatron_muon import cli

    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--run"]:
        run_here(*arguments[1:])
    return cli.main(["doctor", "--gpu", *arguments])


if __name__ == "__main__":
    sys.exit(main())
