#!/usr/bin/env python3
"""Test several versions of torch and Python, and write the results into docs/questions.md.

Each pair gets a temporary environment from the package index: the newest release of that version
of torch, and requirements/lock.txt for the rest. It tests a clone of the last commit: all unit
tests and a few functional ones. A pair takes about 6 GB of disk and a quarter of an hour.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "questions.md"
HEADER = """\
| torch | Python | unit tests | functional tests | commit |
| --- | --- | --- | --- | --- |
"""
"""How the table of `PAGE` begins."""

TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHONS = ("3.12", "3.13")
PAIRS = tuple(f"{torch}/{python}" for torch in TORCHES for python in PYTHONS)

FUNCTIONAL = (
    # updates of every strategy under Megatron-FSDP, against full matrices
    "tests/functional/test_exact_updates.py",
    # FSDP2, HSDP, DDP, tensor parallelism, torch's distributed checkpoints
    "tests/functional/test_any_model.py",
    # Megatron's checkpoints: written, read, read by another layout
    "tests/functional/test_checkpoint_smoke.py",
    "tests/functional/test_training_parity.py",  # whole trainings through torchrun
)
"""What meets torch where its releases differ: DTensor, collectives, checkpoints, torchrun."""

OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*|setuptools)==")
"""Lines of the lock that a release of torch chooses by itself."""

EXTRAS = "megatron,hf,dev,plots"


def interpreter(version: str) -> str:
    """A Python of that version, from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [
        f"python{version}",
        *map(str, sorted(pyenv.glob(f"{version}*/bin/python3"), reverse=True)),
    ]
    for candidate in filter(shutil.which, found):
        asked = [candidate, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, cwd="/")
        if done.stdout.strip() == version:
            return candidate
    raise SystemExit(
        f"versions.py: no Python {version} with venv; install it, or leave out its pairs"
    )


def make_environment(folder: Path, source: Path, torch: str, python: str) -> Path:
    """Install the package with a release of torch into a new environment; its interpreter."""
    subprocess.run([interpreter(python), "-m", "venv", folder], check=True)
    lock = (source / "requirements" / "lock.txt").read_text("utf-8").splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "\n".join(line for line in lock if not OF_TORCH.match(line)) + "\n", "utf-8"
    )
    pip = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-compile",
    ]
    subprocess.run(
        [*pip, f"torch=={torch}.*", "-e", f"{source}[{EXTRAS}]", "-c", constraints], check=True
    )
    return folder / "bin" / "python"


def run_tests(python: Path, source: Path, *arguments: str) -> dict[str, Any]:
    """Results of pytest: tests passed, failed and skipped, names of failures, seconds."""
    report, log = source / "report.xml", source / "pytest.log"
    report.unlink(missing_ok=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environ["PATH"] = f"{python.parent}:{environ['PATH']}"
    with log.open("wb") as stream:
        command = [python, "-m", "pytest", "-q", "--junit-xml", report, *arguments]
        ended = subprocess.run(
            command, cwd=source, env=environ, stdout=stream, stderr=subprocess.STDOUT, check=False
        )
    if ended.returncode not in (0, 1) or not report.exists():
        end = log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"versions.py: pytest ended with {ended.returncode}:\n{end}")
    suite = ElementTree.parse(report).getroot()[0]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if failed:
        print(log.read_text(errors="replace")[-6000:], flush=True)
    skipped = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - skipped - len(failed)
    return {
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(float(suite.get("time", 0))),
    }


def try_pair(pair: str, work: Path, numprocesses: int) -> dict[str, Any]:
    """Make the environment of a pair, test in it, and remove it."""
    torch, _, version = pair.partition("/")
    source, folder = work / "source", work / f"env-{torch}-{version}"
    shutil.rmtree(source, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=True
    )
    try:
        python = make_environment(folder, source, torch, version)
        code = "import platform, torch; print(torch.__version__, platform.python_version())"
        asked = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True, cwd=work
        )
        installed = dict(zip(("torch", "python"), asked.stdout.split(), strict=True))
        at_once = (
            ("--numprocesses", str(numprocesses), "--dist", "loadfile") if numprocesses > 1 else ()
        )
        return {
            **installed,
            "commit": commit.stdout.strip()[:10],
            "unit": run_tests(python, source, "tests/unit", *at_once),
            "functional": run_tests(python, source, *FUNCTIONAL, *at_once),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def in_words(tests: dict[str, Any]) -> str:
    """Passed, failed and skipped, of which only what there is is named."""
    counts = {
        "passed": tests["passed"],
        "failed": len(tests["failed"]),
        "skipped": tests["skipped"],
    }
    names = f" ({', '.join(f'`{name}`' for name in tests['failed'])})" if tests["failed"] else ""
    return ", ".join(f"{number:,} {what}" for what, number in counts.items() if number) + names


def key(row: str) -> tuple[int, ...]:
    """The minor versions of torch and Python that a row of the table is about."""
    return tuple(int(version.split(".")[1]) for version in row.split("|")[1:3])


def write(found: dict[str, Any]) -> None:
    """Put a row into the table of docs/questions.md, in place of what it says of that pair."""
    cells = (
        found["torch"],
        found["python"],
        in_words(found["unit"]),
        in_words(found["functional"]),
        found["commit"],
    )
    row = f"| {' | '.join(cells)} |"
    page = PAGE.read_text("utf-8")
    rows = {key(row): row for row in [*re.findall(r"^\| \d.*$", page, re.MULTILINE), row]}
    before, _, rest = page.partition(HEADER)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    PAGE.write_text(
        before + HEADER + "".join(f"{rows[pair]}\n" for pair in sorted(rows)) + after, "utf-8"
    )


def main() -> int:
    """Try the pairs that are asked for; 1 where a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pairs",
        nargs="*",
        metavar="TORCH/PYTHON",
        help=f"such as 2.11/3.12 (default: {' '.join(PAIRS)})",
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where environments are made (a temporary folder)"
    )
    parser.add_argument(
        "--numprocesses", type=int, default=2, metavar="N", help="pytest processes at once (2)"
    )
    args = parser.parse_args()
    if wrong := [pair for pair in args.pairs if not re.fullmatch(r"2\.\d+/3\.\d+", pair)]:
        parser.error(f"{wrong[0]!r} is not of the form TORCH/PYTHON, such as 2.11/3.12")
    failed = False
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        for pair in args.pairs or PAIRS:
            started = time.monotonic()
            found = try_pair(pair, Path(work), args.numprocesses)
            failed |= bool(found["unit"]["failed"] or found["functional"]["failed"])
            print(f"{pair}: {json.dumps(found)} ({time.monotonic() - started:.0f} s)", flush=True)
            write(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
