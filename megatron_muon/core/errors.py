"""The error for what a user can get wrong."""


class UserError(ValueError):
    """A mistake in what the user gave; the message says what was given, what would be right, what to type."""
