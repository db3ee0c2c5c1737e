"""The lines that say why a run failed, from what its ranks left and what torchrun printed."""

import tempfile
from pathlib import Path

import pytest

from megatron_muon.errors import UserError, settling
from megatron_muon.tools.train import run_summary

KILLED = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
pretrain_gpt.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_01:42:42
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 25104)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 25104
============================================================
"""
WRONG = {"status": 2, "error": "--lr x is wrong; type y", "time": 1.0}
CRASHED = {"status": 1, "error": "torch.OutOfMemoryError: CUDA out of memory", "time": 2.0}
LOST = {"status": 1, "error": "RuntimeError: Connection closed by peer", "time": 1.5, "trace": "Traceback\n  of it\n"}
FINE = {"status": 0, "error": None, "time": 0.0}


@pytest.mark.parametrize(
    ("ranks", "log", "error"),
    [
        ([CRASHED, WRONG, FINE], KILLED, "--lr x is wrong; type y"),  # the first
        ([LOST], KILLED, "rank 1 was ended by SIGKILL; if nobody sent it, the host ran out of memory: see dmesg"),
        ([LOST], KILLED.replace("KILL", "TERM"), "RuntimeError: Connection closed by peer"),
        ([FINE, CRASHED], "", "torch.OutOfMemoryError: CUDA out of memory"),
        ([{}], KILLED, "rank 1 was ended by SIGKILL; if nobody sent it, the host ran out of memory: see dmesg"),
        ([], KILLED.replace("KILL", "SEGV"), "rank 1 was ended by SIGSEGV"),
        ([FINE], "nothing to be seen", None),
    ],
)
def test_the_line_that_says_why_is_found(ranks, log, error):
    assert run_summary.failure_of(ranks, log)[0] == error


REPORT = (
    "E1123 10:28:54.0 12 torch/distributed/elastic/multiprocessing/api.py:1013] failed (exitcode: 1) local_rank: 0\n"
)


@pytest.mark.parametrize(
    ("ranks", "log", "shown"),
    [
        ([LOST, FINE], "much\n", ("Traceback", "  of it")),
        ([LOST], KILLED, ()),  # it lost the rank that was killed
        ([WRONG], "much\n", ()),  # its line was shown
        (
            [],
            f"first\n\nImportError: no such module\n{REPORT}Traceback\n{KILLED}",
            ("first", "ImportError: no such module"),
        ),
        ([], f"{REPORT}Traceback\nRendezvousTimeoutError\n", (REPORT.rstrip(), "Traceback", "RendezvousTimeoutError")),
        ([], "line\n" * 99, ("line",) * 16),
    ],
)
def test_the_lines_that_show_why_are_found(ranks, log, shown):
    """Of a rank that could not be imported, of torchrun itself, of a rank that left a traceback."""
    assert run_summary.failure_of(ranks, log)[1] == shown


def test_what_no_check_foresaw_is_one_line_while_settings_are_checked(tmp_path, monkeypatch):
    """A user's error ended in a traceback; it is in the file that the line names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        pytest.raises(
            UserError, match=r"checking x failed: ZeroDivisionError: division by zero; the traceback is in"
        ) as error,
        settling("checking x"),
    ):
        _ = 1 / 0
    assert "test_run_errors.py" in Path(str(error.value).split()[-1]).read_text()
    with pytest.raises(UserError, match=r"^plain$"), settling("checking x"):
        raise UserError("plain")
    with pytest.raises(UserError, match=r"ValueError: a name with \\x1b in it;"), settling("checking x"):
        raise ValueError("a name with \x1b in it")
