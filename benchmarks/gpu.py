"""`python -m benchmarks.gpu`: what only a GPU shows, check by check, each in a process of its own with a time limit.

Here are arguments, processes and the table; the checks are in `gpu_checks.py`, `gpu_steps.py` and `gpu_runs.py`. With
`--device cpu` it tries itself out: small sizes, and checks that need a GPU are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import main, table
from megatron_muon.errors import UserError
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train.processes import environment

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\
examples:
  everything, with figures in a file:
    python -m benchmarks.gpu --json gpu.json
  two checks:
    python -m benchmarks.gpu --only arithmetic cost
  the checks themselves, where there is no GPU:
    python -m benchmarks.gpu --device cpu
"""

DESCRIPTION = """\
Runs Muon on a GPU: arithmetic against fp64, steps of every variant against a processor's, the same bits twice and under
delayed streams, what a step costs beside torch's optimizers, ranks over gloo on one GPU, FSDP2 over NCCL, and
trainings of the quickstart's model under Megatron-FSDP. A check that fails or hangs does not end the others.
"""


def configure(parser: CommandParser) -> None:
    """Adds description, arguments and examples."""
    from benchmarks.gpu_runs import CHECKS

    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, to try the checks themselves")
    add("--only", nargs="+", choices=tuple(CHECKS), metavar="CHECK", help=f"of {', '.join(CHECKS)} (all)")
    add("--limit", type=positive, default=120, metavar="S", help="seconds that a check may take (120)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the checks one after the other and returns what each found."""
    from benchmarks.gpu_runs import CHECKS

    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("torch finds no GPU here; type --device cpu to try the checks themselves, or nvidia-smi")
    found = {}
    for name, check in CHECKS.items():
        if args.only and name not in args.only:
            continue
        if check.needs_gpu and args.device == "cpu":
            found[name] = {"status": "skipped: no GPU", "seconds": 0.0, "figures": {}}
            continue
        found[name] = _run_check(name, args.device, args.limit)
        print(f"{found[name]['status']:<8} {name:<12} {found[name]['seconds']:6.1f} s", file=sys.stderr, flush=True)
    return {"device": args.device, "checks": found}


def _run_check(name: str, device: str, limit: int) -> dict[str, Any]:
    """What a check found, in a process of its own; the end of its output where it failed."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as folder:
        output, log = Path(folder, "figures.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu", "--run", name, device, folder]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment(1), start_new_session=True
            )
            try:
                status = "ok" if process.wait(limit) == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "hung"
                _end(process)
        figures = json.loads(output.read_text("utf-8")) if output.exists() else {}
        logs = sorted(Path(folder).rglob("*log"), key=lambda path: path.stat().st_mtime)[-3:]
        tail = [line for path in logs for line in path.read_text("utf-8", errors="replace").splitlines()[-25:]]
    wrong = figures.pop("wrong", [])
    if wrong and status == "ok":
        status = "wrong"
    seconds = time.perf_counter() - start
    return {"status": status, "seconds": seconds, "wrong": wrong, "figures": figures, "log": tail * (status != "ok")}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a check and the processes that it has started."""
    import psutil

    for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        one.kill()
    process.wait()


def run_here(name: str, device: str, folder: str) -> int:
    """In the process of a check: its figures as JSON. A check notes what is wrong in `wrong` and goes on."""
    import torch

    from benchmarks.gpu_checks import Context
    from benchmarks.gpu_runs import CHECKS

    context = Context(torch.device(device, 0) if device == "cuda" else torch.device(device), Path(folder))
    try:
        figures = CHECKS[name].run(context)
    except Exception:
        figures = {}
        context.wrong.append(traceback.format_exc(limit=-6))
    context.keep(figures)
    return 0


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The verdict on each check, then each check's figures."""
    rows = [(name, one["status"], f"{one['seconds']:.1f}") for name, one in results["checks"].items()]
    found = [table("Checks", ("check", "verdict", "seconds"), rows)]
    for name, one in results["checks"].items():
        flat = [(key, json.dumps(value)[:90]) for key, value in one["figures"].items()]
        flat += [("wrong", text[-300:]) for text in one.get("wrong", [])]
        if flat:
            found.append(table(name, ("figure", "value"), flat))
    return found


def run(argv: list[str] | None = None) -> int:
    """Runs the command line, by default this process's, and returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--run"]:
        return run_here(*argv[1:])
    return main("gpu", configure, measure, tables, argv)


if __name__ == "__main__":
    sys.exit(run())
