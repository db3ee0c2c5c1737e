"""Everything of Megatron that this package reads or replaces, in one table: `table.yaml`.

Modules of this package write `from megatron_muon.megatron.upstream import ChainedOptimizer`, which
imports megatron-core's module then, and checks all rows of that module. A row has:

- `kind`: class, function, value or module;
- `takes`: parameters that it has to accept, or those that a patch passes on;
- `why` it is needed, and by which function of `ours`;
- `digests` of its syntax tree in each version that was looked at (`benchmarks/upstream.py`). A
  version without one does not have the name. Modules have none.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from megatron_muon.errors import UserError
from megatron_muon.megatron.provenance import VERSIONS

TABLE = Path(__file__).with_name("table.yaml")


class Row(msgspec.Struct, kw_only=True):
    """A name of Megatron; see the module."""

    module: str = ""
    name: str = ""
    kind: str
    takes: tuple[str, ...] = ()
    why: str
    ours: str
    digests: dict[str, str] = {}

    @property
    def path(self) -> str:
        """Module and name."""
        return f"{self.module}.{self.name}"

    def applies_to(self, version: str) -> bool:
        """True if a version has this name."""
        return not self.digests or like(version) in self.digests


def like(version: str) -> str:
    """The newest version that was tried and is not newer than this one."""
    tried = [each for each in VERSIONS if Version(each) <= Version(version)]
    return max(tried, key=Version, default=VERSIONS[0])


@functools.cache
def read_table() -> list[Row]:
    """All rows."""
    modules = msgspec.yaml.decode(TABLE.read_bytes(), type=dict[str, dict[str, Row]])
    found = []
    for module, rows in modules.items():
        for name, row in rows.items():
            row.module, row.name = module, name
            found.append(row)
    return found


@functools.cache
def _exported() -> dict[str, Row]:
    return {row.name: row for row in read_table()}


def __getattr__(name: str) -> Any:
    """Megatron's object of this name, which may be patched."""
    row = _exported().get(name)
    if row is None:
        raise AttributeError(f"{TABLE} has no {name}")
    if row.kind == "module":
        check(row.path)
    check(row.module)
    return _resolve(row)


@functools.cache
def check(module: str) -> None:
    """Import a module and check all of its rows.

    Raises:
        UserError: a name is missing, or does not accept a parameter.
    """
    version = metadata.version("megatron-core")
    for row in read_table():
        if row.module == module and row.applies_to(version):
            require(row)


def require(row: Row) -> None:
    """Check one row: the name, and the parameters that it accepts."""
    try:
        value = _resolve(row)
        accepted = inspect.signature(value).parameters if row.takes else ()
    except (ImportError, AttributeError) as error:
        is_import = isinstance(error, ImportError)
        if is_import and not (error.name or "").startswith("megatron."):
            raise  # another package is missing, or all of Megatron
        raise _unfit(row, f"is missing ({error})") from error
    lost = [name for name in row.takes if name not in accepted]
    if lost:
        raise _unfit(row, f"no longer accepts {', '.join(lost)}")


def _resolve(row: Row) -> Any:
    if row.kind == "module":
        return importlib.import_module(row.path)
    return attrgetter(row.name)(importlib.import_module(row.module))


def _unfit(row: Row, problem: str) -> UserError:
    return UserError(
        f"{row.path} {problem} in megatron-core {metadata.version('megatron-core')}, but"
        f" megatron_muon.{row.ours} needs it: {row.why}; install megatron-core"
        f" {' or '.join(VERSIONS)}"
    )
