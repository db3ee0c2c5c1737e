"""Exit statuses of the commands and of a training; docs/experiments.md tells users."""

OK = 0
FAILURE = 1
USAGE = 2
"""A mistake of the user."""
TEMPFAIL = 75
"""SIGTERM ended a training after a checkpoint: start it again."""
INTERRUPTED = 130
"""Ctrl-C."""
