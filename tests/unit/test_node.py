"""One node of a cluster's run: added flags, the rendezvous, and the exit status."""

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

from megatron_muon.megatron import REPORTS, STATUS_FOLDER
from megatron_muon.tools.train import node


@pytest.mark.parametrize(
    ("node_id", "name", "conf", "address"),
    [
        ("0", "localhost", "timeout=90,is_host=True", "localhost"),
        ("3", "localhost", "timeout=90,is_host=False", "localhost"),
        ("0", "no-such-host.invalid", "timeout=90,is_host=True", None),
        (None, None, "timeout=90", None),  # without SLURM
    ],
)
def test_the_first_node_holds_the_rendezvous_under_a_name_that_resolves(
    node_id, name, conf, address
):
    args = argparse.Namespace(rdzv_backend="c10d", rdzv_conf="timeout=90", local_addr=None)
    environ = {"SLURM_NODEID": node_id, "SLURMD_NODENAME": name} if name else {}
    node.set_options(args, environ)
    assert (args.rdzv_conf, args.local_addr) == (conf, address)


TERM, KILL = -int(signal.SIGTERM), -int(signal.SIGKILL)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75], 75),  # the signal came to workers of another node
        ([75, 1], 75),  # the checkpoint was complete before any of them ended
        ([TERM, TERM], 143),  # before training had begun
        ([TERM, KILL], 143),  # the second waited for the first
        ([TERM, 1], 1),
        ([2, TERM], 2),  # torchrun ended the second
        ([KILL], 1),  # out of memory
        ([1, 2], 1),
    ],
)
def test_the_status_is_the_workers(codes, expected):
    """torchrun's own is 1 in all of these."""
    failures = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}
    assert node.status(SimpleNamespace(failures=failures)) == expected


@pytest.mark.parametrize(
    ("of_rank", "expected"),
    [(75, 75), (1, 1)],
)
def test_a_node_that_outlives_the_first_ends_as_its_ranks_did(monkeypatch, of_rank, expected):
    """A pod whose rank had saved failed the job, because the pod with the rendezvous was gone
    before it.
    """
    started = []

    def run(args):
        started.append(args.training_script_args)
        Path(os.environ[STATUS_FOLDER], "0.json").write_text(json.dumps({"status": of_rank}))
        raise RendezvousConnectionError("gone")

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)
    with mock.patch.dict(os.environ):
        os.environ.pop(REPORTS, None)
        assert node.main(["--nproc-per-node", "1", "pretrain_gpt.py", "--save", "ck"]) == expected
        assert not Path(os.environ[STATUS_FOLDER]).exists()
    assert started == [["--save", "ck", "--resume", "--exit-signal-handler"]]


def test_sigterm_ends_a_node_that_is_still_importing():
    """An import passed over the exception that was to end it, and the run went on training."""
    code = "from megatron_muon.tools.train import node\n"
    code += "try: node._forward(15, None)\nexcept SystemExit: print('lost')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (143, "")
    assert "node: start 1 ended by SIGTERM" in done.stderr
