"""Errors, exit statuses, and the warnings of libraries that are shown."""

from __future__ import annotations

import contextlib
import enum
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_EXTRAS = {
    "megatron": ("megatron", "Megatron support"),
    "einops": ("megatron", "Megatron support"),
    "tensorboard": ("megatron", "Megatron support"),
    "matplotlib": ("plots", "a plot"),
    "transformers": ("hf", "a Hugging Face model"),
    "huggingface_hub": ("hf", "a Hugging Face model"),
    "safetensors": ("hf", "a Hugging Face model"),
    "tokenizers": ("hf", "a Hugging Face model"),
}
"""Optional packages: the extra that installs each, and what needs it."""


def install(extra: str) -> str:
    """The command that installs an extra; no package registry has megatron-muon."""
    return f"type pip install '.[{extra}]' in the checkout of megatron_muon"


def missing_extra(error: ModuleNotFoundError) -> str:
    """A message if the missing package belongs to an extra; empty for others."""
    package = (error.name or "").split(".")[0]
    if package not in _EXTRAS:
        return ""
    extra, part = _EXTRAS[package]
    return f"{part} needs {package}, which is not installed; {install(extra)}"


class UserError(ValueError):
    """A mistake in what the user gave; the message has the value, and what to type instead."""


class SettingError(UserError):
    """A setting whose value does not work; each front end words it by the names that users type.

    Attributes:
        setting: its name in `MuonSettings` or in torch, and after a space, if needed, where it was
            given: "lr of parameter group 0".
        value: as given; True is not shown.
        reason: a predicate. Here and in the remedy other settings stand in braces: "{muon_ns}".
        remedy: what to do, as an imperative.
    """

    def __init__(self, setting: str, value: Any, reason: str, remedy: str) -> None:
        super().__init__(setting, value, reason, remedy)  # what pickle makes it from
        self.setting = setting
        self.value = value
        self.reason = reason
        self.remedy = remedy

    def worded(self, name_of: Callable[[str], str]) -> str:
        """The message, with each setting as `name_of` calls it."""
        setting, _, place = self.setting.partition(" ")
        value = "" if self.value is True else self.value
        if isinstance(value, float):
            value = f"{value:g}"

        def named(text: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda braces: name_of(braces[1]), text)

        parts = name_of(setting), place, str(value), named(self.reason)
        return f"{' '.join(filter(None, parts))}; {named(self.remedy)}"

    def __str__(self) -> str:
        return self.worded(str)


@contextlib.contextmanager
def word_settings(name_of: Callable[[str], str]) -> Iterator[None]:
    """Reword errors about settings with the names that this front end has for them."""
    try:
        yield
    except SettingError as error:
        raise UserError(error.worded(name_of)) from None


class SaveError(RuntimeError):
    """A checkpoint that could not be written; the message names one to resume from."""


class OffloadError(RuntimeError):
    """State that could not be read or written, with its file; it is lost."""


class AuditError(RuntimeError):
    """A step that differs from emerging-optimizers', with the matrix, ranks and rows."""


class RunFailedError(RuntimeError):
    """A training or measurement that failed; the message has the reason and its output."""


def reason_of(error: BaseException) -> str:
    """The first line of an error, with the rank if torch's distributed checkpointing gives it."""
    if failures := getattr(error, "failures", None):
        rank, (failure, *_) = min(failures.items())
        return f"rank {rank}: {reason_of(failure)}"
    if isinstance(error, KeyError):  # its text is the key alone
        return repr(error)
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    if first.endswith(":") and others:
        first = f"{first} {others[0].strip()}"
    if "unexpected pos" in first:  # torch's writer hides the error of the operating system
        return "a file could not be written in full"
    return first


def unforeseen(error: BaseException) -> str:
    """One line for an unexpected exception: its cause, and the file with its traceback."""
    cause = f"{type(error).__name__}: {reason_of(error)}".encode("unicode_escape").decode()
    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(".txt", "megatron-muon-")
        with open(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as reason:  # the disk that is full may be this one
        return f"{cause} (its traceback could not be kept: {reason.strerror})"
    return f"{cause}; the traceback is in {path}"


@contextlib.contextmanager
def settling(what: str) -> Iterator[None]:
    """Turn any exception in `what`, such as "checking the settings", into a `UserError`."""
    try:
        yield
    except (UserError, RunFailedError, BrokenPipeError):
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and missing_extra(error):
            raise
        raise UserError(f"{what} failed: {unforeseen(error)}") from error


class ExitStatus(enum.IntEnum):
    """Exit statuses of the commands and of a training, as docs/troubleshooting.md lists them."""

    OK = 0
    FAILURE = 1
    USAGE = 2  # user error
    TEMPFAIL = 75  # SIGTERM ended a training after a checkpoint: start it again
    INTERRUPTED = 130  # Ctrl-C


def end_alone(status: int) -> NoReturn:
    """Ends this process at once, with the traceback of the exception in progress, if any.

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
    """Suppresses warnings and log messages, such as those of libraries that miss a GPU or Apex."""
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
    """Prints this package's warnings as `megatron-muon: warning:` lines, which `train` shows."""
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
