"""One node of a cluster's run: the flags of a requeued run, the rendezvous, and the exit status."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.tools.train import node


def checkpoint(folder: Path, iteration: int = 40) -> None:
    """What `latest` needs to see of one."""
    folder.mkdir(parents=True)
    (folder / files.TRACKER).write_text(str(iteration))


def test_a_first_start_begins_as_it_was_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--save", "ck", "--load", "pretrained", "--finetune", "--ckpt-step", "7"]
    assert node.requeueable(flags) == [*flags, "--exit-signal-handler"]
    assert "no checkpoint in ck yet" in capsys.readouterr().out


def test_a_requeued_run_goes_on_from_its_own_checkpoint(tmp_path, monkeypatch, capsys):
    """With --finetune or --ckpt-step once more it would begin again, and lose what it had trained."""
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "ck")
    begin = ["--load", "pretrained", "--finetune", "--ckpt-step", "7", "--no-load-optim", "--no-load-rng"]
    found = node.requeueable(["--lr", "-1", *begin, "--save", "ck", "--ckpt-step=8", "--seed", "3"])
    assert found == [
        *("--lr", "-1", "--load", "pretrained", "--save", "ck", "--seed", "3"),
        *("--load", "ck", "--exit-signal-handler"),  # the last --load counts
    ]
    assert "going on from ck, iteration 40" in capsys.readouterr().out


def test_a_ckpt_step_of_the_runs_own_holds_for_one_start(tmp_path, monkeypatch, capsys):
    """It goes back to an earlier checkpoint; a requeue must not do so again."""
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "ck")
    flags = ["--save", "ck", "--ckpt-step", "30"]
    assert node.requeueable(flags) == [*flags, "--load", "ck", "--exit-signal-handler"]
    assert "going on from ck, the iteration of --ckpt-step" in capsys.readouterr().out
    again = node.requeueable(flags, restarts=1)
    assert again == ["--save", "ck", "--load", "ck", "--exit-signal-handler"]


def test_flags_of_the_file_count_too(tmp_path, monkeypatch):
    """Those that only a first start needs are taken back; the user's --save wins over the file's."""
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "ck")
    Path("run.yaml").write_text("MODEL_ARGS:\n  --save: ck\n  --finetune: true\n  --load: pretrained\n")
    flags = ["--config", "run.yaml", "--seed", "3"]
    unset = ["--unset", "--finetune", "--load", "ck", "--exit-signal-handler"]
    assert node.requeueable(flags) == [*flags, *unset]
    assert node.requeueable([*flags, "--save", "new"]) == [*flags, "--save", "new", "--exit-signal-handler"]


def test_a_run_that_could_not_be_resumed_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("MODEL_ARGS:\n  --save: ck\n")
    with pytest.raises(UserError, match="no --save, so the run could not be resumed; add --save DIR"):
        node.requeueable(["--seed", "3"])
    with pytest.raises(UserError, match="no --save"):
        node.requeueable(["--config", "run.yaml", "--unset", "save"])


@pytest.mark.parametrize(
    ("environ", "conf", "address"),
    [
        ({"SLURM_NODEID": "0", "SLURMD_NODENAME": "localhost"}, "timeout=90,is_host=True", "localhost"),
        ({"SLURM_NODEID": "3", "SLURMD_NODENAME": "localhost"}, "timeout=90,is_host=False", "localhost"),
        ({}, "timeout=90", None),  # without SLURM
        ({"SLURMD_NODENAME": "no-such-host.invalid"}, "timeout=90", None),
    ],
)
def test_the_first_node_holds_the_rendezvous_under_a_name_that_resolves(environ, conf, address):
    args = argparse.Namespace(rdzv_backend="c10d", rdzv_conf="timeout=90", local_addr=None, nproc_per_node="8")
    node.set_options(args, environ)
    assert (args.rdzv_conf, args.local_addr, args.nproc_per_node) == (conf, address, "8")


TERM, KILL = -int(signal.SIGTERM), -int(signal.SIGKILL)


@pytest.mark.parametrize(
    ("codes", "asked", "expected"),
    [
        ([75, 75], True, 75),
        ([75], False, 75),  # the signal came to workers of another node
        ([75, 1], True, 75),  # the checkpoint was complete before any of them ended
        ([TERM, TERM], True, 75),  # before training had begun
        ([TERM, KILL], True, 75),  # the second waited for the first
        ([TERM, TERM], False, 1),  # nobody asked
        ([TERM, 1], True, 1),
        ([2, 2], False, 2),
        ([KILL], True, 1),  # out of memory
        ([1, 2], False, 1),
    ],
)
def test_the_status_is_the_workers(codes, asked, expected):
    """torchrun's own is 1 in all of these."""
    failures = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}
    assert node.status(SimpleNamespace(failures=failures), is_requeued=asked) == expected
