"""Runs of the real command line for the tests: torchrun, a tiny model, a tiny data set, and what
the log says.

A run is a subprocess in a directory of its own. Whatever happens to it, none of its processes
outlives the call.
"""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_muon.megatron.data.corpus import prepare
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200.0
"""Longest time for one run; one that starts cold takes 10 to 20 s on two idle cores, nearly all of
it imports.
"""


def words(text: str) -> tuple[str, ...]:
    """The flags of a command line without spaces in them."""
    return tuple(text.split())


HYPERBALL = ("--muon-hyperball", "--weight-decay", "0")
CAUTIOUS = ("--muon-cautious-weight-decay", "--weight-decay", "0.1")
MUON = ("--optimizer", "muon", "--use-megatron-fsdp")

TINY = words("""
    --num-layers 3 --hidden-size 39 --ffn-hidden-size 102 --num-attention-heads 3 --seq-length 32
    --max-position-embeddings 32 --make-vocab-size-divisible-by 1 --attention-dropout 0.0
    --hidden-dropout 0.0 --split 90,10,0 --micro-batch-size 2 --lr 0.01 --lr-decay-style constant
    --log-interval 1 --eval-iters 0 --seed 7
""")
"""A model of three layers whose sizes divide by nothing: shards are uneven, and empty on some
ranks.
"""

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)")
_FIELD = re.compile(r"(?<=[ |])([a-z][a-z ()-]*): *([-+.\w]+)(?= *\|)")
_VALIDATION = re.compile(r"validation loss at iteration \d+.*?\| lm loss value: (\S+)")


def sizes(text: str) -> dict[str, int]:
    """Names and numbers, one after the other."""
    parts = text.split()
    return dict(
        zip(
            parts[::2],
            map(int, parts[1::2]),
            strict=True,
        ),
    )


@dataclass(frozen=True)
class Iteration:
    """One line of Megatron's training log."""

    number: int
    loss: float
    grad_norm: float
    learning_rate: float
    skipped: int

    @classmethod
    def parse(cls, number: str, rest: str) -> "Iteration":
        # The line may end in another rank's: Megatron prints the text and the end of the line
        # apart.
        values = {name: float(value) for name, value in _FIELD.findall(rest)}
        loss, norm = (values.get(name, float("nan")) for name in ("lm loss", "grad norm"))
        return cls(
            int(number),
            loss,
            norm,
            values["learning rate"],
            int(values["number of skipped iterations"]),
        )


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    returncode: int
    output: str
    seconds: float

    @property
    def iterations(self) -> list[Iteration]:
        return [Iteration.parse(*match.groups()) for match in _ITERATION.finditer(self.output)]

    @property
    def losses(self) -> list[float]:
        return [iteration.loss for iteration in self.iterations]

    @property
    def validation_losses(self) -> list[float]:
        return [float(value) for value in _VALIDATION.findall(self.output)]

    def checked(self) -> "Run":
        """This run, which must have ended well."""
        assert self.returncode == 0, f"exit status {self.returncode}\n{self.tail}"
        return self

    @property
    def tail(self) -> str:
        """The end of the output, for the message of a failed assertion."""
        return self.output[-6000:]


def environment(*, cold: bool = False) -> dict[str, str]:
    """The environment of a command; what it starts with torchrun has everything imported unless it
    is `cold`.
    """
    path = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))),
    )
    warmth = {} if cold else warm.PROCESS.environment()
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(warm.PROCESS.folder)}
    return {**os.environ, **own, **warmth}


def start_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what this process starts for the rest of a test, Pythons and torchruns, have everything
    imported.
    """
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(warm.PYTHON))


class HangError(AssertionError):
    """A run that did not end in its time."""


def torchrun(
    cwd: Path,
    *args: str,
    ranks: int = 2,
    seconds: float = SECONDS,
    env: Mapping[str, str] | None = None,
    cold: bool = False,
) -> Run:
    """Run `torchrun --nproc-per-node RANKS pretrain_gpt.py ARGS` in `cwd`, see `run`.

    Raises:
        HangError: it took longer than `seconds`.
    """
    # --standalone takes a free port for the rendezvous and another for the process group.
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    return run(
        [
            *command,
            str(
                ROOT / "pretrain_gpt.py",
            ),
            *args,
        ],
        cwd,
        seconds=seconds,
        env=env,
        cold=cold,
    )


def run(
    command: Sequence[str],
    cwd: Path,
    *,
    seconds: float = SECONDS,
    env: Mapping[str, str] | None = None,
    cold: bool = False,
) -> Run:
    """Run a command in `cwd` with one thread per process; its output comes back with stdout and
    stderr together.

    A command of this interpreter runs in one that has everything imported, unless it is to start
    `cold`.
    """
    environ = environment(cold=cold) | dict(env or {})
    if command[0] == warm.COLD and not cold:
        command = [str(warm.PYTHON), *command[1:]]
    cwd.mkdir(parents=True, exist_ok=True)
    log = cwd / f"output-{time.monotonic_ns()}.log"
    started = time.monotonic()
    with log.open("wb") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=cwd, env=environ, start_new_session=True, **streams)
        try:
            returncode = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            output = log.read_text("utf-8", errors="replace")
            raise HangError(f"not finished after {seconds:.0f} s\n{output[-6000:]}") from None
        finally:
            end_tree(process)
    return Run(returncode, log.read_text("utf-8", errors="replace"), time.monotonic() - started)


def end_tree(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all its descendants: torchrun puts its workers into sessions of their
    own.
    """
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(timeout=30)
        psutil.wait_procs(family, timeout=30)


def make_corpus(directory: Path) -> tuple[str, ...]:
    """Write a tiny indexed data set, the bytes of 60 easily learnt documents; the flags to train on
    it.
    """
    vocabulary = words("the quick brown fox jumps over a lazy dog while ranks share matrices")
    chance = random.Random(0)
    documents = (" ".join(chance.choices(vocabulary, k=120)) for _ in range(60))
    source = directory / "documents.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents),
        "utf-8",
    )
    prepare([source], directory / "tiny")
    tokenizer = words("--tokenizer-type NullTokenizer --vocab-size 257")
    return ("--data-path", str(directory / "tiny"), *tokenizer)
