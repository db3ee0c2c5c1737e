"""Records what it replaces, so that everything can be put back.

`Patches` sets attributes of modules and classes, checks first that what is replaced still looks as expected, and undoes
its work in reverse order. It knows nothing of CUDA or Megatron: what is replaced, and why, stands in `cpu/`,
`megatron/patches/` and `megatron/checkpoint/`.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import metadata
from typing import Any, Self

_ABSENT: Any = object()


class Patches:
    """Attribute replacements that remember the originals.

    An attribute that a class inherits (`torch.Tensor.to` lives on its C base class) is *removed* on undo instead of
    being pinned to the inherited value, so undoing leaves no trace. Every change raises RuntimeError where the
    attribute is missing, or no longer accepts the parameters `takes`, and changes nothing then.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def replace(self, owner: Any, name: str, value: Any, *, takes: Sequence[str] = ()) -> None:
        """Set `owner.name` to `value`; `owner` is a module, a class or a config object."""
        original = _checked(owner, name, takes)
        setting = partial(setattr, owner, name, original)  # of an object that keeps it elsewhere than in its __dict__
        inherited = partial(delattr, owner, name) if isinstance(owner, type) else setting
        # What the namespace held, not what getattr returns: a staticmethod comes back as a staticmethod.
        own = vars(owner).get(name, _ABSENT)
        self._undo.append(inherited if own is _ABSENT else partial(setattr, owner, name, own))
        setattr(owner, name, value)

    def wrap(
        self,
        owner: Any,
        name: str,
        around: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        takes: Sequence[str] = (),
    ) -> None:
        """Replace a callable by `around(original)`, keeping name and docstring."""
        original = _checked(owner, name, takes)
        self.replace(owner, name, wraps(original)(around(original)))

    def around(
        self, owner: Any, name: str, *, takes: Sequence[str] = ()
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator of what is called instead of `owner.name`, the original its first argument."""

        def install(instead: Callable[..., Any]) -> Callable[..., Any]:
            self.wrap(owner, name, lambda original: lambda *a, **kw: instead(original, *a, **kw), takes=takes)
            return instead

        return install

    def undo(self) -> None:
        """Put everything back, last change first."""
        while self._undo:
            self._undo.pop()()


def _checked(owner: Any, name: str, takes: Sequence[str]) -> Any:
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = getattr(owner, name, _ABSENT)
    if original is _ABSENT:
        raise RuntimeError(f"cannot patch {where}: there is no such attribute in {versions()}")
    if takes:
        found = list(inspect.signature(original).parameters)
        lost = [parameter for parameter in takes if parameter not in found]
        if lost:
            raise RuntimeError(
                f"cannot patch {where}: it accepts {', '.join(found)}, without {', '.join(lost)}, in {versions()}"
            )
    return original


def versions() -> str:
    """The installed megatron-core and torch, for error messages."""
    return " with ".join(f"{package} {metadata.version(package)}" for package in ("megatron-core", "torch"))
