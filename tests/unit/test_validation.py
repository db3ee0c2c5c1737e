"""What megatron-core refuses is told before ranks start, in one line, as Megatron words it."""

import argparse
import importlib.util
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron_muon import cpu
from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.megatron import validation
from megatron_muon.megatron.data import tokenizers
from megatron_muon.megatron.flags import arguments

MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "2", "--lr", "0.01"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--eval-iters", "0", "--mock-data"),
)
LAYOUTS = ("", "--tensor-model-parallel-size 4", "--num-experts 4 --expert-model-parallel-size 2 --swiglu")
MUON = ("--optimizer", "muon", "--use-megatron-fsdp")
RANKS = 4

CASES = {
    "ranks and batches": ("--global-batch-size 10", "global_batch_size (10) must be divisible by"),
    "heads": ("--hidden-size 66", "assert args.hidden_size % args.num_attention_heads == 0 (arguments.py:"),
    "groups": ("--num-query-groups 3", "--num-attention-heads 4 is not a multiple of --num-query-groups 3"),
    "heads over TP": (
        "--tensor-model-parallel-size 4 --num-attention-heads 6 --hidden-size 96",
        "num_attention_heads (6) must be a multiple of tensor_model_parallel_size (4)",
    ),
    "MLP over TP": ("--tensor-model-parallel-size 4 --ffn-hidden-size 63", "63 is not divisible by 4"),
    "warm-up": (
        "--lr-warmup-iters 5",
        "assert self.lr_warmup_steps < self.lr_decay_steps (optim",
    ),
    "tokenizer": ("--tokenizer-type HuggingFaceTokenizer", "HuggingFaceTokenizer needs --tokenizer-model"),
    "experts over EP": (
        "--swiglu --num-experts 3 --expert-model-parallel-size 2",
        "Number of experts should be a multiple of expert model parallel_size.: assert args.num_experts % ",
    ),
    "top k": ("--swiglu --num-experts 2 --moe-router-topk 3", "--moe-router-topk 3 is more than --num-experts 2"),
    "fused GELU of experts": ("--num-experts 2", "--num-experts; give --swiglu, or --no-bias-gelu-fusion"),
    "dropout": ("--hidden-dropout 2", "between 0 and 1, but got 2.0"),
    "recomputation": ("--recompute-granularity full", 'if self.recompute_granularity != "selective":'),
}
if importlib.util.find_spec("wget") is None:
    CASES["default tokenizer"] = ("--tokenizer-type GPT2BPETokenizer", "the flags that megatron-muon data prepare")


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


def check(parser: arguments.Parser, more: str, **settings: object) -> argparse.Namespace:
    return validation.check(parsed(parser, more), **{"world_size": RANKS, **settings})


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_is_one_line_with_its_condition(parser, name):
    """Each of these passed --dry-run and ended in up to 1,200 lines of tracebacks, one for each rank."""
    more, fragment = CASES[name]
    with pytest.raises(UserError) as caught:
        check(parser, more)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", LAYOUTS)
def test_what_trains_is_not_refused(parser, more):
    given = parsed(parser, more)
    before = dict(vars(given))
    assert check(parser, more).padded_vocab_size >= 256
    validation.check(given, world_size=RANKS)
    assert vars(given) == before
    assert not torch.distributed.is_initialized()


def test_the_number_of_ranks_counts(parser):
    with pytest.raises(UserError, match=r"global_batch_size \(8\) must be divisible by .*data_parallel_size \(3\)"):
        check(parser, "", world_size=3)


def test_the_model_is_built_without_memory(parser):
    """An 8B model in fp32 would not fit most machines on which a cluster's configuration is checked."""
    sizes = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8"
    check(parser, f"{sizes} --vocab-size 128256 --swiglu")
    with pytest.raises(UserError, match="14335 is not divisible by 2"):
        check(parser, f"{sizes} --vocab-size 128256 --ffn-hidden-size 14335 --tensor-model-parallel-size 2")


def test_a_model_on_paper_leaves_no_streams_to_the_one_that_trains(parser, monkeypatch):
    """Local experts copied token counts on a stream of GPU 0, on all ranks, and waited for another."""

    def streams():
        return {
            (owner, name): value
            for module, content in list(sys.modules.items())
            if module.startswith("megatron.core")
            for owner in vars(content).values()
            if isinstance(owner, type)
            for name, value in vars(owner).items()
            if "stream" in name and not callable(value)
        }

    check(parser, LAYOUTS[-1])  # so that the modules are there
    before = dict.fromkeys(streams())
    assert {owner.__name__ for owner, _ in before} >= {"MoEAlltoAllTokenDispatcher", "SharedExpertMLP"}
    for owner, name in before:
        monkeypatch.setattr(owner, name, None)
    shared = "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap --disable-bias-linear"
    check(parser, f"{LAYOUTS[-1]} --moe-token-dispatcher-type alltoall {shared}")
    assert streams() == before


def test_elsewhere_no_hub_is_asked_for_a_tokenizer(parser, monkeypatch):
    """One that does not answer is waited for a minute; and package and files may be there."""
    asked = []
    monkeypatch.setattr(tokenizers, "build_megatron", asked.append)
    hub = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model no/such-model"
    check(parser, hub, elsewhere=[])
    assert asked == []
    check(parser, hub)
    assert len(asked) == 1


def test_the_vocabulary_of_ids_is_padded_as_megatron_does(parser):
    """Its tokenizer of ids is not built, as it takes the import of transformers, some two seconds."""
    more = "--vocab-size 300 --tensor-model-parallel-size 4"
    args = parsed(parser, more)
    args.rank, args.world_size = 0, RANKS
    tokenizers.build_megatron(args)
    assert check(parser, more).padded_vocab_size == args.padded_vocab_size == 512


NVRX = "--ckpt-format fsdp_dtensor --save somewhere --save-interval 1 --async-save --use-persistent-ckpt-worker"


def test_a_package_that_the_other_machine_may_have_is_a_note(parser):
    """Megatron-LM's own gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor was refused for nvidia-resiliency-ext."""
    local = "--non-persistent-ckpt-type local --non-persistent-save-interval 1 --non-persistent-local-ckpt-dir x"
    for more, package in ((NVRX, "nvidia-resiliency-ext"), (local, "nvidia_resiliency_ext")):
        notes: list[str] = []
        check(parser, more, elsewhere=notes)
        assert [package in note for note in notes] == [True]
        with pytest.raises(UserError, match=package):
            check(parser, more)


def test_settings_that_do_not_fit_are_refused_elsewhere_too(parser):
    notes: list[str] = []
    with pytest.raises(UserError, match=r"max_position_embeddings \(32\)"):
        check(parser, "--seq-length 64", elsewhere=notes)
    assert notes == []


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyError("a bug"), r"settings: KeyError: 'a bug'$"),
        (CheckpointException("a", {7: (ValueError("a bug"), None)}), r"CheckpointException: rank 7: a bug$"),
        (UserError("ours"), r"^ours$"),
    ],
)
def test_what_is_raised_elsewhere_keeps_its_words(raised, said):
    with pytest.raises(UserError, match=said), validation.explained():
        raise raised


class Command:
    """A pickle of it makes a file wherever it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("optimizer", [MUON, ("--optimizer", "adam")])
@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
@pytest.mark.parametrize("where", [".metadata", "args"])
def test_arguments_of_a_checkpoint_are_taken_without_running_it(parser, tmp_path, optimizer, flag, where):
    """With --use-checkpoint-args, `train --dry-run` ran whatever the checkpoint's pickles named."""
    made, folder = tmp_path / "made-by-the-pickle", tmp_path / "iter_0000001"
    state = {"args": Command(made), "iteration": 1, "checkpoint_version": 3.0}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    if where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Command(made)))
    (tmp_path / files.TRACKER).write_text("1")
    argv = [*MODEL, *optimizer, "--ckpt-format", "fsdp_dtensor", flag, str(tmp_path), "--use-checkpoint-args"]
    args = arguments.parse(parser, [*arguments.missing_defaults(parser, argv, device="cpu"), *argv])
    with pytest.raises(
        UserError, match=rf"the checkpoint 1 in {tmp_path} cannot be loaded .*names posix\.mkdir"
    ) as raised:
        validation.check(args, world_size=RANKS)
    assert "\n" not in str(raised.value)
    assert not made.exists()
