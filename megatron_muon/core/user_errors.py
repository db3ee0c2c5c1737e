"""Errors for what a user can get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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

    def __init__(
        self,
        setting: str,
        value: Any,
        reason: str,
        remedy: str,
    ) -> None:
        super().__init__(setting, value, reason, remedy)  # what pickle makes it from
        self.setting = setting
        self.value = value
        self.reason = reason
        self.remedy = remedy

    def worded(self, name_of: Callable[[str], str]) -> str:
        """The message, with each setting as `name_of` calls it."""
        setting, _, place = self.setting.partition(" ")
        value = self.value
        if value is True:
            value = ""
        elif isinstance(value, float):
            value = f"{value:g}"
        names = _Names(name_of)
        reason = self.reason.format_map(names)
        remedy = self.remedy.format_map(names)
        parts = filter(
            None,
            (name_of(setting), place, str(value), reason),
        )
        return f"{' '.join(parts)}; {remedy}"

    def __str__(self) -> str:
        return self.worded(str)


class _Names(dict[str, str]):
    """Answers every setting with its name."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        super().__init__()
        self._name_of = name_of

    def __missing__(self, setting: str) -> str:
        return self._name_of(setting)


@contextmanager
def word_settings(name_of: Callable[[str], str]) -> Iterator[None]:
    """Reword errors about settings with the names that this front end has for them."""
    try:
        yield
    except SettingError as error:
        raise UserError(error.worded(name_of)) from None
