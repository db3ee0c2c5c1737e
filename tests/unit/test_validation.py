"""What megatron-core refuses is told before ranks start, in one line, as Megatron words it."""

import argparse
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron_muon import cpu
from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError
from megatron_muon.megatron import prepare
from megatron_muon.megatron.flags import command_line as arguments
from tests.support.cli import words

MODEL = words(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention"
    " --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2"
    " --global-batch-size 8 --train-iters 2 --lr 0.01 --tokenizer-type NullTokenizer"
    " --vocab-size 256 --eval-iters 0 --mock-data"
)
LAYOUTS = (
    "",
    "--tensor-model-parallel-size 4",
    "--num-experts 4 --expert-model-parallel-size 2 --swiglu",
)
MUON = ("--optimizer", "muon", "--use-megatron-fsdp")
RANKS = 4

CASES = [
    ("--tensor-model-parallel-size 3", "world size (4) is not divisible by"),
    ("--hidden-size 66", "assert args.hidden_size % args.num_attention_heads == 0 (arguments.py:"),
    ("--recompute-granularity full", "recompute"),
]


@pytest.fixture(scope="module")
def parser():
    """The parser, with the CPU in a GPU's place as on any machine without one."""
    if not torch.cuda.is_available():
        cpu.install()
    yield arguments.build_parser()
    cpu.uninstall()


def parsed(parser: arguments.Parser, more: str) -> argparse.Namespace:
    argv = [*MODEL, *MUON, *more.split()]
    return arguments.parse(parser, [*arguments.missing_defaults(parser, argv, device="cpu"), *argv])


def check(parser: arguments.Parser, more: str, **settings: object) -> list[str]:
    return prepare.validate(parsed(parser, more), **{"world_size": RANKS, **settings})


@pytest.mark.parametrize(("more", "fragment"), CASES)
def test_a_refusal_is_one_line_with_its_condition(parser, more, fragment):
    """Each of these passed --dry-run and ended in up to 1,200 lines of tracebacks, one for each
    rank.
    """
    with pytest.raises(UserError) as caught:
        check(parser, more)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", LAYOUTS)
def test_what_trains_is_not_refused(parser, more):
    given = parsed(parser, more)
    before = dict(vars(given))
    assert prepare.validate(given, world_size=RANKS) == []
    assert vars(given) == before
    assert not torch.distributed.is_initialized()


def test_a_package_that_the_other_machine_may_have_is_a_note(parser):
    """Megatron-LM's own gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor was refused for
    nvidia-resiliency-ext.
    """
    more = "--save x --save-interval 1 --async-save --use-persistent-ckpt-worker"
    (note,) = check(parser, more, elsewhere=True)
    assert "nvidia-resiliency-ext" in note
    with pytest.raises(UserError, match="nvidia-resiliency-ext"):
        check(parser, more)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyError("a bug"), r"failed: KeyError: KeyError\(.a bug.\); the traceback is in"),
        (
            CheckpointException("a", {7: (ValueError("a bug"), None)}),
            r"CheckpointException: rank 7: a bug; the trace",
        ),
        (UserError("ours"), r"^ours$"),
    ],
)
def test_what_is_raised_elsewhere_is_no_refusal(tmp_path, monkeypatch, raised, said):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=said), prepare.explained():
        raise raised


class Command:
    """A pickle of it makes a file wherever it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
@pytest.mark.parametrize("where", [".metadata", "args"])
def test_arguments_of_a_checkpoint_are_taken_without_running_it(parser, tmp_path, flag, where):
    """With --use-checkpoint-args, `train --dry-run` ran whatever the checkpoint's pickles named."""
    made, folder = tmp_path / "made-by-the-pickle", tmp_path / "iter_0000001"
    state = {"args": Command(made), "iteration": 1, "checkpoint_version": 3.0}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    if where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Command(made)))
    (tmp_path / folders.TRACKER).write_text("1")
    load = ("--ckpt-format", "fsdp_dtensor", flag, str(tmp_path), "--use-checkpoint-args")
    argv = [*MODEL, *MUON, *load]
    args = arguments.parse(
        parser,
        [*arguments.missing_defaults(parser, argv, device="cpu"), *argv],
    )
    with pytest.raises(
        UserError,
        match=rf"^the checkpoint 1 in {tmp_path} cannot be loaded .*(names|GLOBAL) posix\.mkdir.*$",
    ):
        prepare.validate(args, world_size=RANKS)
    assert not made.exists()
