"""One node of a cluster's run: the flags of a requeued run, the rendezvous, and the exit status."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError
from megatron_muon.megatron import STATUS_FOLDER
from megatron_muon.tools.train import node

BEGIN = [
    "--load",
    "pretrained",
    "--finetune",
    "--ckpt-step",
    "7",
    "--no-load-optim",
    "--no-load-rng",
]
GO_ON = ["--load", "ck", "--exit-signal-handler"]  # the last --load counts
CONFIG = ["--config", "run.yaml", "--seed", "3"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Where the run of run.yaml has saved iteration 40 in ck."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / folders.TRACKER).write_text("40")
    (tmp_path / "run.yaml").write_text(
        "MODEL_ARGS:\n  --save: ck\n  --finetune: true\n  --load: pretrained\n"
    )


@pytest.mark.parametrize(
    ("flags", "found", "said"),
    [
        (
            ["--save", "new", *BEGIN],
            ["--save", "new", *BEGIN, "--exit-signal-handler"],
            "no checkpoint in new yet",
        ),
        (
            ["--lr", "-1", *BEGIN, "--save", "ck", "--ckpt-step=8"],
            ["--lr", "-1", "--load", "pretrained", "--save", "ck", *GO_ON],
            "going on from ck, iteration 40",
        ),
        # Flags of the file that only a first start needs are taken back; the user's --save wins
        # over the file's.
        (CONFIG, [*CONFIG, "--unset", "--finetune", *GO_ON], "going on from ck, iteration 40"),
        (
            [*CONFIG, "--save", "new"],
            [*CONFIG, "--save", "new", "--exit-signal-handler"],
            "a first start",
        ),
    ],
)
def test_a_requeued_run_goes_on_from_its_own_checkpoint(capsys, flags, found, said):
    """With --finetune or --ckpt-step once more it would begin again, and lose what it had
    trained.
    """
    assert node.requeueable(flags) == found
    assert said in capsys.readouterr().out


def test_a_step_of_its_own_is_refused_and_not_dropped_but_at_a_requeue(tmp_path, monkeypatch):
    """With checkpoints 500 and 1000 `--ckpt-step 500` went on from 1000 without a word."""
    typed = ["--save", "ck", "--ckpt-step", "30"]
    with pytest.raises(UserError, match="to go back, start another run"):
        node.requeueable(typed)
    (tmp_path / "run.yaml").write_text("MODEL_ARGS:\n  --load: pretrained\n")
    assert node.requeueable([*CONFIG, *typed])[-4:] == [
        "ck",
        *GO_ON,
    ], "a step of what the first start began from"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert node.requeueable(typed) == ["--save", "ck", *GO_ON]


@pytest.mark.parametrize("flags", [["--seed", "3"], [*CONFIG, "--unset", "save"]])
def test_a_run_that_could_not_be_resumed_is_refused(flags):
    with pytest.raises(
        UserError, match="no --save, so the run could not be resumed; add --save DIR"
    ):
        node.requeueable(flags)


@pytest.mark.parametrize(
    ("environ", "conf", "address"),
    [
        (
            {"SLURM_NODEID": "0", "SLURMD_NODENAME": "localhost"},
            "timeout=90,is_host=True",
            "localhost",
        ),
        (
            {"SLURM_NODEID": "3", "SLURMD_NODENAME": "localhost"},
            "timeout=90,is_host=False",
            "localhost",
        ),
        ({}, "timeout=90", None),  # without SLURM
        ({"SLURMD_NODENAME": "no-such-host.invalid"}, "timeout=90", None),
    ],
)
def test_the_first_node_holds_the_rendezvous_under_a_name_that_resolves(environ, conf, address):
    args = argparse.Namespace(
        rdzv_backend="c10d", rdzv_conf="timeout=90", local_addr=None, nproc_per_node="8"
    )
    node.set_options(args, environ)
    assert (args.rdzv_conf, args.local_addr, args.nproc_per_node) == (conf, address, "8")


TERM, KILL = -int(signal.SIGTERM), -int(signal.SIGKILL)


@pytest.mark.parametrize(
    ("codes", "requeued", "expected"),
    [
        ([75, 75], True, 75),
        ([75], False, 75),  # the signal came to workers of another node
        ([75, 1], True, 75),  # the checkpoint was complete before any of them ended
        ([TERM, TERM], True, 75),  # before training had begun
        ([TERM, KILL], True, 75),  # the second waited for the first
        ([TERM, TERM], False, 1),  # nobody asked, or nobody puts it back into a queue
        ([TERM, 1], True, 1),
        ([2, 2], False, 2),
        ([KILL], True, 1),  # out of memory
        ([1, 2], False, 1),
    ],
)
def test_the_status_is_the_workers(codes, requeued, expected):
    """torchrun's own is 1 in all of these."""
    failures = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}
    assert node.status(SimpleNamespace(failures=failures), is_requeued=requeued) == expected


@pytest.mark.parametrize(("of_rank", "expected"), [(75, 75), (1, 1)])
def test_a_node_that_outlives_the_first_ends_as_its_ranks_did(monkeypatch, of_rank, expected):
    """A pod whose rank had saved failed the job, because the pod with the rendezvous was gone
    before it.
    """

    def run(args):
        Path(os.environ[STATUS_FOLDER], "0.json").write_text(json.dumps({"status": of_rank}))
        raise RendezvousConnectionError("gone")

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)
    with mock.patch.dict(os.environ):
        os.environ.pop(STATUS_FOLDER, None)
        assert node.main(["--nproc-per-node", "1", "pretrain_gpt.py", "--save", "ck"]) == expected
        assert not Path(os.environ[STATUS_FOLDER]).exists()


def test_sigterm_ends_a_node_that_is_still_importing(tmp_path):
    """An import passed over the exception that was to end it, and the run went on training."""
    (tmp_path / "made").mkdir()
    code = "from megatron_muon.tools.train import node\nnode._own_status_folder = 'made'\n"
    code += "try: node._forward(15, None)\nexcept SystemExit: print('lost')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, (tmp_path / "made").exists()) == (75, "", False)
    assert "node: start 1 ended by SIGTERM" in done.stderr
