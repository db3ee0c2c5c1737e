"""Imports of torch and megatron-core without their warnings about what is not installed.

For commands that prepare or read data, where a missing GPU or Apex is nobody's concern, and for training, which lists
the defaults that it fills in for what is missing.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator

_TALKATIVE_LOGGERS = ("torch.utils.cpp_extension", "torch.distributed.elastic.multiprocessing.redirects")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Within the context warnings and the talkative loggers are silent; both are as before afterwards."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
