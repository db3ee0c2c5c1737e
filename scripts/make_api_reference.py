#!/usr/bin/env python3
"""Writes docs/api.md, the reference of the package's public modules, from their docstrings.

    python scripts/make_api_reference.py             writes the page
    python scripts/make_api_reference.py --check     says whether the page is what would be written; status 1 if not

The sources are read and not imported, so it needs neither torch nor megatron-core, and the page is the same on every
machine. Names that begin with an underscore are left out.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
MODULES = ("__init__", "settings", "factory", "chained", "metrics", "mcore/fsdp_patches", "errors", "names")
"""Public modules beside those of PACKAGES."""
PACKAGES = ("optim", "exchange", "sharding", "offload", "checkpoint")

HEAD = """\
# API reference

Made from the docstrings by `python scripts/make_api_reference.py`; change those, not this page. What the words
mean is in [concepts.md](concepts.md), in which order to read the code in the [README](../README.md#read-the-code).

"""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
_ITEM = re.compile(r"^ {4}(\*{0,2}\w[\w.]*(?: \([^)]*\))?): (.*)$")
_WORDS = {
    "Args": "Parameters",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The whole page."""
    files = list(_files())
    contents = [f"- [`{_dotted(file)}`](#{_anchor(_dotted(file))}): {_first_line(file)}" for file in files]
    return HEAD + "\n".join(contents) + "\n\n" + "\n".join(_module(file) for file in files)


def _files() -> Iterator[Path]:
    package = ROOT / "megatron_muon"
    for name in MODULES:
        yield package / f"{name}.py"
    for name in PACKAGES:
        yield package / name / "__init__.py"
        yield from (file for file in sorted((package / name).glob("*.py")) if file.stem != "__init__")


def _dotted(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _first_line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).split(": ", 1)[0].split(". ", 1)[0].removesuffix(".") + "."


def _module(file: Path) -> str:
    tree = ast.parse(file.read_text("utf-8"))
    out = [f"## {_dotted(file)}", "", *_prose(ast.get_docstring(tree) or ""), ""]
    if exported := _exported(tree):
        out += ["It exports " + ", ".join(f"`{name}`" for name in exported) + ".", ""]
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            out += _class(node)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            out += _function(node, "###")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and (text := _string(following)) is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                value = ast.unparse(node.value) if node.value is not None else ""
                out += [f"### {target.id}", "", *_code(f"{target.id} = {value}"), *_prose(inspect.cleandoc(text)), ""]
    return "\n".join(out)


def _exported(tree: ast.Module) -> list[str]:
    """What `__all__` lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _class(node: ast.ClassDef) -> list[str]:
    decorated = {ast.unparse(one).split("(")[0].split(".")[-1] for one in node.decorator_list}
    methods = {one.name: one for one in node.body if isinstance(one, Function)}
    if "dataclass" in decorated:
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        parameters = [ast.unparse(one) for one in fields if not ast.unparse(one.target).startswith("_")]
    elif "__init__" in methods:
        parameters = _parameters(methods["__init__"])[1:]
    else:
        parameters = []
    bases = [ast.unparse(base) for base in node.bases]
    out = [f"### {node.name}", "", *_code(_call(f"class {node.name}", parameters))]
    if bases:
        out += [f"A kind of {', '.join(f'`{base}`' for base in bases)}.", ""]
    out += [*_prose(ast.get_docstring(node) or ""), ""]
    for name, method in methods.items():
        if not name.startswith("_") and ast.get_docstring(method):
            out += _function(method, "####", owner=node.name)
    return out


def _function(node: Function, level: str, *, owner: str = "") -> list[str]:
    decorated = {ast.unparse(one).split(".")[-1] for one in node.decorator_list}
    parameters = _parameters(node)
    if owner and "staticmethod" not in decorated:
        parameters = parameters[1:]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    name = f"{owner}.{node.name}" if owner else node.name
    if decorated & {"property", "cached_property"}:
        signature = name + returns.replace(" -> ", ": ")
    else:
        signature = _call(name, parameters) + returns
    return [f"{level} {name}", "", *_code(signature), *_prose(ast.get_docstring(node) or ""), ""]


def _parameters(node: Function) -> list[str]:
    """The parameters as they are written, `*` and `/` among them."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    found = [_parameter(one, default) for one, default in zip(positional, defaults, strict=True)]
    if given.posonlyargs:
        found.insert(len(given.posonlyargs), "/")
    if given.vararg is not None:
        found.append("*" + _parameter(given.vararg))
    elif given.kwonlyargs:
        found.append("*")
    found += [_parameter(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return found + (["**" + _parameter(given.kwarg)] if given.kwarg is not None else [])


def _parameter(one: ast.arg, default: ast.expr | None = None) -> str:
    annotation = f": {ast.unparse(one.annotation)}" if one.annotation is not None else ""
    equals = " = " if annotation else "="
    return one.arg + annotation + (f"{equals}{ast.unparse(default)}" if default is not None else "")


def _call(name: str, parameters: list[str]) -> str:
    line = f"{name}({', '.join(parameters)})"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {parameter}," for parameter in parameters), ")"])


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _string(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def _prose(text: str) -> list[str]:
    """A Google-style docstring as Markdown: its sections become lists."""
    out: list[str] = []
    section = ""
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section = match[1]
            if section in _WORDS:
                out += [f"*{_WORDS[section]}*", ""]
            continue
        if section in _WORDS:
            if line and not line.startswith(" "):
                section = ""
            elif match := _ITEM.match(line):
                out.append(f"- `{match[1]}`: {_escaped(match[2])}")
                continue
            elif line:
                out.append(f"  {_escaped(line.strip())}" if out and out[-1].startswith(("-", "  ")) else line.strip())
                continue
        out.append(line if line.startswith("    ") else _escaped(line))
    return out


def _escaped(line: str) -> str:
    """Angle brackets and asterisks outside of code, which Markdown would take for its own."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts)


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="Write docs/api.md from the docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where the page is not current")
    args = parser.parse_args()
    if not args.check:
        PAGE.write_text(page(), "utf-8")
        return 0
    if PAGE.read_text("utf-8") == page():
        return 0
    print("docs/api.md is not what the docstrings say; type: python scripts/make_api_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
