"""Types the commands of README.md and docs/ where the quickstart has run, and watches the
quickstart's files.

    python -m tests.support.typed [PAGE...]

Each command runs in a shell, page by page, in the order of the page. The variable STEPS (2)
shortens trainings to that many iterations; with STEPS= every command runs at its whole length. A
line for each command says how it went; the exit status is 1 if one failed or changed a file of the
quickstart.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.support import cli, warm
from tests.support.documented import (
    LEFT_OUT,
    Command,
    commands,
    copy_repository,
    pages,
    with_stand_ins,
)

STEPS = os.environ.get("STEPS", "2")
SMALL = "--micro-batch-size 1 --global-batch-size 12 --seq-length 64 --max-position-embeddings 64"
SHORT = f"--device cpu --exit-interval {STEPS} --eval-iters 1 --log-interval 1 {SMALL}"


def shortened(text: str) -> str:
    """A command as it is typed: its trainings end after STEPS iterations."""
    text = with_stand_ins(text)
    if not STEPS or "--dry-run" in text:
        return text
    if "pretrain_gpt.py" in text:
        return f"{text} {SHORT}"
    ours, _, flags = text.partition(" -- ")
    if ours.startswith("python -m benchmarks.train"):
        return f"{ours} --steps 2 --warmup 1 --rounds 1 -- {flags} {SMALL}"
    if "-m benchmarks." in ours and "benchmarks.rehearse" not in ours:
        smaller = "--matrices 512x64" if "--matrices" in ours else "--hidden-size 64 --num-layers 1"
        return f"{ours} {smaller} --warmup 1 --repeat 1"
    if not ours.startswith("megatron-muon train"):
        return text
    return f"{ours} -- {flags} {SHORT}"


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of the quickstart's run and data, by its path."""
    files = [*(folder / "runs/quickstart").rglob("*"), *(folder / "data").glob("stdlib.*")]
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file()
    }


def prepare(folder: Path) -> dict[str, str]:
    """A copy of the repository's files in which the quickstart has run; the environment to
    type in.
    """
    copy_repository(folder)
    binaries = Path(sys.executable).parent
    (folder / ".venv").symlink_to(binaries.parent)
    (folder / "bin").mkdir()
    starts = {
        "python": "",
        "torchrun": "-m torch.distributed.run",
        "megatron-muon": str(binaries / "megatron-muon"),
    }
    for name, arguments in starts.items():
        script = f'#!/bin/sh\nexec "${{PYTHON_EXEC:-{warm.COLD}}}" {arguments} "$@"\n'
        (folder / "bin" / name).write_text(script, "utf-8")
        (folder / "bin" / name).chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:{binaries}:{os.environ['PATH']}", "PET_STANDALONE": "1"}
    cli.run(
        ["bash", "-c", f"megatron-muon quickstart --nproc 2 -- {SHORT if STEPS else ''}"],
        folder,
        env=env,
    ).checked()
    return env


def type_command(command: Command, folder: Path, env: dict[str, str]) -> str:
    """Type a command; what is wrong, or nothing."""
    before = digests(folder)
    try:
        # they ask for a GPU before the CPU
        cold = re.search(r"-m benchmarks\.|examples/", command.text)
        line, seconds = ["bash", "-c", shortened(command.text)], 600 if STEPS else 36_000
        run = cli.run(line, folder, seconds=seconds, env=env, cold=bool(cold))
        wrong = f"status {run.returncode}\n{run.tail[-2000:]}" if run.returncode else ""
    except cli.HangError as error:
        wrong = str(error)
    changed = sorted(name for name, _ in before.items() ^ digests(folder).items())
    return wrong + (f"changed {sorted(set(changed))}" if changed else "")


_IN_PROCESS = re.compile(r"megatron-muon (plan|--version)|megatron-muon train .*--dry-run")
_LAUNCHER = re.compile(r"megatron-muon train|pretrain_gpt\.py|benchmarks\.\w+")
_OUTPUT = re.compile(r"(?:--out|--save|\bsave)[ =](\S+)")
_CONTINUES = re.compile(r"--resume|\bload[ =]|imported/")


def reason_to_skip(command: Command, later: list[Command], launchers: set[str]) -> str:
    """The reason not to type a command, which `later` ones of its page follow; "" to type it.

    Of trainings only the first of each launcher is typed, and those that continue a run or that
    later commands use: the flags of all are checked by test_documented_commands.py.
    """
    for pattern, reason in LEFT_OUT.items():
        if re.match(pattern, command.text):
            return reason
    if _IN_PROCESS.match(command.text):
        return "test_documented_commands.py runs it"
    launcher = _LAUNCHER.search(command.text)
    if not launcher or _CONTINUES.search(command.text):
        return ""
    outputs = _OUTPUT.findall(command.text)
    is_used = any(output in other.text for output in outputs for other in later)
    if launcher[0] in launchers and not is_used:
        return "its flags are checked by test_documented_commands.py"
    launchers.add(launcher[0])
    return ""


def main(chosen: list[str]) -> int:
    """Type the commands of pages; 1 if one failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="typed-") as name:
        folder = Path(name)
        env = prepare(folder)
        launchers: set[str] = set()
        for page in chosen or pages():
            for run in (folder / "runs").iterdir():  # of another page
                if run.is_dir() and run.name != "quickstart":
                    shutil.rmtree(run)
            on_page = commands(page)
            for number, command in enumerate(on_page, 1):
                reason = reason_to_skip(command, on_page[number:], launchers)
                started = time.monotonic()
                wrong = "" if reason else type_command(command, folder, env)
                failed |= bool(wrong)
                how = f"left out ({reason})" if reason else "FAILED" if wrong else "ok"
                print(
                    f"{how}, {time.monotonic() - started:.0f} s: {command}"
                    + (f"\n{wrong}" if wrong else ""),
                    flush=True,
                )
    return failed


if __name__ == "__main__":
    status = main(sys.argv[1:])
    warm.PROCESS.close()
    sys.exit(status)
