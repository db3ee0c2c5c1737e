"""Warnings: those of libraries about what is not installed are left out of imports, those of this package stand out.

Imports are quiet for commands that prepare or read data, where a missing GPU or Apex is nobody's concern, and for
training, which lists the defaults that it fills in for what is missing.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Within the context nobody warns, by `warnings` or a logger; afterwards all do as before."""
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
    """Within the context a warning of this package is a line as the others that it prints; `train` shows those."""
    show, here = warnings.showwarning, str(Path(__file__).parent)

    def showwarning(message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any) -> None:
        if filename.startswith(here) and issubclass(category, UserWarning):
            print(f"megatron-muon: warning: {message}", file=sys.stderr, flush=True)
        else:
            show(message, category, filename, *where, **more)

    warnings.showwarning = showwarning
    try:
        yield
    finally:
        warnings.showwarning = show
