"""What `--set KEY=VALUE` and the flags of a command line mean to the parser of pretrain_gpt.py."""

import argparse
import types

import pytest
import torch

from megatron_muon.errors import UserError
from megatron_muon.megatron import launch
from megatron_muon.megatron.flags.config_file import pairs
from megatron_muon.tools.train.resolve import Request, flag_named, set_flag, settle


@pytest.fixture
def actions():
    """Flags of each kind that Megatron has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("--muon-lr", type=float)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--use-checkpoint-opt_param-scheduler", action="store_true")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="rope_fusion")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction)
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--offset", type=int)
    return parser._option_string_actions


@pytest.mark.parametrize("key", ["muon_lr", "muon-lr", "--muon-lr", "--muon_lr", "MUON_LR"])
def test_every_spelling_of_a_key_is_the_flag(actions, key):
    assert flag_named(key, actions) == "--muon-lr"
    assert flag_named("use_checkpoint_opt_param_scheduler", actions) == "--use-checkpoint-opt_param-scheduler"


def test_an_unknown_key_is_refused_with_the_nearest(actions):
    with pytest.raises(UserError, match=r"--set muon_rl: there is no flag --muon-rl; did you mean muon-lr\?"):
        flag_named("muon_rl", actions)
    with pytest.raises(UserError, match=r"--set zzz: there is no flag --zzz; see pretrain_gpt.py --help"):
        flag_named("zzz", actions)


@pytest.mark.parametrize(
    ("key", "value", "argv"),
    [
        ("lr", "0.001", ["--lr", "0.001"]),
        ("offset", "-3", ["--offset=-3"]),
        ("bf16", "true", ["--bf16"]),
        ("bf16", "false", ["--unset", "--bf16"]),
        ("lr", "null", ["--unset", "--lr"]),
        ("offset", "null", []),  # the file has none
        ("overlap", "false", ["--no-overlap"]),
        ("no_rope_fusion", "false", []),  # it gave the flag
        ("data_path", "0.3 a 0.7 b", ["--data-path", "0.3", "a", "0.7", "b"]),
        ("brand_new", "null", ["--unset", "--brand-new"]),  # Megatron does not know it
    ],
)
def test_a_setting_is_what_would_be_typed(actions, key, value, argv):
    assert set_flag(key, value, actions, in_file=["--lr", "--bf16", "--overlap", "--brand-new"]) == argv


def test_a_value_for_a_bare_flag_is_refused(actions):
    with pytest.raises(UserError, match=r"--set bf16=1: --bf16 takes no value; type bf16=true or bf16=false"):
        set_flag("bf16", "1", actions, in_file=[])


def test_a_command_line_is_read_back_as_pairs(actions):
    argv = ["--lr", "1", "--bf16", "--data-path", "a", "b", "--offset=-3"]
    assert pairs(argv, actions) == [
        ("--lr", ("1",)),
        ("--bf16", ()),
        ("--data-path", ("a", "b")),
        ("--offset", ("-3",)),
    ]


@pytest.mark.parametrize(("ranks", "writes", "is_refused"), [(3, True, True), (2, True, False), (3, False, False)])
def test_more_ranks_than_gpus_are_refused_where_a_run_starts(monkeypatch, ranks, writes, is_refused):
    class SettledError(Exception):
        """The launch is settled: this machine has no GPU on which its flags could be checked."""

    class Launch(types.SimpleNamespace):
        @property
        def config(self):
            raise SettledError

    monkeypatch.setattr(launch, "prepare", lambda *_, **__: Launch(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    expected = "3 processes at once on this machine need as many GPUs, and it has 2; give --nproc 2, or --device cpu"
    with pytest.raises(UserError if is_refused else SettledError, match=expected if is_refused else ""):
        settle(Request(config="tiny.yaml", ranks=ranks, writes=writes))
