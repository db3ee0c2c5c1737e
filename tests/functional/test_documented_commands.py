"""Every command that README.md and docs/ show is run here, or checked as far as this machine allows.

Cheap ones run as they stand, in a copy of the repository's files, page by page in the order of the page. Trainings run
as they stand with flags behind them that end them after two iterations: the usual run settles their flags, as `train
--dry-run` does, and with `-m ''` they train. What needs a cluster, another machine or minutes is listed with a reason.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import step, train
from megatron_muon import cli as ours
from megatron_muon.errors import UserError
from megatron_muon.tools.parser import CommandParser
from tests.support import cli
from tests.support.cli import ROOT, make_corpus
from tests.support.documented import LEFT_OUT, NOT_HERE, PROGRAM, STAND_INS, Command, commands, names_of_tests, pages
from tests.support.pool import Pool
from tests.support.training import Trainings

pytestmark = pytest.mark.timeout(600)

SHORT = (
    *("--device", "cpu", "--exit-interval", "2", "--eval-iters", "1", "--log-interval", "1"),
    *("--micro-batch-size", "1", "--global-batch-size", "48", "--seq-length", "64", "--max-position-embeddings", "64"),
)
"""Two iterations of little work, with a batch that 16 ranks divide; the length of the run, and so the schedule, stays
what the command says."""

ELSEWHERE = {
    "torchrun --nproc-per-node 2 pretrain_gpt.py --optimizer muon --use-megatron-fsdp": (
        "functional/test_command_line.py",
        "test_the_bare_line",
    ),
    "torchrun --nproc-per-node 2 examples/": (
        "functional/test_examples.py",
        "test_models_that_are_not_megatrons_learn",
    ),
    "torchrun --nproc-per-node 2 -m benchmarks.any_model": (
        "functional/test_examples.py",
        "test_the_step_on_fsdp2_beside_others",
    ),
    "torchrun --nproc-per-node 2 -m benchmarks.offload_state": (
        "functional/test_examples.py",
        "test_all_state_off_the_device_beside_others",
    ),
    "megatron-muon plan --config configs/moe-large.yaml --world-size 128": (
        "unit/test_plan_command.py",
        "test_the_shipped_models_are_planned",
    ),
    "megatron-muon rehearse --config": ("unit/test_rehearse_command.py", "test_plan_and_rehearsal_agree"),
    "python examples/": ("functional/test_examples.py", "test_models_that_are_not_megatrons_learn"),
    "./examples/lr_transfer.sh": ("functional/test_sweep.py", "test_rates_across_widths_as_the_example_sweeps_them"),
    "./examples/recipes.sh": ("functional/test_sweep.py", "test_recipes_as_the_example_sweeps_them"),
    "./scripts/quickstart.sh": ("unit/test_packaging.py", "test_help_needs_no_set_up"),
    "./scripts/test.sh": ("unit/test_packaging.py", "test_help_needs_no_set_up"),
    **dict.fromkeys(
        (
            "megatron-muon train --config configs/quickstart.yaml --nproc 2 --wandb-project",
            "WANDB_MODE=offline megatron-muon train --config configs/quickstart.yaml --nproc 2 --wandb-project",
        ),
        ("functional/test_wandb.py", "test_names_and_values_are_tensorboards_and_a_resumed_run_goes_on"),
    ),
    "megatron-muon train --config .../model_config.yaml": (
        "functional/test_train.py",
        "test_a_file_of_megatron_lms_tests_as_it_is",
    ),
}
"""Commands, by their beginning, that another test runs, or the part of them that is theirs."""


@dataclass
class Reader:
    """Someone who types the commands of a page, one after the other.

    Attributes:
        folder: where; a copy of the repository's files.
        ranks: the pool that trains.
        trains: whether trainings run, or only have their settings settled.
    """

    folder: Path
    ranks: Pool
    trains: bool

    def types(self, command: Command) -> str:
        """Try a command; how it was tried."""
        text = command.text
        for beginning, (file, name) in ELSEWHERE.items():
            if text.startswith(beginning):
                assert name in names_of_tests(ROOT / "tests" / file), f"{command}: tests/{file} has no {name}"
                return f"tests/{file}::{name}"
        for beginning, reason in NOT_HERE.items():
            if re.match(beginning, text):
                self.files_exist(text)
                return reason
        for name, stand_in in STAND_INS.items():
            text = text.replace(name, stand_in)
        assert "..." not in text, f"{command}: what stands for the dots? Add it to STAND_INS"
        words = shlex.split(text)
        with contextlib.ExitStack() as stack:
            while re.fullmatch(r"[A-Z_]+=.*", words[0]):
                name, _, value = words.pop(0).partition("=")
                stack.enter_context(environment({name: value}))
            return self.run(words)

    def run(self, words: list[str]) -> str:
        if ">" in words:
            words = words[: words.index(">")]
        program, *rest = words
        if program == "megatron-muon":
            return self.megatron_muon(rest)
        if program == "torchrun":
            return self.torchrun(rest)
        if program == "sbatch":
            return self.sbatch(rest)
        if program == "pip":
            return self.pip(rest)
        if program == "export":
            os.environ.update(word.split("=", 1) for word in rest)  # the page's fixture takes them back
            return "exported"
        if rest[:2] in (["-m", "benchmarks.step"], ["-m", "benchmarks.train"]):
            return self.benchmark(step if rest[1] == "benchmarks.step" else train, rest[2:])
        if program in ("mkdir", "python"):
            command = [sys.executable, *rest] if program == "python" else words
            subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=120)
            for figure in (ROOT / "docs" / "figures").glob("*.svg"):
                drawn = self.folder / "docs" / "figures" / figure.name
                assert drawn.read_bytes() == figure.read_bytes(), f"{figure.name} is not what its script draws"
            return "as it stands"
        raise AssertionError(f"nothing here runs {shlex.join(words)}: add it to ELSEWHERE, NOT_HERE or Reader.run")

    def benchmark(self, module: ModuleType, argv: list[str]) -> str:
        """Parse what takes minutes; tests/functional/test_bench.py runs small ones."""
        parser = CommandParser()
        module.configure(parser)
        parser.add_argument("--json")
        args = parser.parse_args(argv)
        if module is train:
            self.settle(["--config", str(args.config), *shlex.split(args.compare or ""), *args.flags])
        return "parsed"

    def megatron_muon(self, argv: list[str]) -> str:
        """A command of ours, in this process; trainings shortened."""
        if argv[0] in ("submit", "sweep") and not {"--dry-run", "--list-flags"} & set(argv):
            argv.insert(1, "--dry-run")
        if argv[0] == "sweep":  # other seeds differ in a number
            end = argv.index("--") if "--" in argv else len(argv)
            argv = [*argv[:end], "--seeds", "1", "--", *argv[end + 1 :], "--device", "cpu"]
        if argv[0] == "train":
            argv += [*(() if "--" in argv else ("--",)), *SHORT, *(("--micro-batch-size", "3") if self.trains else ())]
            if not self.trains and "--dry-run" not in argv:
                argv.insert(1, "--dry-run")
            if "--nnodes" in argv and "--dry-run" not in argv:
                argv.insert(1, "--dry-run")
            imported = any(word.startswith("imported/") for word in argv)
            if (("--resume" in argv and "--config" not in argv) or imported) and not self.trains:
                ours._build_parser(argv)[0].parse_args(argv)
                return "parsed"  # there is no run, or no import, to go on with
        looks = argv[0] in ("summary", "report", "import") or "--checkpoint" in argv
        if looks and (not self.trains or (argv[0] == "report" and not Path(argv[1]).exists())):  # sweeps are tried dry
            ours._build_parser(argv)[0].parse_args(argv)
            return "parsed"  # there is no run to look at
        self.ours(argv)
        return "dry run" if "--dry-run" in argv else "as it stands"

    def ours(self, argv: list[str]) -> None:
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = ours.main(argv)
        text = output.getvalue() + errors.getvalue()
        assert status == 0, f"megatron-muon {shlex.join(argv)} ended with {status}:\n{text[-4000:]}"
        if argv[0] == "train" and "--dry-run" not in argv:
            assert re.search(r"status 0 after \d*[1-9]\d* iterations", text), text[-4000:]

    def torchrun(self, argv: list[str]) -> str:
        argv = [word for word in argv if word != "--standalone"]  # about torchrun's port
        assert argv[0] == "--nproc-per-node", argv
        ranks, script, flags = int(argv[1]), argv[2], argv[3:]
        assert (ROOT / script).is_file(), script
        if script != "pretrain_gpt.py":
            raise AssertionError(f"nothing here runs {script}")
        if not self.trains:
            self.settle(flags, ranks=ranks)
            return "settled"
        at_once = ("--micro-batch-size", str(48 // ranks))
        run = Trainings(self.ranks, self.folder, ())(*flags, *SHORT, *at_once, ranks=ranks).checked()
        assert run.iterations, run.tail
        return "trained"

    def settle(self, flags: Sequence[str], *, ranks: int = 2) -> None:
        """Check the flags of pretrain_gpt.py as a rank would."""
        (error,) = self.ranks(1, settle_flags, argv=[*flags, *SHORT], ranks=ranks, folder=str(self.folder))
        assert not error, error

    def sbatch(self, argv: list[str]) -> str:
        """What `submit` says of the same flags."""
        script = next(place for place, word in enumerate(argv) if word.endswith("pretrain.sbatch"))
        assert (ROOT / argv[script]).is_file()
        config, *flags = argv[script + 1 :]
        nodes = argv[argv.index("--nodes") + 1] if "--nodes" in argv else "1"
        array = ["--array", os.environ["ARRAY_FLAGS"]] if "ARRAY_FLAGS" in os.environ else []
        self.ours(["submit", "--dry-run", "--config", config, "--nodes", nodes, *array, "--", *flags])
        return "dry run of submit"

    def pip(self, argv: list[str]) -> str:
        extras = [extra for several in re.findall(r"\[(.*?)\]", " ".join(argv)) for extra in several.split(",")]
        setup = (ROOT / "setup.py").read_text("utf-8")
        assert all(f'"{extra}": [' in setup for extra in extras), argv
        return "the extras exist"

    def files_exist(self, text: str) -> None:
        for path in re.findall(r"(?:scripts|tests|configs)/[\w./*]+", text):
            assert list(ROOT.glob(path)), f"{path} does not exist"


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def settle_flags(rank: int, world_size: int, *, argv: list[str], ranks: int, folder: str) -> str:
    """In a worker: what a rank does before it trains; what is wrong with the flags."""
    from megatron_muon.megatron import launch

    sys.modules["__main__"].installed.undo()
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        launch.prepare(argv, writes=False)
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny corpus in the place of the quickstart's, which takes ten seconds to prepare."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture
def reader(
    tmp_path: Path, corpus: Path, ranks: Pool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[bool], Reader]]:
    """A reader in a copy of the repository."""
    for name in ("README.md", "pretrain_gpt.py", "docs", "configs", "scripts", "examples", "megatron_muon"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for name in ("local-nvme", "data"):
        (tmp_path / name).mkdir()
    for file in corpus.glob("tiny.*"):
        for name in ("stdlib", "english"):  # what the quickstart and the study of convergence prepare
            shutil.copy(file, tmp_path / "data" / file.name.replace("tiny", name))
    tasks = re.findall(r"^    (--lr .*)$", (ROOT / "docs/clusters.md").read_text("utf-8"), re.MULTILINE)
    (tmp_path / "rates.txt").write_text("\n".join(tasks) + "\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    cli.start_warm(monkeypatch)
    with environment({}):
        yield lambda trains: Reader(tmp_path, ranks, trains)


@pytest.mark.parametrize(
    ("page", "trains"),
    [
        pytest.param(page, full, marks=[pytest.mark.wide] if full else [], id=f"{page}-{how}")
        for page in pages()
        for full, how in ((False, "settled"), (True, "trained"))
        if commands(page)
    ],
)
def test_a_reader_can_type_every_command(page: str, trains: bool, reader: Callable[[bool], Reader]) -> None:
    types = reader(trains).types
    for command in commands(page):
        try:
            how = types(command)
        except Exception as error:
            raise AssertionError(f"{command}\ndoes not work: {error}") from error
        assert how, command


def test_flags_that_troubleshooting_advises_fit_a_run(reader: Callable[[bool], Reader]) -> None:
    """Those that stand in its sentences, with their values."""
    advised = re.findall(r"`(--[a-z][a-z-]* [a-z0-9_ .-]+)`", (ROOT / "docs/troubleshooting.md").read_text("utf-8"))
    assert "--muon-extra-scale-factor 0.2" in advised
    for flags in set(advised):
        reader(False).settle(["--config", "configs/quickstart.yaml", *shlex.split(flags)])


def test_no_command_is_overlooked() -> None:
    """Nothing that looks like a command stands outside of blocks."""
    found = {page: commands(page) for page in pages()}
    assert sum(map(len, found.values())) > 40
    for page, of_page in found.items():
        lines = (ROOT / page).read_text("utf-8").splitlines()
        looks = {number for number, line in enumerate(lines, 1) if re.match(r"(    )?(megatron-muon|torchrun) ", line)}
        collected = {number for command in of_page for number in range(command.line, command.line + 8)}
        assert looks <= collected, f"{page}: lines {sorted(looks - collected)}"


@pytest.mark.parametrize("entry", [*ELSEWHERE, *STAND_INS, *LEFT_OUT, *sorted(NOT_HERE.keys() - LEFT_OUT.keys())])
def test_no_entry_is_left_over(entry: str) -> None:
    texts = [command.text for page in pages() for command in commands(page)]
    stands = any(entry in text for text in texts) or any(re.match(entry, text) for text in texts)
    assert stands, f"{entry!r} stands in no page any more"


@pytest.mark.parametrize(
    "text",
    [
        "megatron-muon plan --config configs/quickstart.yaml --world-sise 2",
        "megatron-muon train --config configs/quickstart.yaml --set no_such_flag=1 --dry-run",
        "torchrun --nproc-per-node 2 pretrain_gpt.py --config configs/quickstart.yaml --muon-exchnage owner",
        "megatron-muon submit --config configs/none.yaml --nodes 2 --dry-run",
        "torchrun --nproc-per-node 2 pretrain_gpt.py ... --lr 1",
        "bash scripts/quickstart.sh",
    ],
)
def test_a_wrong_command_is_found(text: str, reader: Callable[[bool], Reader]) -> None:
    """A negative control."""
    with pytest.raises(AssertionError):
        reader(False).types(Command("nowhere", 1, text))
    assert PROGRAM.match(text) or text.startswith("bash")
