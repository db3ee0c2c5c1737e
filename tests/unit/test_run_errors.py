"""The lines that say why a run failed: of its ranks, of what a signal ended, of what no check
foresaw.
"""

import tempfile
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_muon.errors import UserError, settling
from megatron_muon.megatron.places import read_json
from megatron_muon.tools.train import node
from megatron_muon.tools.train.run_summary import failure_of

WRONG = {"status": 2, "error": "--lr x is wrong; type y", "time": 1.0}
CRASHED = {"status": 1, "error": "torch.OutOfMemoryError: CUDA out of memory", "time": 2.0}
LOST = {
    "status": 1,
    "error": "RuntimeError: Connection closed by peer",
    "time": 1.5,
    "trace": "Traceback\n  of it\n",
}
FINE = {"status": 0, "error": None, "time": 0.0}
OF_TORCHRUN = (
    "E1123 10:28:54.0 12 torch/distributed/elastic/multiprocessing/api.py:1013] failed"
    " (exitcode: 1)"
)


@pytest.mark.parametrize(
    ("ranks", "output", "error", "trace"),
    [
        ([CRASHED, WRONG, FINE], ["much"], "--lr x is wrong; type y", ()),  # the first
        ([FINE, CRASHED], [], "torch.OutOfMemoryError: CUDA out of memory", ()),
        (
            [LOST, FINE],
            ["much"],
            "RuntimeError: Connection closed by peer",
            ("Traceback", "  of it"),
        ),
        (
            [FINE],
            ["first", "", "ImportError: no module", OF_TORCHRUN],
            None,
            ("first", "ImportError: no module"),
        ),
        ([], ["line"] * 99, None, ("line",) * 16),
        ([{}], [OF_TORCHRUN], None, ()),
    ],
)
def test_why_a_run_failed(ranks, output, error, trace):
    """Of the rank that failed first; of one that could not be imported, the end of the output
    without torchrun's.
    """
    assert failure_of(ranks, output) == (error, trace)


def child_failed(*failures):
    """Of (rank, exit code, second), in the order in which torchrun took notice."""
    found = {
        rank: ProcessFailure(rank - 4, pid=1, exitcode=code, error_file="")
        for rank, code, _ in failures
    }
    for rank, _, at in failures:
        found[rank].timestamp = at
    return ChildFailedError("pretrain_gpt.py", found)


KILLED = "rank 5 was ended by SIGKILL; if nobody sent it, the host ran out of memory: see dmesg"


@pytest.mark.parametrize(
    ("failures", "error"),
    [
        ([(5, -9, 10), (4, -15, 10)], KILLED),  # torchrun ended the other
        ([(4, 1, 10), (5, -9, 10)], KILLED),  # the other had lost it, and was seen first
        ([(4, 1, 10), (5, -9, 40)], LOST["error"]),  # torchrun killed it for not ending in time
        # NCCL's watchdog aborted it: the real error was not shown
        ([(4, 1, 10), (5, -6, 13)], LOST["error"]),
        ([(5, -11, 10)], "rank 5 was ended by SIGSEGV"),
        ([(5, -15, 10), (4, 1, 10)], "rank 5 was ended by SIGTERM"),
        ([(4, 1, 10), (5, -15, 10)], LOST["error"]),
    ],
)
def test_a_rank_that_a_signal_ended_is_the_cause(tmp_path, failures, error):
    """Such a rank leaves nothing, and what the others say follows from its end."""
    node.report_killed(child_failed(*failures), tmp_path)
    found = [read_json(file) for file in tmp_path.iterdir()]
    assert failure_of([LOST, *found], [])[0] == error


def test_a_rank_that_was_asked_to_end_is_no_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "_received_sigterm", True)
    node.report_killed(child_failed((5, -15, 10)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_no_check_foresaw_is_one_line_while_settings_are_checked(tmp_path, monkeypatch):
    """A user's error ended in a traceback; it is in the file that the line names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreseen = r"checking x failed: ZeroDivisionError: division by zero; the traceback is in"
    with pytest.raises(UserError, match=foreseen) as error, settling("checking x"):
        _ = 1 / 0
    assert "test_run_errors.py" in Path(str(error.value).split()[-1]).read_text()
    with pytest.raises(UserError, match=r"^plain$"), settling("checking x"):
        raise UserError("plain")
    with (
        pytest.raises(UserError, match=r"ValueError: a name with \\x1b in it;"),
        settling("checking x"),
    ):
        raise ValueError("a name with \x1b in it")
