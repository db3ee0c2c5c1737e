"""What `--set KEY=VALUE` and the flags of a command line mean to the parser of pretrain_gpt.py."""

import json

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.config_file import load_config, pairs
from megatron_muon.tools.train.resolve import Request, _layers, check_gpus, flag_named, set_flag


@pytest.fixture
def actions(parser):
    return parser._option_string_actions


@pytest.mark.parametrize("key", ["muon_lr", "muon-lr", "--muon-lr", "--muon_lr", "MUON_LR"])
def test_every_spelling_of_a_key_is_the_flag(actions, key):
    assert flag_named(key, actions) == "--muon-lr"
    mixed = "--use-checkpoint-opt_param-scheduler"
    assert flag_named("use_checkpoint_opt_param_scheduler", [mixed]) == mixed


def test_an_unknown_key_is_refused_with_the_nearest(actions):
    with pytest.raises(
        UserError, match=r"--set muon_rl: there is no flag --muon-rl; did you mean muon-lr\?"
    ):
        flag_named("muon_rl", actions)
    with pytest.raises(
        UserError, match=r"--set zzz: there is no flag --zzz; see pretrain_gpt.py --help"
    ):
        flag_named("zzz", actions)


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        ("lr", "0.001", ("--lr", ("0.001",))),
        ("seed", "-3", ("--seed", ("-3",))),
        ("bf16", "true", ("--bf16", ())),
        ("bf16", "false", None),
        ("lr", "null", None),
        ("rl_skip_bos_token", "false", ("--no-rl-skip-bos-token", ())),
        ("no_rope_fusion", "false", None),  # it gave the flag
        ("data_path", "0.3 a 0.7 b", ("--data-path", ("0.3", "a", "0.7", "b"))),
        ("brand_new", "null", None),  # Megatron does not know it
    ],
)
def test_a_setting_is_what_would_be_typed(actions, key, value, setting):
    assert set_flag(key, value, actions, in_file=["--brand-new"]) == setting


def test_a_value_for_a_bare_flag_is_refused(actions):
    with pytest.raises(
        UserError, match=r"--set bf16=1: --bf16 takes no value; type bf16=true or bf16=false"
    ):
        set_flag("bf16", "1", actions)


def test_a_command_line_is_read_back_as_pairs(actions):
    found = pairs(["--lr", "1", "--bf16", "--data-path", "a", "b", "--seed=-3"], actions)
    assert found == [
        ("--lr", ("1",)),
        ("--bf16", ()),
        ("--data-path", ("a", "b")),
        ("--seed", ("-3",)),
    ]


def test_more_ranks_than_gpus_are_refused():
    check_gpus(2, 2)
    expected = (
        "3 processes at once on this machine need as many GPUs, and it has 2; give --nproc 2, or"
        " --device cpu"
    )
    with pytest.raises(UserError, match=expected):
        check_gpus(3, 2)


def test_each_layer_wins_over_those_before_it(actions, tmp_path, monkeypatch):
    """File, --set, command line, the run's folder: each flag stands once, with where it comes from."""
    monkeypatch.chdir(tmp_path)
    lines = (
        "--lr: 1",
        "--bf16: true",
        "--no-rl-skip-bos-token: true",
        "--seed: 4",
        "--save: a/checkpoints",
    )
    (tmp_path / "run.yaml").write_text("MODEL_ARGS:\n" + "".join(f"  {line}\n" for line in lines))
    request = Request(
        "run.yaml", sets=(("lr", "3"), ("lr", "2"), ("muon_lr", "5"), ("bf16", "null")), out="b"
    )
    typed = ["--muon-lr", "6", "--rl-skip-bos-token", "--unset", "seed"]
    config = load_config("run.yaml", overridden={*request.overridden, "--seed"})
    flags, folder, _ = _layers(request, config, actions, typed)
    assert [(flag.name, *flag.values, flag.source) for flag in flags.values()] == [
        ("--lr", "2", "--set"),
        ("--muon-lr", "6", "command line"),
        ("--rl-skip-bos-token", "command line"),
        ("--save", "b/checkpoints", "run folder"),
        ("--tensorboard-dir", "b/tensorboard", "run folder"),
    ]
    assert str(folder.root) == "b"


@pytest.mark.parametrize(
    ("out", "places", "note"),
    [
        # The first rank makes the folder of --save at the start: a --load from elsewhere was taken
        # for it.
        ("ft", ["pre/checkpoints", "ft/checkpoints"], ()),
        (
            "copy",
            ["pre/checkpoints", "copy/checkpoints"],
            ("this run was started in ft; it continues with what is in copy",),
        ),
        ("away", ["pre/checkpoints", "scratch/checkpoints"], ()),
    ],
)
def test_a_run_goes_on_in_its_own_places(actions, tmp_path, monkeypatch, out, places, note):
    """--finetune began from random weights; a copy wrote into the original; checkpoints elsewhere
    moved silently.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("pre", "ft", "copy", "away"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    save = "scratch/checkpoints" if out == "away" else "ft/checkpoints"
    (tmp_path / out / "config.yaml").write_text(
        f"MODEL_ARGS:\n  --load: pre/checkpoints\n  --save: {save}\n"
    )
    was = "away" if out == "away" else "ft"
    (tmp_path / out / "run.json").write_text(
        json.dumps({"folder": was, "directory": str(tmp_path)})
    )
    request = Request(f"{out}/config.yaml", out=out, keeps_places=True, resume=True)
    flags, folder, notes = _layers(request, load_config(request.config), actions, [])
    assert [*flags["--load"].values, *flags["--save"].values] == places
    assert (str(folder.checkpoints), tuple(notes)) == (places[1], note)
