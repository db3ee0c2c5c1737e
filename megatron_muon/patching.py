"""Patches of foreign code that can be undone."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from importlib import metadata
from typing import Any
from unittest import mock


class Patches(ExitStack):
    """Replaces attributes of modules, classes and configs until `undo` or the end of `with`.

    Every change raises a RuntimeError, and changes nothing, if the attribute is missing or no
    longer accepts the parameters `takes`.
    """

    def replace(self, owner: Any, name: str, value: Any, *, takes: Sequence[str] = ()) -> None:
        """Set `owner.name` to `value`."""
        _checked(owner, name, takes)
        self.enter_context(mock.patch.object(owner, name, value))

    def around(
        self, owner: Any, name: str, *, takes: Sequence[str] = ()
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function to call in place of `owner.name`; it gets the original first.

        Name and docstring remain those of the original.
        """

        def install(instead: Callable[..., Any]) -> Callable[..., Any]:
            original = _checked(owner, name, takes)
            self.replace(owner, name, wraps(original)(lambda *a, **kw: instead(original, *a, **kw)))
            return instead

        return install

    def undo(self) -> None:
        """Put everything back, last change first."""
        self.close()


def _checked(owner: Any, name: str, takes: Sequence[str]) -> Any:
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    if not hasattr(owner, name):
        raise RuntimeError(f"cannot patch {where}: there is no such attribute in {versions()}")
    original = getattr(owner, name)
    if takes:
        found = inspect.signature(original).parameters
        if lost := [parameter for parameter in takes if parameter not in found]:
            raise RuntimeError(
                f"cannot patch {where}: it accepts {', '.join(found)}, without {', '.join(lost)},"
                f" in {versions()}"
            )
    return original


def versions() -> str:
    """The installed megatron-core and torch, for messages."""
    core, torch = map(metadata.version, ("megatron-core", "torch"))
    return f"megatron-core {core} with torch {torch}"
