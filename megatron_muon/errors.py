"""Errors by who can mend them, how a process ends, and which warnings of libraries are shown."""

from __future__ import annotations

import contextlib
import enum
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatron_muon.core.errors import UserError as UserError

_OF_HF = ("transformers", "huggingface_hub", "safetensors", "tokenizers")
_EXTRAS = {
    **dict.fromkeys(("megatron", "einops", "tensorboard"), ("megatron", "Megatron's part")),
    "matplotlib": ("plots", "a picture"),
    **dict.fromkeys(_OF_HF, ("hf", "a model of Hugging Face")),
}
"""Packages that are not needed everywhere: the extra that installs each, and what needs it."""


def install(extra: str) -> str:
    """What to type for an extra; no package registry has megatron-muon."""
    return f"type pip install '.[{extra}]' in the checkout of megatron_muon"


def missing_extra(error: ModuleNotFoundError) -> str:
    """What to say where a package of an extra is not installed; empty where another is missing."""
    package = (error.name or "").split(".")[0]
    if package not in _EXTRAS:
        return ""
    extra, part = _EXTRAS[package]
    return f"{package} is not installed, which {part} needs; {install(extra)}"


class SaveError(RuntimeError):
    """A checkpoint that could not be written; the message says why, and from which one to resume."""


class OffloadError(RuntimeError):
    """State that could not be read from its file or written; the message names both. The last step is finished."""


class RunFailedError(RuntimeError):
    """A training or measurement that was started and failed; the message says how and where its output is."""


def reason_of(error: BaseException) -> str:
    """The first line of what went wrong, with the rank where torch's distributed checkpointing says so."""
    if failures := getattr(error, "failures", None):
        rank, (failure, *_) = min(failures.items())
        return f"rank {rank}: {reason_of(failure)}"
    if isinstance(error, KeyError):  # its text is the key alone
        return repr(error)
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    line = f"{first} {others[0].strip()}" if first.endswith(":") and others else first
    # torch's writer says this, and nothing of the operating system's error, where a write fails
    # half way.
    return "a file could not be written in full" if "unexpected pos" in line else line


def unforeseen(error: BaseException) -> str:
    """One line for an exception that no check foresaw: its cause, and the file that its traceback is written to."""
    cause = f"{type(error).__name__}: {reason_of(error)}".encode("unicode_escape").decode()
    try:
        with tempfile.NamedTemporaryFile(
            "wb", prefix="megatron-muon-", suffix=".txt", delete=False
        ) as file:
            file.write(
                "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace")
            )
    except OSError as reason:  # the disk that is full may be this one
        return f"{cause} (its traceback could not be kept: {reason.strerror})"
    return f"{cause}; the traceback is in {file.name}"


@contextlib.contextmanager
def settling(what: str) -> Iterator[None]:
    """Turn whatever goes wrong in `what`, such as "checking the settings", into a `UserError` of one line.

    A training that cannot begin is the user's to mend.
    """
    try:
        yield
    except (UserError, RunFailedError, BrokenPipeError):
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and missing_extra(error):
            raise
        raise UserError(f"{what} failed: {unforeseen(error)}") from error


class ExitStatus(enum.IntEnum):
    """Exit statuses of the commands and of a training, as docs/experiments.md lists them."""

    OK = 0
    FAILURE = 1
    USAGE = 2  # a mistake of the user
    TEMPFAIL = 75  # SIGTERM ended a training after a checkpoint: start it again
    INTERRUPTED = 130  # Ctrl-C


def end_alone(status: int) -> NoReturn:
    """Ends this process at once, with the traceback of the exception that is being handled, if there is one.

    The other ranks may wait for this one in a collective. Destroying the process group, or leaving
    through the interpreter, would wait for work on the device that they never join, until the
    watchdog.
    """
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    # nothing else ends them: exit handlers do not run
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppresses warnings, and log messages up to WARNING: libraries tell there that a GPU or Apex is missing."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def own_warnings_in_one_line() -> Iterator[None]:
    """Prints this package's warnings as `megatron-muon: warning:` lines, which `train` shows, within the context."""
    here, show = str(Path(__file__).parent), warnings.showwarning

    def show_ours(
        message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any
    ) -> None:
        if filename.startswith(here) and issubclass(category, UserWarning):
            print(f"megatron-muon: warning: {message}", file=sys.stderr, flush=True)
        else:
            show(message, category, filename, *where, **more)

    with warnings.catch_warnings():  # which puts this back, too
        warnings.showwarning = show_ours
        yield
