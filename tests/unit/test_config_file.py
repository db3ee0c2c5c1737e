"""Experiment files: what they say reaches argparse as written, and every slip is named."""

import argparse
from pathlib import Path

import pytest

from megatron_muon.errors import UserError
from megatron_muon.mcore.config_file import AppliedEnv, apply_env, check_flags, load_config, merge

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def load(tmp_path):
    def load_text(text, environ=None):
        path = tmp_path / "run.yaml"
        path.write_text(text, "utf-8")
        return load_config(path, environ or {})

    return load_text


@pytest.fixture
def parser():
    """A few flags of each kind that Megatron has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="rope_fusion")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction)
    parser.add_argument("--recompute-modules", nargs="*")
    parser.add_argument("--rampup-batch-size", nargs="*")
    parser.add_argument("--moe-layer-freq")
    parser.add_argument("--offset", type=int)
    return parser


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
    ],
)
def test_a_value_reaches_the_command_line_as_written(load, line, argv):
    config = load(model_args(line), {"DATA": "/data", "KIND": "code"})
    assert list(config.argv) == argv


def test_a_file_of_upstreams_form_loads(load, parser):
    config = load(
        """
        # a comment
        ENV_VARS:
          NCCL_ALGO: Ring
          CUBLAS_WORKSPACE_CONFIG: :4096:8
          NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0
        MODEL_ARGS:
          --num-layers: 12
          --lr: 1.0e-5
          --bf16: true
          --recompute-modules: "[layernorm moe_act]"
        MODEL_ARGS_2:
          --num-layers: 14
        TEST_TYPE: ckpt-resume
        METRICS:
          - "lm loss"
        """
    )
    assert config.env == {
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    assert config.ignored == ("MODEL_ARGS_2", "TEST_TYPE", "METRICS")
    check_flags(config, parser)
    args = parser.parse_args(config.argv)
    assert (args.num_layers, args.lr, args.bf16) == (12, 1e-5, True)
    assert args.recompute_modules == ["layernorm", "moe_act"]


# The user's flags win


def test_user_flags_override_the_file(load, parser):
    config = load(model_args("--num-layers: 12", "--recompute-modules: [a, b]", "--overlap: true", "--bf16: true"))
    argv = merge(config, ["--num-layers", "2", "--recompute-modules", "c", "--no-overlap"])
    args = parser.parse_args(argv)
    assert (args.num_layers, args.recompute_modules, args.overlap, args.bf16) == (2, ["c"], False, True)


@pytest.mark.parametrize("unset", [["--unset", "bf16"], ["--unset", "--bf16"], ["--unset=bf16"], ["--unset=--bf16"]])
def test_unset_takes_a_bare_flag_back(load, parser, unset):
    config = load(model_args("--bf16: true", "--no-rope-fusion: true"))
    argv = merge(config, ["--lr", "1", *unset])
    assert argv == ["--no-rope-fusion", "--lr", "1"]


def test_unset_of_what_the_file_does_not_set_is_refused(load):
    config = load(model_args("--bf16: true"))
    with pytest.raises(UserError, match=r"--unset bf61: .*run\.yaml does not set --bf61; did you mean --bf16\?"):
        merge(config, ["--unset", "bf61"])
    with pytest.raises(UserError, match="--unset"):
        merge(config, ["--unset"])


# Flags against a parser


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-layer: 12", r"run\.yaml: unknown flag --num-layer; did you mean --num-layers\?"),
        ("--zzz: 1", r"run\.yaml: unknown flag --zzz$"),
        ("--bf16: 1", r"--bf16 takes no value, found '1'; write '--bf16: true'"),
        ("--num-layers: true", r"--num-layers needs a value"),
    ],
)
def test_flags_that_the_parser_would_refuse_are_named(load, parser, line, message):
    with pytest.raises(UserError, match=message):
        check_flags(load(model_args(line)), parser)


# Slips in the file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MODEL_ARG:\n  --lr: 1\n", r"run\.yaml:2: unknown key 'MODEL_ARG'; did you mean MODEL_ARGS\?"),
        ("trainer: 1\n", r"unknown key 'trainer'; a file holds ENV_VARS and MODEL_ARGS"),
        ("- --lr\n", r"run\.yaml: the file must be a mapping"),
        ("", r"the file must be a mapping"),
        ("MODEL_ARGS: 5\n", r"MODEL_ARGS must be a mapping"),
        ("ENV_VARS:\n  A: b\n", r"has no MODEL_ARGS"),
        (model_args("lr: 1"), r"run\.yaml:2: MODEL_ARGS key 'lr' is no flag; write '--lr:'"),
        (model_args("-lr: 1"), r"write '--lr:'"),
        (model_args("--lr: 1", "--bf16: true", "--lr: 2"), r"run\.yaml:4: '--lr' is given twice"),
        (model_args("--lr: 1") + model_args("--lr: 1"), r"run\.yaml:3: 'MODEL_ARGS' is given twice"),
        (model_args("--lr: {a: 1}"), r"--lr must be a value or a list"),
        (model_args("--lr: [[1]]"), r"--lr holds a list or mapping within its list"),
        (
            model_args("--data-path: ${NOWHERE}/x"),
            r"run\.yaml:2: --data-path needs the environment variable NOWHERE",
        ),
        (model_args("--data-path: ${A:-b}"), r"\$\{A:-b\} is no placeholder"),
        ("ENV_VARS:\n  A: [1]\n" + model_args("--lr: 1"), r"ENV_VARS A must be a string or a number"),
        ("ENV_VARS:\n  A B: 1\n" + model_args("--lr: 1"), r"'A B' is no name of an environment variable"),
        ("MODEL_ARGS: [\n", r"run\.yaml: not valid YAML"),
    ],
)
def test_slips_are_named(load, text, message):
    with pytest.raises(UserError, match=message):
        load(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read configuration .*none\.yaml': No such file"):
        load_config(tmp_path / "none.yaml")


# The environment


def test_the_environment_wins_over_the_file(load):
    config = load("ENV_VARS:\n  A: ${HOME}/a\n  B: 2\n" + model_args("--lr: 1"), {"HOME": "/home"})
    environ = {"B": "mine"}
    assert apply_env(config, environ) == AppliedEnv(applied={"A": "/home/a"}, kept={"B": "mine"})
    assert environ == {"A": "/home/a", "B": "mine"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_our_own_files_load(path):
    assert load_config(path).argv
