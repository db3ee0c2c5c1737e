"""How `pretrain_gpt.py` starts and ends: versions, --help, without torchrun, ranks that fail; its
warnings.
"""

import json
import multiprocessing
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import megatron.training
import pytest
import torch.distributed as dist
from megatron.core.utils import ensure_divisibility
from megatron.training import argument_utils, arguments

import megatron_muon
from megatron_muon.errors import ExitStatus, UserError, own_warnings_in_one_line
from megatron_muon.megatron import STATUS_FOLDER, launch, upstream
from megatron_muon.megatron.launch import settle_one_process
from megatron_muon.megatron.model import gpt
from megatron_muon.megatron.provenance import (
    ANY_VERSION,
    VERSIONS,
    check_imported,
    check_versions,
)

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
PREPARED = launch.Launch((), SimpleNamespace(save=None), None, (), ())


@pytest.mark.parametrize("version", [*VERSIONS, "0.20.0+g1a2b3c", None])
def test_versions_that_were_tried_pass(version):
    assert check_versions(version) == ""


@pytest.mark.parametrize("version", ["0.16.1", "0.19.7", "0.20.1", "0.190.0"])
def test_another_megatron_core_is_refused_unless_the_user_wants_it(version, monkeypatch):
    """On Python 3.11 pip installs megatron-core 0.16.1, so the Python is named too."""
    why = rf"^megatron-core {version} was not tried .*Python 3.12 .*megatron-core==0\.19\.2, or try"
    with pytest.raises(UserError, match=f"{why} it at your own risk with {ANY_VERSION}=1$"):
        check_versions(version)
    monkeypatch.setenv(ANY_VERSION, "1")
    warning = check_versions(version)
    assert warning.startswith(f"warning: megatron-core {version} was not tried")
    assert warning.endswith("those that were: 0.19.0, 0.19.1, 0.19.2, 0.20.0")


def test_a_megatron_core_beside_the_installed_one_is_refused(monkeypatch):
    why = (
        r"site/core is megatron-core 0\.18\.0, but .* is installed; uninstall one, or .*PYTHONPATH"
    )
    with pytest.raises(UserError, match=why):
        check_imported("0.18.0", "site/core")
    monkeypatch.setattr("megatron.core.__version__", "0.18.0")
    with pytest.raises(UserError, match=r"megatron/core/__init__\.py is megatron-core 0\.18\.0"):
        upstream.check.__wrapped__("megatron.core.enums")


def test_a_warning_of_this_package_is_one_line(capsys):
    """`train` shows a line that begins with `megatron-muon: warning: `, and no other of a rank's
    warnings.
    """
    own, other = str(Path(megatron_muon.__file__).parent / "x.py"), "/elsewhere/y.py"
    with warnings.catch_warnings(record=True) as others, own_warnings_in_one_line():
        warnings.simplefilter("always")
        warnings.warn_explicit("of ours", UserWarning, own, 1)
        warnings.warn_explicit("of others", UserWarning, other, 1)
    assert capsys.readouterr().err == "megatron-muon: warning: of ours\n"
    assert [str(each.message) for each in others] == ["of others"]


@pytest.mark.parametrize("argv", [["-h"], ["--config", "absent.yaml", "--help"]])
def test_help_is_the_flags_and_nothing_else_and_of_the_first_rank(capsys, monkeypatch, argv):
    """It ended in two tracebacks and status 1, because its SystemExit read as the end of a
    training.
    """
    with monkeypatch.context() as patched:
        patched.setenv("RANK", "1")
        assert launch.main(argv) == 0
    assert launch.main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: pretrain_gpt.py")
    assert "--muon-exchange" in out
    assert err == ""


def test_a_process_by_itself_is_a_group_of_one():
    """It ended in `environment variable MASTER_ADDR expected`, after 890 lines."""
    environ = {"HOME": "/root", "MASTER_ADDR": "10.0.0.1", "SLURM_STEP_NUM_TASKS": "1"}
    assert "torchrun --nproc-per-node" in settle_one_process(environ)
    assert {environ[name] for name in ("RANK", "LOCAL_RANK")} == {"0"}
    assert environ["WORLD_SIZE"] == "1"
    # what a script exported for others is another machine
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert environ["MASTER_PORT"] == "0"
    assert settle_one_process(environ) is None  # a rank now


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_processes_of_another_launcher_do_not_train_alone(name):
    environ = {name: "8"}
    with pytest.raises(
        UserError, match=f"{name}=8: each process would train alone; start one torchrun"
    ):
        settle_one_process(environ)
    assert environ == {name: "8"}


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Runs a rank whose training raises something, in a fork of this process; its status, once it
    has ended.
    """
    is_initialized = [True]

    def run(raised, *, alone, signal=False, **args):
        def fails(*_):
            raise raised() if callable(raised) else raised

        def destroy():  # as NCCL does while the others are in a collective
            print("destroying", flush=True)
            if alone:
                time.sleep(60)
            is_initialized[0] = False

        with monkeypatch.context() as patched:
            patched.setattr(launch, "prepare", lambda *_, **__: PREPARED)
            patched.setattr(launch, "_install", lambda _: None)
            patched.setattr(launch, "_ended_by_signal", lambda: signal)
            patched.setattr(
                arguments, "parse_and_validate_args", lambda **_: SimpleNamespace(**args)
            )
            patched.setattr(argument_utils, "pretrain_cfg_container_from_args", lambda *_: None)
            patched.setattr(gpt, "gpt_config", lambda *_: None)
            patched.setattr(megatron.training, "pretrain", fails)
            patched.setattr(dist, "is_initialized", lambda: is_initialized[0])
            patched.setattr(dist, "get_rank", lambda: 1)
            patched.setattr(dist, "destroy_process_group", destroy)
            for name, value in {**TORCHRUN, STATUS_FOLDER: str(tmp_path)}.items():
                patched.setenv(name, value)
            rank = multiprocessing.get_context("fork").Process(target=launch.run)
            patched.setattr(launch, "_SECONDS_FOR_FIRST_RANK", 0)
            rank.start()
        rank.join(timeout=30)
        return rank.exitcode

    return run


@pytest.mark.parametrize(
    ("raised", "status", "shown", "error"),
    [
        (
            RuntimeError("a rank by itself\nand more"),
            1,
            "RuntimeError: a rank by itself\nand more",
            None,
        ),
        (
            UserError("a wrong flag\nand another"),
            2,
            "error: a wrong flag\npretrain_gpt.py: error: and another",
            "a wrong flag",
        ),
    ],
)
def test_a_rank_that_fails_alone_ends_at_once_and_says_why(
    tmp_path, capfd, ended, raised, status, shown, error
):
    """It destroyed the process group first: with NCCL a wait for the others until the watchdog."""
    assert ended(raised, alone=True) == status
    out, err = capfd.readouterr()
    assert shown in err
    assert out == ""
    told = json.loads((tmp_path / "1.json").read_text())
    assert (told["status"], told["error"]) == (
        status,
        error or shown.splitlines()[0],
    )


@pytest.mark.parametrize(
    ("raised", "args", "is_refusal"),
    [
        (lambda: ensure_divisibility(3, 2), {}, True),
        (lambda: ensure_divisibility(3, 2), {"curr_iteration": 0}, False),  # in the first step
        (AssertionError("of ours"), {}, False),
    ],
)
def test_what_megatron_refuses_before_the_first_step_is_one_line(
    tmp_path, capfd, ended, raised, args, is_refusal
):
    """Each rank printed a traceback for a warm-up that was too long."""
    assert ended(raised, alone=True, **args) == (2 if is_refusal else 1)
    refusal = (
        "pretrain_gpt.py: error: megatron-core refuses these settings: 3 is not divisible by 2"
    )
    assert capfd.readouterr().err.startswith(refusal) is is_refusal


def test_ranks_that_a_signal_ends_together_leave_their_group_as_before(tmp_path, capfd, ended):
    assert ended(SystemExit(0), alone=False, signal=True) == ExitStatus.TEMPFAIL
    assert capfd.readouterr().out == "destroying\n"
    told = json.loads((tmp_path / "1.json").read_text())
    assert (told["status"], told["error"]) == (ExitStatus.TEMPFAIL, None)


def test_a_group_that_is_there_already_needs_no_environment(monkeypatch):
    """A caller that made the process group itself has set RANK for it, and no rendezvous."""
    monkeypatch.setattr(launch, "prepare", lambda *_, **__: PREPARED)
    monkeypatch.setattr(launch, "_install", lambda _: None)
    monkeypatch.setattr(launch, "_has_group", lambda: True)
    monkeypatch.setattr(launch, "_train", lambda: None)
    monkeypatch.setenv("RANK", "0")
    assert launch.main([]) == 0


@pytest.mark.parametrize(
    ("facts", "trained"),
    [
        ({}, False),  # a checkpoint that cannot be read: Megatron ends with status 0
        ({"do_train": 0, "curr_iteration": 0}, False),  # no data for training
        ({"do_train": 1, "curr_iteration": 0}, True),
        ({"iteration": 10}, True),  # nothing is left to do
        ({"skip_train": True}, True),
    ],
)
def test_a_start_that_was_to_train_and_did_not_is_told(monkeypatch, facts, trained):
    """It ended as "finished with status 0 after 0 iterations"."""
    from megatron import training

    args = {"train_iters": 10, "train_samples": None, "skip_train": False, **facts}
    monkeypatch.setattr(training, "get_args", lambda: SimpleNamespace(**args))
    assert launch._has_trained() is trained
