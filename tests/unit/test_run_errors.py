"""The lines that say why a run failed: of its ranks, of what a signal ended, of what no check
foresaw.
"""

import json
import tempfile
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_muon.errors import UserError, settling
from megatron_muon.tools.train import node

LOST = "RuntimeError: Connection closed by peer"
REPORTS = (
    {"status": 1, "error": "torch.OutOfMemoryError: CUDA out of memory", "time": 2.0},
    {"status": 1, "error": LOST, "time": 1.5},
    {"status": 0, "error": None, "time": 0.0},
)


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
        ([(4, 1, 10), (5, 1, 10)], LOST),  # the first report
        ([(5, -9, 10), (4, -15, 10)], KILLED),  # torchrun ended the other
        ([(4, 1, 10), (5, -9, 10)], KILLED),  # the other had lost it, and was seen first
        ([(4, 1, 10), (5, -9, 40)], LOST),  # torchrun killed it for not ending in time
        # NCCL's watchdog aborted it: the real error was not shown
        ([(4, 1, 10), (5, -6, 13)], LOST),
        ([(5, -11, 10)], "rank 5 was ended by SIGSEGV"),
        ([(4, 1, 10), (5, -15, 10)], LOST),
    ],
)
def test_the_cause_is_the_rank_that_failed_first(tmp_path, failures, error):
    """One that a signal ended leaves nothing, and what the others say follows from its end."""
    for number, report in enumerate(REPORTS):
        (tmp_path / f"{number}.json").write_text(json.dumps(report))
    assert node.cause(child_failed(*failures), tmp_path) == error


def test_a_rank_that_could_not_be_imported_leaves_its_output(tmp_path):
    error = "rank 4 ended with status 1 and no error; see its output"
    assert node.cause(child_failed((4, 1, 10)), tmp_path) == error


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
