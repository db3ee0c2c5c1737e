"""The one exception type for what a user can get wrong.

The command line prints it as a single line without a traceback; library code raises it as the `ValueError` it
is.
"""


class UserError(ValueError):
    """A mistake in what the user gave; the message says what was given, what would be right, what to type."""


class SaveError(RuntimeError):
    """A checkpoint that could not be written; the message says why, and from which one to resume."""


class OffloadError(RuntimeError):
    """Momentum that could not be read or written; the message names file and offset. The last step is finished."""


class RunFailedError(RuntimeError):
    """A training or measurement that was started and failed; the message says how and where its output is."""
