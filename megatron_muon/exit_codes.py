"""Exit statuses of the commands and of a training, which docs/experiments.md tells users; the end of a failed rank."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from typing import NoReturn

OK = 0
FAILURE = 1
USAGE = 2
"""A mistake of the user."""
TEMPFAIL = 75
"""SIGTERM ended a training after a checkpoint: start it again."""
INTERRUPTED = 130
"""Ctrl-C."""


def end_alone(status: int) -> NoReturn:
    """End this process at once, with the traceback of the exception that is being handled, if there is one.

    The other ranks may wait for this one in a collective. Destroying the process group, or leaving through the
    interpreter, would wait for work on the device that they never join, until the watchdog: torchrun could not end
    them before, and nobody would see why.
    """
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    for child in multiprocessing.active_children():  # nothing else ends them: exit handlers do not run
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
