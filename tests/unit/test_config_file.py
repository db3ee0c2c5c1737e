"""Experiment files: what they say reaches argparse as written, every slip is named; those of the
package.
"""

import os
from pathlib import Path

import pytest

from megatron_muon import shipped
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.config_file import (
    as_argv,
    check_flags,
    given_flags,
    load_config,
    merge,
)
from megatron_muon.megatron.prepare import _apply

QUICKSTART = Path("configs/quickstart.yaml")


@pytest.fixture
def load(tmp_path):
    def load_text(text, environ=None):
        path = tmp_path / "run.yaml"
        path.write_text(text, "utf-8")
        return load_config(path, environ or {})

    return load_text


def argv_of(config):
    return list(as_argv(config.flags))


def model_args(*lines):
    return "MODEL_ARGS:\n" + "".join(f"  {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("--num-layers: 12", ["--num-layers", "12"]),
        ("--lr: 1e-4", ["--lr", "1e-4"]),  # PyYAML would make a string of it, and 0.0001 of 1.0e-4
        ("--time: 1:30", ["--time", "1:30"]),  # 90 in YAML 1.1
        ("--bf16: true", ["--bf16"]),
        ("--bf16: false", []),
        ("--save: null", []),
        ("--save: ''", ["--save", ""]),
        ("--answer: no", ["--answer", "no"]),  # false in YAML 1.1
        ("--x: [1, two words]", ["--x", "1", "two words"]),
        ('--rampup-batch-size: "[384 384 976]"', ["--rampup-batch-size", "384", "384", "976"]),
        ("--moe-layer-freq: ([0]*1+[1]*2)", ["--moe-layer-freq", "([0]*1+[1]*2)"]),
        ("--moe-layer-freq: '[0,1,1]'", ["--moe-layer-freq", "[0,1,1]"]),
        ("--offset: -1", ["--offset=-1"]),
        ("--data-path: ${DATA}/text-$KIND", ["--data-path", "/data/text-code"]),
        ("--data-path: '[$BLEND]'", ["--data-path", "0.5", "a", "0.5", "b"]),
        ("--note: a$$b$${C}", ["--note", "a$b${C}"]),
    ],
)
def test_a_value_reaches_the_command_line_as_written(load, line, argv):
    config = load(model_args(line), {"DATA": "/data", "KIND": "code", "BLEND": "0.5 a 0.5 b"})
    assert argv_of(config) == argv


# The user's flags win


@pytest.mark.parametrize("unset", [["--unset", "bf16"], ["--unset=--bf16"]])
def test_unset_takes_a_bare_flag_back(load, parser, unset):
    config = load(model_args("--bf16: true", "--no-rope-fusion: true"))
    argv = merge(config, ["--lr", "1", *unset])
    assert argv == ["--no-rope-fusion", "--lr", "1"]


# Files that rest on others


@pytest.fixture
def tree(tmp_path):
    """Writes files by name and returns their folder."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        return tmp_path

    return write


def test_files_are_merged_key_by_key_and_the_later_wins(tree):
    folder = tree(
        parts__model="ENV_VARS:\n  A: 1\n  B: 1\n"
        + model_args("--num-layers: 12", "--bf16: true", "--lr: 1"),
        parts__muon="BASE: model.yaml\n" + model_args("--lr: 2", "--clip-grad: 1.0"),
        parts__data=model_args("--lr: 3", "--recompute-modules: [a, b]"),
        run="BASE: [parts/muon.yaml, parts/data.yaml]\nENV_VARS:\n  B: 2\n  A: null\n"
        + model_args("--clip-grad: null", "--bf16: false", "--recompute-modules: c"),
    )
    config = load_config(folder / "run.yaml", {})
    assert dict(config.flags) == {
        "--num-layers": ("12",),
        "--lr": ("3",),
        "--recompute-modules": ("c",),
    }
    assert config.env == {"B": "2"}
    assert [path.name for path in config.files] == [
        "model.yaml",
        "muon.yaml",
        "data.yaml",
        "run.yaml",
    ]
    origins = {flag: path.name for flag, path in config.origins.items()}
    assert origins == {
        "--num-layers": "model.yaml",
        "--lr": "data.yaml",
        "--recompute-modules": "run.yaml",
    }


def test_an_overriding_flag_comes_after_its_opposite(tree, parser):
    """On a command line the last of --rl-skip-bos-token and --no-rl-skip-bos-token counts; so it
    does over files.
    """
    on, off = model_args("--rl-skip-bos-token: true"), model_args("--no-rl-skip-bos-token: true")
    folder = tree(base=off, middle="BASE: base.yaml\n" + on, run="BASE: middle.yaml\n" + off)
    assert parser.parse_args(argv_of(load_config(folder / "middle.yaml", {}))).rl_skip_bos_token
    assert not parser.parse_args(argv_of(load_config(folder / "run.yaml", {}))).rl_skip_bos_token


def test_placeholders_matter_where_they_are_used(tree):
    base = model_args("--data-path: ${DATA}/text", "--save: ${SAVE}", "--load: $LOAD")
    folder = tree(base=base, run="BASE: base.yaml\n" + model_args("--data-path: here"))
    config = load_config(
        folder / "run.yaml",
        {},
        overridden=given_flags(["--save=x", "--unset", "load", "--lr", "1"]),
    )
    assert argv_of(config) == ["--data-path", "here"]
    assert merge(config, ["--save=x", "--unset", "load"]) == ["--data-path", "here", "--save=x"]
    with pytest.raises(UserError, match=r"--data-path needs .* variable DATA, which is not set"):
        load_config(folder / "base.yaml", {})


# Flags against a parser


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["--num-layer: 1"], r"--num-layer; did you mean --num-layers\?"),
        (["--lr: 1", "--new-flag: 1", "--newer-flag: true"], "--new-flag, --newer-flag; leave out"),
    ],
)
def test_flags_that_the_parser_does_not_have_are_named(load, parser, lines, said):
    with pytest.raises(UserError, match=rf"run\.yaml: megatron-core 0\.19\S* does not know {said}"):
        check_flags(load(model_args(*lines)), parser._option_string_actions)


# Slips in the file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"run\.yaml: must have MODEL_ARGS"),
        ("MODEL_ARGS: 5\n", "must have MODEL_ARGS"),
        (model_args("--lr: 1", "--lr: 2"), r"run\.yaml: not valid YAML: '--lr' is given twice"),
        (model_args("--lr: {a: 1}"), r"run\.yaml: --lr must be a value, or a list of them"),
        (model_args("--data-path: ${NOWHERE}/x"), "variable NOWHERE.*type export NOWHERE="),
        (model_args("--save: '${OUT:-runs}/x'"), r"--save: \$\{OUT:-runs\}/x: Invalid placeholder"),
        ("MODEL_ARGS: [\n", r"run\.yaml: not valid YAML"),
        ("BASE: none.yaml\n", r"none\.yaml': No such file"),
    ],
)
def test_slips_are_named(load, text, message):
    with pytest.raises(UserError, match=message):
        load(text)


# The environment


def test_the_environment_wins_over_the_file(load, monkeypatch):
    config = load("ENV_VARS:\n  A: ${HOME}/a\n  B: 2\n" + model_args("--lr: 1"), {"HOME": "/home"})
    monkeypatch.setenv("B", "mine")
    monkeypatch.setenv("A", "")
    monkeypatch.delenv("A")
    notes = _apply(config)
    assert (os.environ["A"], os.environ["B"]) == ("/home/a", "mine")
    assert [note.split()[1] for note in notes] == ["from", "wins"]


# Files that come with the package


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_config_that_is_not_here_is_the_one_that_comes_along(empty_folder):
    found = shipped.find(QUICKSTART)
    assert found == shipped.FOLDER / QUICKSTART
    assert str(found) in shipped.note(QUICKSTART)
    assert dict(load_config(QUICKSTART).flags)["--optimizer"] == ("muon",)


@pytest.mark.parametrize("name", ["quickstart.yaml", "configs/none.yaml", "configs/../setup.py"])
def test_nothing_else_is_looked_for(empty_folder, name):
    """A name that is wrong stays wrong, and the message names it as it was typed."""
    assert shipped.find(Path(name)) == Path(name)
