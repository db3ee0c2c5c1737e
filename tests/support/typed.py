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
    if "-m benchmarks." in ours:
        smaller = "--matrices 512x64" if "--matrices" in ours else "--hidden-size 64 --num-layers 1"
        return f"{ours} {smaller} --warmup 1 --repeat 1"
    if ours.startswith("megatron-muon eval"):
        return f"{ours} --max-tokens 20000"
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
    """A copy of the repository's files in which the quickstart has run; the environment to type in."""
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


def main(chosen: list[str]) -> int:
    """Type the commands of pages; 1 if one failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="typed-") as name:
        folder = Path(name)
        env = prepare(folder)
        for page in chosen or pages():
            for run in (folder / "runs").iterdir():  # of another page
                if run.is_dir() and run.name != "quickstart":
                    shutil.rmtree(run)
            for command in commands(page):
                reason = next(
                    (why for pattern, why in LEFT_OUT.items() if re.match(pattern, command.text)),
                    "",
                )
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
