"""`megatron-muon doctor --gpu`, and under torchrun `-m megatron_muon.tools.doctor.gpu`: the checks, and their report.

Every check runs in a process of its own on each rank, with a limit, so that one that crashes or hangs ends no other.
"""

from __future__ import annotations

import argparse
import faulthandler
import getpass
import json
import os
import re
import socket
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.tools.doctor import SKIPPED
from megatron_muon.tools.parser import CommandParser, positive, write_json
from megatron_muon.tools.train import processes

MODULE = "megatron_muon.tools.doctor.gpu"
OK, WRONG, FAILED, LATE = "ok", "wrong", "failed", "too late"

EXAMPLES = f"""\
examples:
  one GPU, and a report in report.md and report.json:
    megatron-muon doctor --gpu --report report.md
  eight GPUs; on several nodes with torchrun's --nnodes, and TMPDIR a directory that all of them see:
    torchrun --nproc-per-node 8 -m {MODULE} --report report.md
  the checks themselves, without a GPU:
    megatron-muon doctor --gpu --device cpu
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the checks."""
    add = parser.add_argument_group("checks of a GPU").add_argument
    add("--device", choices=("cuda", "cpu"), help="cpu: small sizes, to try the checks themselves (cuda)")
    add("--only", nargs="+", metavar="CHECK", help="some checks, by name (all)")
    add("--report", type=Path, metavar="FILE.md", help="write all figures to FILE.md, and to FILE.json")
    add("--write-profile", type=Path, metavar="FILE.yaml", help="write measured rates, for plan --hardware FILE.yaml")
    add("--limit", type=positive, metavar="S", help="seconds that a check may take, some several times these (120)")
    add("--verbose", action="store_true", help="keep host names and paths in the report")


def run(args: argparse.Namespace, program: str = "megatron-muon") -> int:
    """Run the checks one after the other on all ranks; the first rank prints verdicts and writes the report."""
    from megatron_muon.core.ranks import is_first_rank, of_all_ranks, say
    from megatron_muon.errors import quiet_imports
    from megatron_muon.megatron.provenance import provenance

    with quiet_imports():
        import torch.distributed as dist
        from torch.distributed.elastic.utils.distributed import get_free_port

        from megatron_muon.tools.doctor.runs import CHECKS
        from megatron_muon.tools.plan.estimate import measured
    device = args.device or "cuda"
    _check_arguments(args, device, CHECKS)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=1))  # each check has a limit of its own
    results: dict[str, dict[str, Any]] = {}
    with processes.sigterm_unwinds(), tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        folder = of_all_ranks(folder)[0]
        if not all(of_all_ranks(Path(folder).is_dir())):
            raise UserError("set TMPDIR to a directory that all nodes see, for files that checks keep while they run")
        for name, check in CHECKS.items():
            if args.only and name not in args.only:
                continue
            port = of_all_ranks(get_free_port())[0]
            found = of_all_ranks(_run_check(name, device, Path(folder, name), port, check.limit * (args.limit or 120)))
            worst = max(found, key=lambda one: (OK, WRONG, LATE, FAILED).index(one["status"]))
            results[name] = found[0] | {key: worst[key] for key in ("status", "log")} | check._asdict()
            results[name]["wrong"] = list(dict.fromkeys(text for one in found for text in one["wrong"]))
            results[name]["run"] = " ".join((check.run.__doc__ or "").split())
            if worst["status"] == LATE:
                again = f"where the machine is idle repeat with --only {name} --limit {max(240, 2 * (args.limit or 0))}"
                results[name]["remedy"] = f"{again}; if it stops at the same place, it hangs: {check.remedy}"
            say(_line(name, results[name]))
    report = {**provenance(program), "where": f"{device}, ranks: {ranks}", "checks": results}
    names = {socket.gethostname(), socket.gethostname().split(".")[0], getpass.getuser(), Path.home().name}
    names = set().union(*of_all_ranks(names)) - {"", "root", "localhost"}
    report = report if args.verbose else public(json.loads(json.dumps(report, default=str)), names)
    bad = [name for name, one in results.items() if one["status"] != OK]
    if is_first_rank():
        print(_verdict(results))
        if args.report is not None:
            args.report.write_text("\n".join(markdown(report)) + "\n", "utf-8")
            write_json(args.report.with_suffix(".json"), report)
        if args.write_profile is not None and results["machine"]["status"] in (OK, WRONG):
            found = results["machine"]["figures"]
            machine = asdict(measured(found))
            rates = (key for key in found if key in machine or key.startswith("all_to_all"))
            text = f"# Measured: {', '.join(rates)}; the rest by data sheets\n"
            args.write_profile.write_text(text + yaml.safe_dump(machine, sort_keys=False), "utf-8")
    return ExitStatus.FAILURE if bad else ExitStatus.OK


def _check_arguments(args: argparse.Namespace, device: str, checks: Mapping[str, Any]) -> None:
    import torch

    from megatron_muon.megatron.gpu import settle_device, unusable_gpu

    if device == "cuda" and not torch.cuda.is_available():
        why = unusable_gpu() or "torch finds none"
        raise UserError(f"no GPU here: {why}; use a machine that has one, or --device cpu to try the checks themselves")
    if device == "cuda":
        settle_device(device)  # each rank has one
    if unknown := [name for name in args.only or () if name not in checks]:
        raise UserError(f"--only: {unknown[0]!r} is not a check; choose some of: {' '.join(checks)}")
    if args.write_profile is not None and args.only and "machine" not in args.only:
        raise UserError("--write-profile writes what the check machine has measured; add it to --only")
    if args.report is not None and args.report.suffix != ".md":
        raise UserError(f"--report {args.report}: give a name that ends in .md; the JSON lies beside it")
    for file in filter(None, (args.report, args.write_profile)):
        if file.is_dir() or not os.access(file.resolve().parent, os.W_OK):
            raise UserError(f"cannot write {str(file)!r}: give a file in a directory that exists and can be written to")


def _run_check(name: str, device: str, folder: Path, port: int, limit: int) -> dict[str, Any]:
    """What a check found on this rank, in a process of its own; the end of its output where it failed."""
    start, rank = time.perf_counter(), os.environ.get("RANK", "0")
    folder.mkdir(exist_ok=True)
    log, output = folder / f"check.{rank}.log", folder / f"figures.{rank}.json"
    env = processes.environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    env |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    command = [sys.executable, "-m", MODULE, "--run", name, device, str(folder), str(limit)]
    ended = processes.watch(command, log, env=env, grace_s=1.0)  # where it hangs, it says so and ends
    if ended.signal is not None:
        processes.unwind(ended.signal)
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {"figures": {}, "wrong": [], "now": ""}
    if output.exists():
        found = json.loads(output.read_text("utf-8"))
    is_late = bool(ended.status) and seconds > limit
    status = WRONG if found["wrong"] else OK
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
    from megatron_muon.tools.doctor.runs import CHECKS

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    context = Context(torch.device(device), Path(folder), int(os.environ.get("RANK", "0")), ranks)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # steps switch it, threads at once
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


def public(value: Any, names: Collection[str]) -> Any:
    """The texts of a report, its keys excepted, without names of hosts and users, addresses and folders.

    Modules are named from their package on.
    """
    if isinstance(value, dict):
        return {key: public(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [public(one, names) for one in value]
    if not isinstance(value, str):
        return value
    for folder in sorted((*sysconfig.get_paths().values(), str(Path(__file__).parents[3])), key=len, reverse=True):
        value = value.replace(f"{folder}/", "")
    value = re.sub(r"(?<![\w.)/])/(?:[^\s'\"/:]+/)+(?=[^\s'\"/:])", ".../", value)
    value = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS", value)
    for name in names:
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)(?:\.[a-z][\w.-]+)?", "NAME", value)
    return value


def _skipped(one: Mapping[str, Any]) -> list[str]:
    return [key for key, value in one["figures"].items() if value == SKIPPED]


def _line(name: str, one: Mapping[str, Any]) -> str:
    below = [f"{SKIPPED}: {'; '.join(skipped)}"] if (skipped := _skipped(one)) else []
    below += [text.strip().splitlines()[-1] for text in one["wrong"][:5]]
    below += [f"remedy: {one['remedy']}"] * (one["status"] != OK)
    line = f"{one['status']:<7} {name:<11}{one['seconds']:6.1f} s  {one['proves']}"
    return "\n    ".join((line, *below))


def _verdict(checks: Mapping[str, Mapping[str, Any]]) -> str:
    bad = {name: one["status"] for name, one in checks.items() if one["status"] != OK}
    if not bad:
        skipped = sum(len(_skipped(one)) for one in checks.values())
        left = f" that can run here; {skipped} parts are skipped, as there is no GPU"
        return "all checks pass" + left * bool(skipped)
    send = "attach both files of --report to an issue on the project's issue tracker"
    if set(bad.values()) == {LATE}:
        return f"out of time: {', '.join(bad)}; nothing wrong was found. See the remedies; if they do not help, {send}"
    return f"not ok: {', '.join(bad)}; please {send}"


def markdown(report: Mapping[str, Any]) -> Iterator[str]:
    """The report: where it was made, a table of verdicts, then each check's figures and what it found wrong."""
    from megatron_muon.tools.screen import table

    checks: Mapping[str, Mapping[str, Any]] = report["checks"]
    yield f"# megatron-muon doctor --gpu\n\n**{_verdict(report['checks'])}**\n"
    yield f"Made {report['time']} by `{report['command']}`, commit {report['commit']}, on {report['where']}.\n"
    yield f"{_text(report['versions'])}; {_text(report['machine'])}.\n"
    head = ("check", "verdict", "skipped", "seconds", "what it checks")
    rows: list[tuple[str, ...]] = [
        (name, one["status"], str(len(_skipped(one))), f"{one['seconds']:.1f}", one["proves"])
        for name, one in checks.items()
    ]
    yield table(head, rows, numbers=[2, 3])
    for name, one in checks.items():
        yield f"\n## {name}: {one['status']}\n\n{one['run']}\n"
        if one["status"] != OK:
            yield f"Remedy: {one['remedy']}.\n"
        yield from (f"```\n{text}\n```\n" for text in (*one["wrong"], "\n".join(one["log"])) if text)
        several = {key: value for key, value in one["figures"].items() if isinstance(value, dict)}
        if columns := dict.fromkeys(key for value in several.values() for key in value):
            rows = [(key, *(_text(value.get(column, "-")) for column in columns)) for key, value in several.items()]
            yield table(("case", *columns), rows, numbers=range(1, 1 + len(columns))) + "\n"
        yield from (f"- {key}: {_text(value)}" for key, value in one["figures"].items() if key not in several)
    yield f"\n{_verdict(checks)}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(of)}" for key, of in value.items())
    return "\n".join(["", "```", *map(str, value), "```"]) if isinstance(value, list) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Run the command line, by default this process's, and return the exit status."""
    from megatron_muon.cli import reported

    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--run"]:
        run_here(*arguments[1:])
    parser = CommandParser(prog=f"python -m {MODULE}", description=__doc__, epilog=EXAMPLES)
    add_arguments(parser)
    return reported(lambda: run(parser.parse_args(arguments), f"python -m {MODULE}"))


if __name__ == "__main__":
    sys.exit(main())
