"""Silences what libraries warn about while they are imported, and prints this package's own warnings as single lines.

Imports are quiet for commands that prepare or read data, where a missing GPU or Apex is nobody's concern, and for
training, which lists the defaults that it fills in for what is missing.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_muon.patching import Patches


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppresses warnings, and log messages up to WARNING, within the context."""
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
    here = str(Path(__file__).parent)
    with Patches() as patches:

        @patches.around(warnings, "showwarning")
        def showwarning(
            show: Callable[..., None], message: Warning | str, category: type[Warning], filename: str, *where: Any,
            **more: Any,
        ) -> None:  # fmt: skip
            if filename.startswith(here) and issubclass(category, UserWarning):
                print(f"megatron-muon: warning: {message}", file=sys.stderr, flush=True)
            else:
                show(message, category, filename, *where, **more)

        yield
