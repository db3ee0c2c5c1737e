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

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
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
        ("--lr: 1.0e-5", ["--lr", "1.0e-5"]),
        ("--split: 949,50,1", ["--split", "949,50,1"]),
        ("--time: 1:30", ["--time", "1:30"]),  # 90 in YAML 1.1
        ("--bf16: true", ["--bf16"]),
        ("--bf16: True", ["--bf16"]),
        ("--bf16: false", []),
        ("--save: null", []),
        ("--save:", []),
        ("--save: ''", ["--save", ""]),
        ("--answer: no", ["--answer", "no"]),  # false in YAML 1.1
        ("--x: [1, two words, 'kept together']", ["--x", "1", "two", "words", "kept together"]),
        ('--rampup-batch-size: "[384 384 976]"', ["--rampup-batch-size", "384", "384", "976"]),
        ("--moe-layer-freq: ([0]*1+[1]*2)", ["--moe-layer-freq", "([0]*1+[1]*2)"]),
        ("--moe-layer-freq: '[0,1,1]'", ["--moe-layer-freq", "[0,1,1]"]),
        ("--offset: -1", ["--offset=-1"]),
        ("--data-path: ${DATA}/text-$KIND", ["--data-path", "/data/text-code"]),
        (
            "--data-path: [$BLEND, '$BLEND']",
            ["--data-path", "0.5", "a", "0.5", "b", "0.5 a 0.5 b"],
        ),
        ("--note: a$$b$${C}", ["--note", "a$b${C}"]),
    ],
)
def test_a_value_reaches_the_command_line_as_written(load, line, argv):
    config = load(model_args(line), {"DATA": "/data", "KIND": "code", "BLEND": "0.5 a 0.5 b"})
    assert argv_of(config) == argv


# The user's flags win


def test_user_flags_override_the_file(load, parser):
    lines = (
        "--num-layers: 12",
        "--recompute-modules: [a, b]",
        "--rl-skip-bos-token: true",
        "--bf16: true",
    )
    config = load(model_args(*lines))
    argv = merge(
        config, ["--num-layers", "2", "--recompute-modules", "c", "--no-rl-skip-bos-token"]
    )
    args = parser.parse_args(argv)
    assert (args.num_layers, args.recompute_modules, args.rl_skip_bos_token, args.bf16) == (
        2,
        ["c"],
        False,
        True,
    )


@pytest.mark.parametrize(
    "unset", [["--unset", "bf16"], ["--unset", "--bf16"], ["--unset=bf16"], ["--unset=--bf16"]]
)
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


def test_a_file_may_rest_on_others_alone_and_on_one_twice(tree):
    bases = {name: "BASE: model.yaml\n" for name in ("a", "b")}
    folder = tree(model=model_args("--lr: 1"), **bases, run="BASE: [a.yaml, b.yaml]\n")
    assert argv_of(load_config(folder / "run.yaml", {})) == ["--lr", "1"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone", r"none\.yaml', the BASE of .*gone\.yaml: No such file"),
        ("flag", r"bad\.yaml: MODEL_ARGS key 'lr' is not a flag"),
        ("nothing", r"nothing\.yaml: has no MODEL_ARGS"),
        (
            "ring",
            r"back\.yaml: BASE is circular: .*ring\.yaml -> .*back\.yaml -> .*ring",
        ),
    ],
)
def test_slips_about_bases_are_named(tree, name, said):
    folder = tree(
        gone="BASE: none.yaml\n",
        flag="BASE: bad.yaml\n",
        bad=model_args("lr: 1"),
        nothing="BASE: empty.yaml",
        empty="ENV_VARS:\n",
        ring="BASE: back.yaml\n" + model_args("--lr: 1"),
        back="BASE: ring.yaml\n",
    )
    with pytest.raises(UserError, match=said):
        load_config(folder / f"{name}.yaml", {})


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
        (["--zzz: 1"], "--zzz; leave out"),
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
        ("MODEL_ARG:\n  --lr: 1\n", r"run\.yaml: has no MODEL_ARGS"),
        ("- --lr\n", r"run\.yaml: must have MODEL_ARGS"),
        ("", r"run\.yaml: must have MODEL_ARGS"),
        ("MODEL_ARGS: 5\n", r"must have MODEL_ARGS"),
        (
            model_args("lr: 1"),
            r"run\.yaml: MODEL_ARGS key 'lr' is not a flag; write it with two dashes",
        ),
        (
            model_args("--lr: 1", "--bf16: true", "--lr: 2"),
            r"run\.yaml: not valid YAML: '--lr' is given twice",
        ),
        (model_args("--lr: 1") + model_args("--lr: 1"), r"'MODEL_ARGS' is given twice"),
        (model_args("--lr: {a: 1}"), r"run\.yaml: --lr must be a value, or a list of them"),
        (model_args("--lr: [[1]]"), r"--lr must be a value"),
        (
            model_args("--data-path: ${NOWHERE}/x"),
            r"--data-path needs the environment variable NOWHERE.*type export NOWHERE=",
        ),
        (
            model_args("--save: '${OUT:-runs}/x'"),
            r"--save: \$\{OUT:-runs\}/x has an invalid placeholder; write \$\{NAME\}",
        ),
        ("ENV_VARS:\n  A: [1]\n" + model_args("--lr: 1"), r"run\.yaml: A must be a value"),
        ("MODEL_ARGS: [\n", r"run\.yaml: not valid YAML"),
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


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_no_shipped_config_puts_barriers_around_its_timers(path):
    """Megatron has all ranks wait for each other at every timer of level 1 unless it is told not
    to.
    """
    flags = dict(load_config(path).flags)
    assert flags
    assert (
        flags.get("--timing-log-level", ("0",)) == ("0",)
        or "--no-barrier-with-level-1-timing" in flags
    )
    assert path.stem != "quickstart" or "--timing-log-level" in flags  # there is something to test


# Files that come with the package


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_config_that_is_not_here_is_the_one_that_comes_along(empty_folder):
    found = shipped.find(QUICKSTART)
    assert found == shipped.FOLDER / QUICKSTART
    assert str(found) in shipped.note(QUICKSTART)
    assert dict(load_config(QUICKSTART).flags)["--optimizer"] == ("muon",)


def test_a_file_of_ones_own_wins(empty_folder):
    QUICKSTART.parent.mkdir()
    QUICKSTART.write_text("MODEL_ARGS:\n  --optimizer: adam\n")
    assert shipped.find(QUICKSTART) == QUICKSTART
    assert shipped.note(QUICKSTART) == ""
    assert dict(load_config(QUICKSTART).flags)["--optimizer"] == ("adam",)


@pytest.mark.parametrize(
    "name", ["quickstart.yaml", "configs/none.yaml", "configs/../setup.py", "configs", "setup.py"]
)
def test_nothing_else_is_looked_for(empty_folder, name):
    """A name that is wrong stays wrong, and the message names it as it was typed."""
    assert shipped.find(Path(name)) == Path(name)


def test_files_of_an_installed_package_lie_within_it(empty_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    assert shipped.note(QUICKSTART) == ""
    (tmp_path / "shipped/configs").mkdir(parents=True)
    (tmp_path / "shipped" / QUICKSTART).write_text("")
    assert shipped.find(QUICKSTART) == tmp_path / "shipped" / QUICKSTART
