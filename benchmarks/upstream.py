"""Lists the changes in a source tree of Megatron that concern this package, importing none of it.

    python -m benchmarks.upstream PATH

PATH is a checkout of Megatron-LM, or another folder with its folder `megatron`. Each row of
`megatron_muon/megatron/upstream/table.yaml` is looked up there. A name that is missing and a
parameter that is no longer accepted are errors, with which the exit status is 1; another body than
in a version that was looked at before is listed for review. `--write` records this version's.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_muon.megatron.upstream import TABLE, Row, read_table

VERSION_MODULE = "megatron.core.package_info"
_IMPORTED = "import"
_OF_CLASS = ("__init__", "__new__")


class Definition(NamedTuple):
    """A statement that defines a name, and its module; a module is its own definition."""

    module: str
    node: ast.AST

    @property
    def kind(self) -> str:
        """The kind of a table's row; that of a name from another package is not known."""
        if isinstance(self.node, (ast.Import, ast.ImportFrom)):
            return _IMPORTED
        if isinstance(self.node, ast.Module):
            return "module"
        if isinstance(self.node, ast.ClassDef):
            return "class"
        return "function" if isinstance(self.node, _FUNCTIONS) else "value"


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Sources:
    """The modules of a folder, as syntax trees."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module | None:
        file = self._file(module)
        return None if file is None else ast.parse(file.read_text("utf-8"))

    def _file(self, module: str) -> Path | None:
        place = self._folder / module.replace(".", "/")
        files = (place.with_suffix(".py"), place / "__init__.py")
        return next((file for file in files if file.is_file()), None)

    def find(self, module: str, name: str) -> list[Definition]:
        """The definitions of a name, dotted for a method, through imports and base classes."""
        owner, _, member = name.partition(".")
        found = list(self._in_module(module, owner))
        if not member:
            return found
        classes = [each for each in found if isinstance(each.node, ast.ClassDef)]
        return [each for one in classes for each in self._in_class(one, member)]

    def parameters(self, found: Definition) -> set[str]:
        """The parameters of a function, or of a class's constructor."""
        if isinstance(found.node, _FUNCTIONS):
            given = found.node.args
            return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        if not isinstance(found.node, ast.ClassDef):
            return set()
        for maker in (each for name in _OF_CLASS for each in self._in_class(found, name)):
            return self.parameters(maker)
        return self._fields(found)

    def _fields(self, found: Definition) -> set[str]:
        """The fields of a data class."""
        fields = set()
        for statement in getattr(found.node, "body", []):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields.add(statement.target.id)
        return fields.union(*(self._fields(base) for base in self._bases(found)))

    def _in_module(self, module: str, name: str) -> Iterator[Definition]:
        tree = self.tree(module)
        defined = [] if tree is None else [node for node in _flat(tree.body) if _names(node, name)]
        submodule = self.tree(f"{module}.{name}")
        for node in defined:
            source = self._source(module, node, name)
            if source == (module, name) and submodule is not None:
                defined = []
                break
            found = [] if source is None else list(self._in_module(*source))
            yield from found or [Definition(module, node)]
        if submodule is not None and not defined:
            yield Definition(f"{module}.{name}", submodule)

    def _source(self, module: str, node: ast.AST, name: str) -> tuple[str, str] | None:
        """The module of this tree, and the name there, of an imported name."""
        if not isinstance(node, ast.ImportFrom):
            return None
        parts = module.split(".")
        is_package = (self._folder.joinpath(*parts) / "__init__.py").is_file()
        kept = len(parts) - node.level + is_package if node.level else 0
        start = ".".join([*parts[:kept], *filter(None, [node.module])])
        (original,) = [each.name for each in node.names if (each.asname or each.name) == name][:1]
        is_ours = start.split(".")[0] == parts[0]
        return (start, original) if is_ours and self._file(start) else None

    def _in_class(self, found: Definition, member: str) -> Iterator[Definition]:
        own = [node for node in _flat(getattr(found.node, "body", [])) if _names(node, member)]
        if own:
            yield from (Definition(found.module, node) for node in own)
            return
        for base in self._bases(found):
            inherited = list(self._in_class(base, member))
            if inherited:
                yield from inherited
                return

    def _bases(self, found: Definition) -> Iterator[Definition]:
        for base in getattr(found.node, "bases", []):
            for each in self.find(found.module, ast.unparse(base)):
                if isinstance(each.node, ast.ClassDef):
                    yield each


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those within conditions too, but not those of functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            for name in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(node, name, []):
                    yield from _flat(
                        inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    )


def _names(node: ast.AST, name: str) -> bool:
    """True if a statement defines this name."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return node.name == name
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any((each.asname or each.name) == name for each in node.names)
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(isinstance(each, ast.Name) and each.id == name for each in targets)


def digest(found: Sequence[Definition]) -> str:
    """A short digest of syntax trees, without docstrings and layout.

    A class counts without its methods, except the constructor: the methods that matter have rows.
    """
    texts = []
    for definition in found:
        node: Any = copy.deepcopy(definition.node)
        if isinstance(node, ast.ClassDef):
            node.body = [
                each
                for each in node.body
                if not isinstance(each, _FUNCTIONS) or each.name in _OF_CLASS
            ]
        for inner in ast.walk(node):
            if isinstance(inner, (*_FUNCTIONS, ast.ClassDef)) and ast.get_docstring(inner):
                inner.body = inner.body[1:] or [ast.Pass()]
        texts.append(ast.unparse(node))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def version_of(sources: Sources) -> str:
    """The version that a tree of megatron-core states."""
    numbers = []
    for name in ("MAJOR", "MINOR", "PATCH"):
        (found,) = sources.find(VERSION_MODULE, name)
        assert isinstance(found.node, ast.Assign)
        numbers.append(str(ast.literal_eval(found.node.value)))
    return ".".join(numbers)


class Review(NamedTuple):
    """A comparison of a tree with the table: errors, changed bodies by version, and digests."""

    errors: list[str]
    changed: dict[str, list[str]]
    digests: dict[tuple[str, str], str]


def review(sources: Sources, rows: Sequence[Row], version: str) -> Review:
    """Look up all rows in a tree.

    Rows without a digest of this version but with one of another either have no such name there, as
    the table says, or are new: then they are as the others.
    """
    errors: list[str] = []
    changed: dict[str, list[str]] = {}
    digests: dict[tuple[str, str], str] = {}
    for row in rows:
        found = sources.find(row.module, row.name)
        faults = list(_faults(row, sources, found))
        if faults and not row.applies_to(version):
            continue
        errors += faults
        if row.kind == "module" or not found:
            continue
        digests[row.module, row.name] = now = digest(found)
        for known, before in row.digests.items():
            if before != now:
                changed.setdefault(known, []).append(f"{row.path}; {row.ours}: {row.why}")
    return Review(errors, changed, digests)


def _faults(row: Row, sources: Sources, found: Sequence[Definition]) -> Iterator[str]:
    """Differences of a name's definitions from its row."""
    use = f"{row.ours}: {row.why}"
    if not found:
        yield f"{row.path} is missing; {use}"
        return
    kinds = {each.kind for each in found}
    if _IMPORTED in kinds:
        return
    if row.kind not in kinds:
        yield f"{row.path} is a {' or a '.join(kinds)}, not a {row.kind}; {use}"
    lost = set(row.takes) - set().union(*map(sources.parameters, found))
    if lost:
        yield f"{row.path} no longer accepts {', '.join(sorted(lost))}; {use}"


def write(table: Path, digests: Mapping[tuple[str, str], str], version: str) -> None:
    """Record the digests of a version in the table."""
    rows = yaml.safe_load(table.read_text("utf-8"))
    for (module, name), found in digests.items():
        rows[module][name].setdefault("digests", {})[version] = found
    text = yaml.safe_dump(rows, sort_keys=False, default_flow_style=None, width=98)
    table.write_text(text, "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the review of a tree; 1 if it has errors."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m benchmarks.upstream", description=about)
    parser.add_argument("path", type=Path, metavar="PATH", help="folder that has megatron/core")
    parser.add_argument("--write", action="store_true", help="record this version's digests")
    args = parser.parse_args(argv)
    sources = Sources(args.path)
    if sources.tree(VERSION_MODULE) is None:
        parser.error(f"{args.path} has no megatron/core/package_info.py; give a checkout's folder")
    version = version_of(sources)
    rows = read_table()
    found = review(sources, rows, version)
    for error in found.errors:
        print(f"error: {error}")
    for known, lines in sorted(found.changed.items()):
        print(f"\ncode differs from {known}, to be reviewed: {len(lines)}")
        print("\n".join(f"  {line}" for line in lines))
    print(f"\nmegatron-core {version}, {len(rows)} names: {len(found.errors)} errors")
    if args.write:
        write(TABLE, found.digests, version)
        print(f"recorded in {TABLE}")
    return int(bool(found.errors))


if __name__ == "__main__":
    sys.exit(main())
