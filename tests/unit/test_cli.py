"""The `megatron-muon` command: help, versions, exit codes, one-line errors."""

import re
import subprocess
import sys
import tempfile
import types

import pytest

from megatron_muon import cli
from megatron_muon.errors import ExitStatus, RunFailedError, UserError


def install_command(monkeypatch, run):
    """Registers a subcommand `probe` that runs `run`."""
    module = types.ModuleType("probe")
    module.configure = lambda parser: parser.add_argument("--flag")
    module.run = run
    monkeypatch.setitem(sys.modules, "megatron_muon.tools.probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("probe", "a probe"))


def test_help_is_complete_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom megatron_muon.cli import main\ncode = main(['--help'])\n"
        "heavy = {'torch', 'megatron', 'numpy', 'rich', 'yaml', 'tensorboard'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, command in cli.COMMANDS.items():
        assert re.search(
            rf"^ +{name}  +{re.escape(command.summary)}$",
            done.stdout,
            re.MULTILINE,
        )
    assert all(f"{group}:" in done.stdout for group in cli.GROUPS)
    assert "examples:" in done.stdout
    assert "exit status:" in done.stdout


def test_stdout_may_be_closed(monkeypatch):
    install_command(monkeypatch, lambda args: print("shown to nobody") or 0)
    monkeypatch.setattr(sys, "stdout", None)  # as `>&-` leaves it
    assert cli.main(["probe"]) == ExitStatus.OK


@pytest.mark.parametrize(
    "argv", [["data", "prepare", "--help"], *([name, "--help"] for name in cli.COMMANDS)]
)
def test_every_subcommand_shows_an_example(argv, capsys):
    assert cli.main(argv) == ExitStatus.OK
    assert f"megatron-muon {argv[0]}" in capsys.readouterr().out.split("examples:")[1]


def test_version_names_what_matters(capsys):
    assert cli.main(["--version"]) == ExitStatus.OK
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["megatron-core"].startswith("0.19")
    assert {"megatron-muon", "torch", "emerging-optimizers", "python", "system"} <= set(shown)


@pytest.mark.parametrize(
    "argv", [[], ["no-such-command"], ["data", "prepare"], ["compare"], ["compare", "--nonsense"]]
)
def test_usage_errors_exit_with_2(argv, capsys):
    assert cli.main(argv) == ExitStatus.USAGE
    assert "usage: megatron-muon" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--verison", "unknown flag --verison; did you mean --version?"),
        ("data prepare --inptu a", "unknown flag --inptu; did you mean --input?"),
        ("train --config a.yaml --nporc 2", "unknown flag --nporc; did you mean --nproc?"),
        ("compare a --basline b", "unknown flag --basline; did you mean --baseline?"),
    ],
)
def test_what_is_misspelled_gets_a_suggestion(line, said, capsys):
    assert cli.main(line.split()) == ExitStatus.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["--lr=0.001 --bf16 --moe-layer-freq -1", "--data-path 0.5 a 0.5 b", ""]
)
def test_flags_of_megatron_stand_among_a_commands_own_and_after_dashes(flags):
    for line in (f"{flags} --config a.yaml", f"--config a.yaml -- {flags}"):
        argv = f"train --dry-run {line}".split()
        parsed = cli._build_parser(argv)[0].parse_args(argv)
        assert parsed.flags == flags.split()
        assert str(parsed.config) == "a.yaml"


def test_what_follows_dashes_is_megatrons():
    argv = ["train", "--lr", "1", "--", "--out", "x", "--lr=2"]
    parsed = cli._build_parser(argv)[0].parse_args(argv)
    assert (parsed.out, parsed.flags) == (None, ["--lr", "1", "--out", "x", "--lr=2"])


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (
            UserError("--flag left is wrong; type --flag right"),
            2,
            "error: --flag left is wrong; type --flag right",
        ),
        (RunFailedError("a run failed"), 1, "a run failed"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ModuleNotFoundError("no", name="matplotlib"),
            2,
            "error: a plot needs matplotlib, which is not installed;",
        ),
        (
            OSError(28, "No space left"),
            2,
            "error: OSError: [Errno 28] No space left; the traceback is in",
        ),
    ],
)
def test_what_a_subcommand_raises_is_one_line_and_a_status(
    monkeypatch, capsys, tmp_path, raised, status, said
):
    def run(args):
        raise raised

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "_discard_output", lambda: None)
    install_command(monkeypatch, run)
    assert cli.main(["probe"]) == status
    error = capsys.readouterr().err
    assert error.startswith(f"megatron-muon: {said}")
    assert error.count("\n") == 1


def test_bugs_are_not_dressed_up_as_user_errors(monkeypatch):
    def run(args):
        raise ValueError("a bug")

    install_command(monkeypatch, run)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["probe"])
