"""The layers of a run's settings: its file, the command line and its folder."""

import json

import pytest

from megatron_muon.megatron.flags.config_file import load_config, pairs
from megatron_muon.tools.train.resolve import Request, _layers


@pytest.fixture
def layers(parser, tmp_path, monkeypatch):
    """Resolves a request whose file has these lines."""
    monkeypatch.chdir(tmp_path)

    def resolve(lines, config="run.yaml", **request):
        (tmp_path / config).parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"  {line}\n" for line in lines)
        (tmp_path / config).write_text(f"MODEL_ARGS:\n{text}")
        asked = Request(config, **request)
        read = load_config(config, overridden=asked.overridden)
        return _layers(asked, read, parser._option_string_actions, asked.flags)

    return resolve


def test_a_command_line_is_read_back_as_pairs(parser):
    line = ["--lr", "1", "--bf16", "--data-path", "a", "b", "--seed=-3"]
    expected = [
        ("--lr", ("1",)),
        ("--bf16", ()),
        ("--data-path", ("a", "b")),
        ("--seed", ("-3",)),
    ]
    assert pairs(line, parser._option_string_actions) == expected


def test_each_layer_wins_over_those_before_it(layers):
    """Each flag appears once, with its source; its `--no-` twin is the same setting."""
    lines = ["--lr: 1", "--no-rl-skip-bos-token: true", "--seed: 4", "--save: a/checkpoints"]
    typed = ("--muon-lr", "6", "--rl-skip-bos-token", "--unset", "seed")
    flags, folder, _ = layers(lines, flags=typed, out="b", saves=True)
    assert [(flag.name, *flag.values, flag.source) for flag in flags.values()] == [
        ("--lr", "1", "run.yaml"),
        ("--muon-lr", "6", "command line"),
        ("--rl-skip-bos-token", "command line"),
        ("--save", "b/checkpoints", "run folder"),
        ("--tensorboard-dir", "b/tensorboard", "run folder"),
        ("--exit-signal-handler", "run folder"),
    ]
    assert str(folder.root) == "b"


@pytest.mark.parametrize(
    ("request_", "added"),
    [
        (
            {},
            {"--save": ("x/checkpoints",), "--save-interval": ("9",), "--exit-signal-handler": ()},
        ),
        ({"saves": False}, {}),
        ({"flags": ("--unset", "save")}, {}),
    ],
)
def test_a_run_saves_at_its_end_unless_it_must_not(layers, request_, added):
    """A training lost all of its work at its end, or by Ctrl-C, without a word."""
    flags, folder, _ = layers(["--train-iters: 9"], out="x", **request_)
    found = {name: flag.values for name, flag in flags.items() if flag.source == "run folder"}
    assert found.pop("--tensorboard-dir") == ("x/tensorboard",)
    assert found == added
    assert (folder.checkpoints is not None) == bool(added)


@pytest.mark.parametrize(
    ("out", "save", "expected"),
    [
        # The first rank makes the folder of --save at the start: it was taken for the --load.
        ("ft", "ft/checkpoints", "ft/checkpoints"),
        ("copy", "ft/checkpoints", "copy/checkpoints"),
        ("away", "scratch/checkpoints", "scratch/checkpoints"),
    ],
)
def test_a_run_continues_in_its_own_places(layers, tmp_path, out, save, expected):
    """--finetune began from random weights; a copy wrote into the original."""
    lines = ["--load: pre/checkpoints", f"--save: {save}"]
    (tmp_path / out).mkdir()
    (tmp_path / out / "run.json").write_text(json.dumps({"folder": "ft"}))
    flags, folder, _ = layers(lines, config=f"{out}/config.yaml", out=out, resume=True)
    assert flags["--load"].values == ("pre/checkpoints",)
    assert flags["--save"].values == (str(folder.checkpoints),) == (expected,)
