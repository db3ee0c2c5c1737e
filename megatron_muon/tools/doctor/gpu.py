"""`megatron-muon doctor --gpu`, and under torchrun `-m megatron_muon.tools.doctor.gpu`: the checks, and their report.

Every check runs in a process of its own on each rank, with a limit, so that one that crashes or hangs ends no other.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.tools.doctor import SKIPPED
from megatron_muon.tools.parser import CommandParser, positive, write_json
from megatron_muon.tools.train import processes

MODULE = "megatron_muon.tools.doctor.gpu"
OK, WRONG, FAILED, HUNG = "ok", "wrong", "failed", "hung"

EXAMPLES = f"""\
examples:
  one GPU, and a report in report.md and report.json:
    megatron-muon doctor --gpu --report report.md
  eight GPUs; on several nodes with torchrun's --nnodes, and --folder on a disk that all of them see:
    torchrun --nproc-per-node 8 -m {MODULE} --report report.md
  the checks themselves, without a GPU:
    megatron-muon doctor --gpu --device cpu

exit status:
  0 all checks pass, 1 one does not, 2 a mistake of the user, as no GPU
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the checks."""
    group = parser.add_argument_group("checks of a GPU")
    add = group.add_argument
    add("--device", choices=("cuda", "cpu"), help="cpu: small sizes, to try the checks themselves (cuda)")
    add("--only", nargs="+", metavar="CHECK", help="some checks, by name (all)")
    add("--report", type=Path, metavar="FILE.md", help="write all figures to FILE.md, and to FILE.json")
    add("--write-profile", type=Path, metavar="FILE.yaml", help="write measured rates, for plan --hardware FILE.yaml")
    add("--limit", type=positive, metavar="S", help="seconds that a check may take, some several times these (120)")
    add("--folder", type=Path, metavar="DIR", help="where checks keep files while they run; all ranks must see it")
    add("--verbose", action="store_true", help="keep host names and paths in the report")


def run(args: argparse.Namespace) -> int:
    """Run the checks one after the other on all ranks; the first rank prints verdicts and writes the report."""
    from megatron_muon.core.ranks import of_all_ranks, say
    from megatron_muon.errors import quiet_imports
    from megatron_muon.megatron.provenance import provenance

    with quiet_imports():
        import torch.distributed as dist
        from torch.distributed.elastic.utils.distributed import get_free_port

        from megatron_muon.tools.doctor.runs import CHECKS, profile
    device = args.device or "cuda"
    _check_arguments(args, device, CHECKS)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=args.folder) as folder:
        everyone = of_all_ranks(folder)
        for name, check in CHECKS.items():
            if args.only and name not in args.only:
                continue
            port = of_all_ranks(get_free_port())[0]
            mine = _run_check(name, device, Path(everyone[0], name), port, check.limit * (args.limit or 120))
            results[name] = _of_all(of_all_ranks(mine)) | {"proves": check.proves, "remedy": check.remedy}
            say(_line(name, results[name]))
    report = {**provenance(f"python -m {MODULE}"), "checks": results}
    report = report if args.verbose else json.loads(public(json.dumps(report, default=str)))
    bad = [name for name, one in results.items() if one["status"] != OK]
    if int(os.environ.get("RANK", "0")) == 0:
        print(_verdict(bad))
        if args.report is not None:
            args.report.write_text("\n".join(markdown(report, bad)) + "\n", "utf-8")
            write_json(args.report.with_suffix(".json"), report)
        if args.write_profile is not None:
            measured = asdict(profile(results["machine"]["figures"]))
            args.write_profile.write_text(yaml.safe_dump(measured, sort_keys=False), "utf-8")
    return ExitStatus.FAILURE if bad else ExitStatus.OK


def _check_arguments(args: argparse.Namespace, device: str, checks: Mapping[str, Any]) -> None:
    import torch

    from megatron_muon.megatron.gpu import unusable_gpu

    if device == "cuda" and not torch.cuda.is_available():
        why = unusable_gpu() or "torch finds none"
        raise UserError(f"no GPU here: {why}; on a machine that has one type the same, or try --device cpu")
    if unknown := [name for name in args.only or () if name not in checks]:
        raise UserError(f"--only {unknown[0]} is no check; choose from {', '.join(checks)}")
    if args.write_profile is not None and args.only and "machine" not in args.only:
        raise UserError("--write-profile writes what the check machine has measured; add it to --only")
    for file in filter(None, (args.report, args.write_profile)):
        if not file.resolve().parent.is_dir():
            raise UserError(f"cannot write {str(file)!r}: there is no directory {str(file.parent)!r}")
    if args.folder is None and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise UserError("on several nodes the checks need --folder DIR, a directory that all nodes see")


def _run_check(name: str, device: str, folder: Path, port: int, limit: int) -> dict[str, Any]:
    """What a check found on this rank, in a process of its own; the end of its output where it failed."""
    start, rank = time.perf_counter(), os.environ.get("RANK", "0")
    folder.mkdir(exist_ok=True)
    log = folder / f"check.{rank}.log"
    env = processes.environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    env |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    command, stop = [sys.executable, "-m", MODULE, "--run", name, device, str(folder), str(limit)], threading.Event()
    timer = threading.Timer(limit + 20, stop.set)  # a check that hangs shows where, and ends
    timer.start()
    ended = processes.watch(command, log, env=env, stop=stop, grace_s=1.0)
    timer.cancel()
    if ended.signal is not None and not stop.is_set():
        processes.unwind(ended.signal)
    seconds = time.perf_counter() - start
    status = OK if not ended.status else HUNG if seconds > limit else FAILED
    output = folder / f"figures.{rank}.json"
    found = json.loads(output.read_text("utf-8")) if output.exists() else {"figures": {}, "wrong": []}
    if found["wrong"] and status == OK:
        status = WRONG
    tail = log.read_text("utf-8", errors="replace").splitlines()[-60:] if status != OK else []
    return {"status": status, "seconds": seconds, **found, "log": tail}


def _of_all(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks found: the worst verdict, the first rank's figures, and what any of them found wrong."""
    worst = max(ranks, key=lambda one: (OK, WRONG, FAILED, HUNG).index(one["status"]))
    wrong = dict.fromkeys(text for one in ranks for text in one["wrong"])
    return {**ranks[0], "status": worst["status"], "log": worst["log"], "wrong": list(wrong)}


def run_here(name: str, device: str, folder: str, limit: str) -> NoReturn:
    """In the process of a check: its figures as JSON. A check notes what is wrong and goes on where it can."""
    faulthandler.dump_traceback_later(int(limit), exit=True)
    import torch
    import torch.distributed as dist

    from megatron_muon.tools.doctor.checks import Context
    from megatron_muon.tools.doctor.runs import CHECKS

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    context = Context(torch.device(device), Path(folder), int(os.environ.get("RANK", "0")), ranks)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    status, figures = 0, dict[str, Any]()
    try:
        figures = CHECKS[name].run(context)
    except Exception:
        status = 1
        context.wrong.append(traceback.format_exc(limit=-6))
    context.keep(figures)
    sys.stdout.flush()
    os._exit(status)  # threads of collectives that failed would hold the process


def public(text: str) -> str:
    """A text without this machine's name, its user's and folders."""
    for name in {socket.gethostname(), os.environ.get("USER", "")} - {"", "root", "localhost"}:
        text = re.sub(rf"\b{re.escape(name)}\b", "HOST", text)
    return re.sub(r"(?<![\w.)])(/[\w.@+-]+){2,}/", ".../", text)


def _line(name: str, one: Mapping[str, Any]) -> str:
    wrong = [f"\n    {key}: {SKIPPED}" for key, value in one["figures"].items() if value == SKIPPED]
    wrong += [f"\n    {text.splitlines()[-1] if text else ''}" for text in one["wrong"][:5]]
    remedy = f"\n    remedy: {one['remedy']}" if one["status"] != OK else ""
    return f"{one['status']:<7} {name:<11}{one['seconds']:6.1f} s  {one['proves']}{''.join(wrong)}{remedy}"


def _verdict(bad: list[str]) -> str:
    if not bad:
        return "all checks pass that can run here"
    return f"failed: {', '.join(bad)}; please attach the files of --report to an issue on the project's issue tracker"


def markdown(report: Mapping[str, Any], bad: list[str]) -> Iterator[str]:
    """The report: where it was made, a table of verdicts, then each check's figures and what it found wrong."""
    yield "# megatron-muon doctor --gpu\n"
    yield f"Made {report['time']} by `{report['command']}`, commit {report['commit']}.\n"
    yield f"{', '.join(f'{name} {version}' for name, version in report['versions'].items())}; {report['machine']}.\n"
    yield "| check | verdict | seconds | what it proves |\n| --- | --- | --- | --- |"
    for name, one in report["checks"].items():
        yield f"| {name} | {one['status']} | {one['seconds']:.1f} | {one['proves']} |"
    for name, one in report["checks"].items():
        if one["figures"] or one["wrong"]:
            yield f"\n## {name}: {one['status']}\n"
        yield from (f"- {key}: {_text(value)}" for key, value in one["figures"].items())
        for text in (*one["wrong"], "\n".join(one["log"])):
            if text:
                yield f"\n```\n{text}\n```"
        if name in bad:
            yield f"\nRemedy: {one['remedy']}."
    yield f"\n{_verdict(bad)}"


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
    return reported(lambda: run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
