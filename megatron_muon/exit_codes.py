"""Exit statuses of the commands and of a training; docs/experiments.md tells users."""

OK = 0
FAILURE = 1
USAGE = 2
"""A mistake of the user."""
RERUN = 16
"""Megatron's: a non-finite loss or gradient, again when the step was repeated."""
TEMPFAIL = 75
"""SIGTERM ended a training after a checkpoint: start it again."""
INTERRUPTED = 130
"""Ctrl-C."""
