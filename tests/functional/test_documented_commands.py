"""Every command that README.md and docs/ show is tried here, as far as this machine allows.

Cheap ones run as they stand, in a copy of the repository's files, page by page in the order of the
page. The flags of trainings are validated, as by `train --dry-run`. What needs a cluster, another
machine or minutes is listed with a reason.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from benchmarks import step, train
from megatron_muon import cli as ours
from megatron_muon.errors import UserError
from megatron_muon.tools.parser import CommandParser
from tests.support import cli
from tests.support.cli import ROOT
from tests.support.documented import (
    NOT_HERE,
    PROGRAM,
    STAND_INS,
    Command,
    commands,
    copy_repository,
    pages,
    with_stand_ins,
)
from tests.support.pool import Pool

pytestmark = pytest.mark.timeout(600)

SHORT = (
    *("--device", "cpu", "--exit-interval", "2", "--eval-iters", "1", "--log-interval", "1"),
    *(
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "48",
        "--seq-length",
        "64",
        "--max-position-embeddings",
        "64",
    ),
)
"""Two iterations of little work, with a batch that 16 ranks divide; the length of the run, and so
the schedule, stays what the command says.
"""

TRIED: set[str] = set()
"""Commands that leave nothing behind here, and so need not be tried on a second page."""


@dataclass
class Reader:
    """Someone who tries the commands of a page, one after the other.

    Attributes:
        folder: where; a copy of the repository's files.
        ranks: the pool that settles flags.
    """

    folder: Path
    ranks: Pool

    def types(self, command: Command) -> None:
        """Try a command."""
        for beginning, reason in NOT_HERE.items():
            if re.match(beginning, command.text):
                for path in re.findall(
                    r"(?:scripts|tests|configs)/[-\w./*]+", f"{command.text} {reason}"
                ):
                    assert list(ROOT.glob(path)), f"{path} does not exist"
                return
        text = with_stand_ins(command.text)
        assert "..." not in text, "what stands for the dots? Add it to STAND_INS"
        if text in TRIED:
            return
        words = shlex.split(text)
        words = words[: words.index(">")] if ">" in words else words
        with contextlib.ExitStack() as stack:
            while re.fullmatch(r"[A-Z_]+=.*", words[0]):
                name, _, value = words.pop(0).partition("=")
                stack.enter_context(mock.patch.dict(os.environ, {name: value}))
            self.run(*words)
        if re.match(r"megatron-muon (plan|train) |torchrun ", text):
            TRIED.add(text)

    def run(self, program: str, *rest: str) -> None:
        argv = list(rest)
        if program == "megatron-muon":
            self.megatron_muon(argv)
        elif program == "torchrun":
            flags = [word for word in argv if word != "--standalone"]  # about torchrun's port
            assert (flags[0], flags[2]) == (
                "--nproc-per-node",
                "pretrain_gpt.py",
            ), "nothing here runs that"
            self.settle(flags[3:], ranks=int(flags[1]))
        elif program == "sbatch":
            self.sbatch(argv)
        elif program == "pip":
            extras = [
                extra
                for several in re.findall(r"\[(.*?)\]", " ".join(argv))
                for extra in several.split(",")
            ]
            assert all(
                f'"{extra}": [' in (ROOT / "setup.py").read_text("utf-8") for extra in extras
            ), argv
        elif program == "export":
            # the page's fixture takes them back
            os.environ.update(word.split("=", 1) for word in argv)
        elif argv[:2] in (["-m", "benchmarks.step"], ["-m", "benchmarks.train"]):
            self.benchmark(step if argv[1] == "benchmarks.step" else train, argv[2:])
        else:
            assert program in (
                "mkdir",
                "python",
            ), "nothing here runs that: add it to NOT_HERE or Reader.run"
            command = [sys.executable if program == "python" else program, *argv]
            subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=120)
            for figure in (ROOT / "docs" / "figures").glob("*.svg"):
                drawn = self.folder / "docs" / "figures" / figure.name
                assert drawn.read_bytes() == figure.read_bytes(), (
                    f"{figure.name} is not what its script draws"
                )

    def benchmark(self, module: ModuleType, argv: list[str]) -> None:
        """Parse what takes minutes; tests/functional/test_bench.py runs small ones."""
        parser = CommandParser()
        module.configure(parser)
        parser.add_argument("--json")
        args = parser.parse_args(argv)
        if module is train:
            self.settle(
                ["--config", str(args.config), *shlex.split(args.compare or ""), *args.flags]
            )

    def megatron_muon(self, argv: list[str]) -> None:
        """A command of ours, in this process; without a run to look at, it is parsed."""
        if argv[0] == "train" and "--dry-run" not in argv:
            argv.insert(1, "--dry-run")
        if argv[0] == "train" and "--device" not in argv:  # else it is for another machine
            argv += [*(() if "--" in argv else ("--",)), *SHORT]
        goes_on = "--resume" in argv and "--config" not in argv
        imported = argv[0] == "train" and any(word.startswith("imported/") for word in argv)
        if goes_on or imported or argv[0] in ("compare", "import") or "--checkpoint" in argv:
            ours._build_parser(argv)[0].parse_args(argv)
        else:
            self.ours(argv)

    def ours(self, argv: list[str]) -> None:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = ours.main(argv)
        assert status == 0, (
            f"megatron-muon {shlex.join(argv)} ended with {status}:\n{output.getvalue()[-4000:]}"
        )

    def settle(self, flags: Sequence[str], *, ranks: int = 2) -> None:
        """Check the flags of pretrain_gpt.py as a rank would."""
        (error,) = self.ranks(
            1, settle_flags, argv=[*flags, *SHORT], ranks=ranks, folder=str(self.folder)
        )
        assert not error, error

    def sbatch(self, argv: list[str]) -> None:
        """Settles the flags of a script of scripts/slurm, for a rank on each node."""
        (script,) = [place for place, word in enumerate(argv) if word.endswith(".sbatch")]
        assert (ROOT / argv[script]).is_file()
        nodes = argv[argv.index("--nodes") + 1] if "--nodes" in argv else "1"
        self.settle([*argv[script + 1 :], "--data-path", "data/stdlib"], ranks=int(nodes))


def settle_flags(
    rank: int,
    world_size: int,
    *,
    argv: list[str],
    ranks: int,
    folder: str,
) -> str:
    """In a worker: the checks before ranks are started, and Megatron's; what is wrong with the
    flags.
    """
    from megatron_muon.megatron import prepare

    sys.modules["__main__"].installed.undo()
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        opened = prepare.open_line(argv, writes=False)
        checked = prepare.check(opened, opened.merged(), writes=False)
        prepare.validate(checked.args, world_size=ranks)
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture
def reader(
    tmp_path: Path, corpus: tuple[str, ...], ranks: Pool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    """A reader in a copy of the repository, with a tiny corpus for the quickstart's, which takes
    ten seconds.
    """
    copy_repository(tmp_path)
    (tmp_path / "data").mkdir()
    for file in Path(corpus[1]).parent.glob("tiny.*"):
        # what the quickstart and the study of convergence prepare
        for name in ("stdlib", "english"):
            shutil.copy(file, tmp_path / "data" / file.name.replace("tiny", name))
    monkeypatch.chdir(tmp_path)
    cli.start_warm(monkeypatch)
    with mock.patch.dict(os.environ):
        yield Reader(tmp_path, ranks)


@pytest.mark.parametrize("page", [page for page in pages() if commands(page)])
def test_a_reader_can_type_every_command(page: str, reader: Reader) -> None:
    for command in commands(page):
        try:
            reader.types(command)
        except Exception as error:
            raise AssertionError(f"{command}\ndoes not work: {error}") from error


def test_flags_that_troubleshooting_advises_fit_a_run(reader: Reader) -> None:
    """Those that stand in its sentences, with their values."""
    advised = re.findall(
        r"`(--[a-z][a-z-]* [a-z0-9_ .-]+)`", (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    )
    assert "--muon-extra-scale-factor 0.2" in advised
    for flags in set(advised):
        reader.settle(["--config", "configs/quickstart.yaml", *shlex.split(flags)])


def test_no_command_is_overlooked_and_no_entry_left_over() -> None:
    """Nothing that looks like a command stands outside of blocks."""
    found = {page: commands(page) for page in pages()}
    texts = [command.text for of_page in found.values() for command in of_page]
    assert len(texts) > 40
    for page, of_page in found.items():
        lines = (ROOT / page).read_text("utf-8").splitlines()
        looks = {
            number
            for number, line in enumerate(lines, 1)
            if re.match(r"(    )?(megatron-muon|torchrun) ", line)
        }
        collected = {
            number for command in of_page for number in range(command.line, command.line + 8)
        }
        assert looks <= collected, f"{page}: lines {sorted(looks - collected)}"
    for entry in (*STAND_INS, *NOT_HERE):
        assert any(entry in text or re.match(entry, text) for text in texts), (
            f"{entry!r} stands in no page any more"
        )


@pytest.mark.parametrize(
    "text",
    [
        "megatron-muon plan --config configs/quickstart.yaml --world-sise 2",
        "megatron-muon train --config configs/quickstart.yaml --no-such-flag 1 --dry-run",
        (
            "torchrun --nproc-per-node 2 pretrain_gpt.py --config configs/quickstart.yaml"
            " --muon-exchnage owner"
        ),
        "sbatch --nodes 2 scripts/slurm/pretrain.sbatch --config configs/none.yaml",
        "torchrun --nproc-per-node 2 pretrain_gpt.py ... --lr 1",
        "bash scripts/quickstart.sh",
    ],
)
def test_a_wrong_command_is_found(text: str, reader: Reader) -> None:
    """A negative control."""
    with pytest.raises(AssertionError):
        reader.types(Command("nowhere", 1, text))
    assert PROGRAM.match(text) or text.startswith("bash")
