"""Names of flags: mistakes are answered without Megatron, in the words that it has, with the
nearest name or none.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_muon.megatron.flags import flag_names as names
from megatron_muon.megatron.flags.command_line import Parser

MISTAKES = [
    (
        ("train", "--config", "nope.yaml"),
        "cannot read configuration 'nope.yaml': No such file or directory",
    ),
    (
        ("train", "--config", "a.yaml", "--num-layres", "2"),
        "unknown flag --num-layres; did you mean --num-layers?",
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.yaml").write_text("MODEL_ARGS:\n  --num-layers: 2\n")
    return tmp_path


@pytest.mark.parametrize(("argv", "said"), MISTAKES)
def test_a_mistake_is_answered_without_megatron(
    folder: Path, parser: Parser, argv: tuple[str, ...], said: str
) -> None:
    names.keep(parser._option_string_actions)
    code = (
        "import sys\nfrom megatron_muon.cli import main\nfrom megatron_muon.tools.train import"
        f" resolve\nstatus = main({argv!r})\nsys.exit('torch' in sys.modules or status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_names_of_another_state_are_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names.kept() == frozenset()
    names.keep(["--b", "--a"])
    assert names.kept() == {"--a", "--b"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another")
    assert names.kept() == frozenset()
    names._file().write_text("no JSON")
    assert names.kept() == frozenset()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        # a slip of the fingers
        ("--hidden-sise", "--hidden-size"),
        ("--num-layres", "--num-layers"),
        ("--Weight_Decay", "--weight-decay"),
        # the words in another form or order, or one missing
        ("--sequence-length", "--seq-length"),
        ("--warmup-fraction", "--lr-warmup-fraction"),
        # no suggestion is better than a wrong one
        *((f"--{typed}", None) for typed in ("num-gpus", "epochs", "lr-schedule", "save-path")),
    ],
)
def test_the_flag_that_was_meant(parser: Parser, typed: str, meant: str | None) -> None:
    assert names.nearest(typed, parser._option_string_actions) == meant
    assert names.did_you_mean(typed, parser._option_string_actions) == (
        f"; did you mean {meant}?" if meant else ""
    )
