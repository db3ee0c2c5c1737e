"""Imports of torch and megatron-core without their warnings about what is not installed.

For commands that prepare or read data, where a missing GPU or Apex is nobody's concern, and for training, which lists
the defaults that it fills in for what is missing.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator


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
