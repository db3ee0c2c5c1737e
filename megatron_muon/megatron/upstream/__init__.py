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

import ast
import functools
import importlib
import inspect
import re
import sys
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from megatron_muon.errors import UserError
from megatron_muon.megatron.provenance import VERSIONS, check_imported

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


@functools.cache
def like(version: str) -> str:
    """The version in the table that this one is like: the newest that is not of a later minor."""
    known = sorted({each for row in read_table() for each in row.digests}, key=Version)
    minor = Version(version).release[:2]
    return [known[0], *(each for each in known if Version(each).release[:2] <= minor)][-1]


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
    core = importlib.import_module("megatron.core")
    check_imported(core.__version__, str(core.__file__))
    version = metadata.version("megatron-core")
    if not getattr(importlib.import_module(module), "HAVE_EMERGING_OPTIMIZERS", True):
        raise UserError(_without_emerging_optimizers(module))
    for row in read_table():
        if row.module == module and row.applies_to(version):
            require(row)


@functools.cache
def installed() -> Any:
    """The module of what differs in the installed version: `v0_19` or `v0_20`."""
    major, minor, _ = like(metadata.version("megatron-core")).split(".")
    return importlib.import_module(f"{__name__}.v{major}_{minor}")


def require(row: Row) -> None:
    """Check one row: the name, and the parameters that it accepts."""
    try:
        value = _resolve(row)
        accepted = inspect.signature(value).parameters if row.takes else ()
    except (ImportError, AttributeError) as error:
        is_import = isinstance(error, ImportError)
        if is_import and not re.match(r"megatron\.\w+\.", error.name or ""):
            raise  # another package is missing, or all of Megatron
        raise _unfit(row, f"is missing ({error})") from error
    lost = [name for name in row.takes if name not in accepted]
    if lost:
        raise _unfit(row, f"no longer accepts {', '.join(lost)}")


def _resolve(row: Row) -> Any:
    if row.kind == "module":
        return importlib.import_module(row.path)
    return attrgetter(row.name)(importlib.import_module(row.module))


def _without_emerging_optimizers(module: str) -> str:
    """Why megatron-core has turned its Muon off: which of its imports fails."""
    reason = "it cannot be imported"
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("emerging_optimizers"):
            try:
                exec(ast.unparse(node), {})
            except ImportError as error:
                reason = f"`{ast.unparse(node)}` fails: {error}"
    return (
        f"megatron-core {metadata.version('megatron-core')} does not work with emerging-optimizers"
        f" {metadata.version('emerging-optimizers')} ({reason}); type: pip install"
        f" 'emerging-optimizers>=0.3,<0.5'"
    )


def _unfit(row: Row, problem: str) -> UserError:
    return UserError(
        f"{row.path} {problem} in megatron-core {metadata.version('megatron-core')}, but"
        f" megatron_muon.{row.ours} needs it: {row.why}; install megatron-core"
        f" {' or '.join(VERSIONS)}"
    )
