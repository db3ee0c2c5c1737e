"""Starts the processes of a measurement, ends them whatever happens, and notes where figures come from.

Needs neither torch nor megatron-core: the command line uses it before anything heavy is imported. What is measured
stands in `bench_step` and `bench_train`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
"""Holds the package, and pretrain_gpt.py in a checkout."""

TAIL_LINES = 40
_SECONDS_TO_END = 15.0
_PACKAGES = (
    "megatron-muon",
    "megatron-core",
    "torch",
    "emerging-optimizers",
    "transformer-engine",
    "deepspeed",
    "muon-fsdp2",
)


@dataclass(frozen=True)
class StepSpec:
    """What `bench step` measures; travels to the ranks as JSON.

    Attributes:
        ranks: processes, one for each shard.
        hidden_size: H; a block holds qkv `(3H, H)`, proj `(H, H)`, fc1 `(4H, H)` and fc2 `(H, 4H)`.
        num_layers: blocks.
        ns_dtype: "bf16" or "fp32", what Newton-Schulz's products run in.
        methods: of "owner", "allgather", "allgather-tuned", "adam".
        peers: other implementations, of "deepspeed", "deepspeed-gram", "muon-fsdp2".
        repeat: timed steps of each method.
        warmup: steps of each method before these.
        buffer_mb: MiB for the owner scheme's waves.
        device: "auto", "cpu" or "cuda".
        offload: of "none", "cpu", "nvme": the owner scheme once more with momentum there.
        offload_dir: the directory for "nvme".
        offload_buffer_mb: MiB that momentum on its way may fill.
        momentum_dtype: "fp32", "bf16" or "int8", how momentum is stored with `offload`.
    """

    ranks: int
    hidden_size: int
    num_layers: int
    ns_dtype: str = "bf16"
    methods: tuple[str, ...] = ("owner", "allgather", "allgather-tuned", "adam")
    peers: tuple[str, ...] = ()
    repeat: int = 5
    warmup: int = 1
    buffer_mb: float = 256.0
    device: str = "auto"
    offload: tuple[str, ...] = ()
    offload_dir: str | None = None
    offload_buffer_mb: float = 24.0
    momentum_dtype: str = "fp32"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(ranks: int) -> dict[str, str]:
    """The environment of the ranks: this package importable, gloo on the loopback, the cores shared evenly."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def torchrun(ranks: int, *program: str) -> list[str]:
    """The command that runs `program` on `ranks` processes that meet on 127.0.0.1, at a free port."""
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks))
    return [*launcher, *meet, *program]


def run_logged(command: Sequence[str], log: Path, *, env: Mapping[str, str], what: str) -> None:
    """Run a command to its end with all output in `log`; none of its processes outlives the call.

    Args:
        command: what to run.
        log: where stdout and stderr go.
        env: its environment.
        what: the run's name in the error message.

    Raises:
        UserError: it ended with another status than 0; the end of its output has been printed.
    """
    with log.open("wb") as file, _sigterm_raises():
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait()
        finally:
            end_tree(process)
    if status:
        lines = log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        print("\n".join(lines), file=sys.stderr)
        raise UserError(f"{what} ended with status {status}; the last {len(lines)} lines of its log are above")


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks: it is asked first, what is left after a while is killed.

    torchrun puts ranks into sessions of their own, so a signal to its process group would not reach them.
    """
    if process.poll() is not None:
        return
    family = descendants(process.pid)
    process.terminate()
    try:
        process.wait(timeout=_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        family |= descendants(process.pid)
        process.kill()
        process.wait()
    for pid, started in family.items():
        if _start_time(pid) == started:  # a number that was given to another process since is left alone
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> dict[int, str]:
    """Processes below `pid`, each with the time of its start; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(stat)
        if fields:
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            started = _start_time(child)
            if started is not None:
                found[child] = started
            waiting.append(child)
    return found


def _stat(path: Path) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may hold blanks and brackets."""
    try:
        return path.read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str | None:
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else None


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Lets SIGTERM unwind the stack as Ctrl-C does, so that `finally` ends what was started."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Where figures come from: `machine`, `versions`, `commit`, `command`, `time`.

    Args:
        argv: the command line without the program's name.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "machine": {
            "processor": _processor(),
            "cores": cores(),
            "load_average_before": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": versions,
        "commit": commit(),
        "command": shlex.join(("megatron-muon", *argv)),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """The checkout's commit, with "-dirty" where tracked files differ from it; None outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude", "*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
