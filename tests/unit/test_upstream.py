"""The table of Megatron's names is complete, holds for the installed version, and finds changes."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from copy import copy
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import megatron.core
import pytest
import torch
import yaml
from megatron.training import checkpointing, training

from benchmarks import upstream as command
from megatron_muon import cpu
from megatron_muon.cpu import megatron as cpu_patches
from megatron_muon.errors import UserError
from megatron_muon.megatron import upstream
from megatron_muon.megatron.patches import install
from megatron_muon.megatron.upstream import Row, read_table
from megatron_muon.patching import Patches

PACKAGE = Path(cpu.__file__).parents[1]
INSTALLED = metadata.version("megatron-core")
ROWS = [row for row in read_table() if row.applies_to(INSTALLED)]
PATHS = {row.path: row for row in read_table()}
IMPORTERS = {"cpu/megatron.py", "megatron/upstream/__init__.py"}
"""All that import Megatron itself; the rest of the package does by the table."""

UPSTREAMS = [*(PACKAGE / "megatron/upstream").glob("v0_*.py")]
UPSTREAM = "megatron_muon.megatron.upstream"
FILES = {str(file.relative_to(PACKAGE)): file for file in PACKAGE.rglob("*.py")}


def nodes(file: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(file.read_text("utf-8")))


def of_megatron(file: Path) -> set[str]:
    """Names that a file imports from Megatron, with statements or importlib."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return {name for name in found if re.match(r"megatron(\.|$)", name)}


def used(file: Path) -> Iterator[str]:
    """Paths of rows that a file uses: names imported by the table, and attributes of modules."""
    modules = {}
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module == UPSTREAM:
            for name in node.names:
                if name.name in vars(upstream):
                    continue
                (row,) = [row for row in read_table() if row.name == name.name]
                yield row.path
                if row.kind == "module":
                    modules[name.asname or name.name] = row.path
    modules.pop("core", None)  # imported for its effect
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            yield f"{modules[ast.unparse(node.value)]}.{node.attr}"
        is_call = isinstance(node, ast.Call) and len(node.args) > 1
        if is_call and ast.unparse(node.func).rpartition(".")[2] in ("around", "replace", "wrap"):
            owner, name = map(ast.unparse, node.args[:2])
            if owner in modules and isinstance(node.args[1], ast.Constant):
                yield f"{modules[owner]}.{ast.literal_eval(name)}"


def test_only_a_few_files_import_megatron_themselves():
    importers = {name for name, file in FILES.items() if of_megatron(file)}
    names = {f"{module}" for module in of_megatron(FILES["cpu/megatron.py"])}
    assert importers <= IMPORTERS | {"megatron/patches/install.py"}
    assert names <= PATHS.keys()
    assert of_megatron(FILES["megatron/patches/install.py"]) == {
        "megatron.core.datasets.helpers_cpp"
    }


@pytest.mark.parametrize("name", sorted(name for name, file in FILES.items() if set(used(file))))
def test_the_table_has_every_name_that_a_file_uses(name):
    assert set(used(FILES[name])) <= PATHS.keys()


def test_the_table_has_every_patch_of_megatron(monkeypatch):
    """Those of every kind of run, and of the CPU, as they are installed."""
    patched = set()
    replace = Patches.replace

    def note(self, owner, name, value, *, takes=()):
        module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
        if module.startswith("megatron."):
            path = module if isinstance(owner, ModuleType) else f"{module}.{owner.__qualname__}"
            patched.add(f"{path}.{name}")
        replace(self, owner, name, value, takes=takes)

    monkeypatch.setattr(Patches, "replace", note)
    for with_muon in (True, False):
        with Patches() as patches:
            install.follow(patches)
            install.install(patches, muon_under_fsdp=with_muon, megatron_fsdp=True, profile=True)
    with Patches() as patches:
        cpu_patches.install(patches)
    assert len(patched) > 30
    assert patched <= PATHS.keys()


@pytest.mark.parametrize("row", read_table(), ids=lambda row: row.path)
def test_a_row_names_the_function_of_ours_that_needs_it(row):
    place, _, function = row.ours.rpartition(".")
    text = (PACKAGE / f"{place.replace('.', '/')}.py").read_text("utf-8")
    assert re.search(rf"^(class|def) {function}\b", text, re.MULTILINE)
    text += "".join(file.read_text("utf-8") for file in UPSTREAMS)  # by which ours may find it
    assert re.search(rf"\b{row.name.rpartition('.')[2]}\b", text), "it does not occur there"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_the_installed_version_has_a_row_as_it_is_stated(row):
    upstream.require(row)
    value = upstream._resolve(row)
    kinds = {
        "module": inspect.ismodule,
        "class": inspect.isclass,
        "function": lambda each: callable(each) or isinstance(each, property),
        "value": lambda each: True,
    }
    assert kinds[row.kind](value)


def test_the_installed_version_is_the_one_that_was_looked_at():
    if upstream.like(INSTALLED) != INSTALLED:
        pytest.skip(f"megatron-core {INSTALLED} is not in the table")
    sources = command.Sources(Path(megatron.core.__file__).parents[2])
    assert command.version_of(sources) == INSTALLED
    found = command.review(sources, read_table(), INSTALLED)
    assert found.errors == []
    assert INSTALLED not in found.changed
    recorded = {row.path: row.digests.get(INSTALLED) for row in ROWS if row.kind != "module"}
    assert {".".join(place): each for place, each in found.digests.items()} == recorded


def test_a_name_that_is_gone_is_an_error_that_says_who_needs_it(monkeypatch):
    monkeypatch.delattr(training, "clip_qk")
    why = (
        r"training\.clip_qk is missing .*install\.use_factory needs it.*install megatron-core 0\.19"
    )
    with pytest.raises(UserError, match=why):
        upstream.check.__wrapped__("megatron.training.training")


def other(*_args: object) -> None:
    """A function that takes nothing by a name."""


@pytest.mark.parametrize("row", [row for row in ROWS if row.takes], ids=lambda row: row.path)
def test_a_function_of_another_signature_is_an_error(row, monkeypatch):
    owner, _, name = row.path.rpartition(".")
    monkeypatch.setattr(f"{owner}.{name}", other)
    with pytest.raises(UserError, match=f"no longer accepts {', '.join(row.takes)} in megatron-c"):
        upstream.require(row)


def test_a_name_without_a_row_is_not_found():
    with pytest.raises(ImportError, match="cannot import name 'get_model'"):
        from megatron_muon.megatron.upstream import get_model  # noqa: F401
    assert upstream.checkpointing is checkpointing


BEFORE = '''
from .base import Base, helper as helped

class Child(Base):
    """Of two."""
    def own(self, one): return one

try:
    from absent import value
except ImportError:
    value = 1

def function(a, *, b): return a
'''
BASE = """
class Base:
    def __init__(self, size): self.size = size
    def inherited(self): return 1
def helper(): "Helps."; return 2
"""


@pytest.fixture
def tree(tmp_path):
    """A small megatron-core, as sources alone."""
    core = tmp_path / "megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("from . import part\n")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    (core / "part.py").write_text(BEFORE)
    (core / "base.py").write_text(BASE)
    return core


def small_table(tmp_path: Path, **takes: list[str]) -> list[Row]:
    """Rows of the small tree with its digests."""
    kinds = {"part": "module", "Child": "class", "Child.own": "function", "value": "value"}
    kinds |= dict.fromkeys(("Child.inherited", "helped", "function"), "function")
    rows = []
    for name, kind in kinds.items():
        module = "megatron.core" if kind == "module" else "megatron.core.part"
        row = Row(kind=kind, why="to test", ours="x.y", takes=tuple(takes.get(name, ())))
        row.module, row.name = module, name
        rows.append(row)
    found = command.review(command.Sources(tmp_path), rows, "0.20.0")
    assert found.errors == []
    for row in rows:
        if row.kind != "module":
            row.digests = {"0.20.0": found.digests[row.module, row.name]}
    return rows


@pytest.mark.parametrize(
    ("file", "old", "new", "errors", "changed"),
    [
        ("part.py", "Of two", "Of three", [], []),
        ("part.py", "return one", "return  (one)", [], []),
        ("part.py", "return one", "return 1", [], ["Child.own"]),
        ("base.py", "return 1", "return 3", [], ["Child.inherited"]),
        ("base.py", "return 2", "return 3", [], ["helped"]),
        ("part.py", "value = 1", "value = 2", [], ["value"]),
        ("part.py", "class Child(Base)", "class Child(object, Base)", [], ["Child"]),
        ("part.py", "(a, *, b)", "(a, *, c)", ["function no longer accepts b"], ["function"]),
        ("part.py", "def function", "def gone", ["function is missing"], []),
        ("base.py", "def inherited", "def gone", ["Child.inherited is missing"], []),
        ("part.py", "def function(a, *, b): return a", "function = 1",
         ["function is a value", "function no longer accepts a, b"], ["function"]),
    ],
)  # fmt: skip
def test_a_changed_tree_is_reviewed(tree, tmp_path, file, old, new, errors, changed):
    rows = small_table(tmp_path, function=["a", "b"])
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    found = command.review(command.Sources(tmp_path), rows, "0.20.0")
    assert len(found.errors) == len(errors)
    for error, wanted in zip(found.errors, errors, strict=True):
        assert error.startswith(f"megatron.core.part.{wanted}")
        assert error.endswith("; x.y: to test")
    listed = [line.split(";")[0] for line in found.changed.get("0.20.0", [])]
    assert listed == [f"megatron.core.part.{name}" for name in changed]


def test_a_new_row_gets_the_digest_of_each_version_that_has_its_name(tree, tmp_path):
    """A row that had the digest of one version was taken for a name that others lack."""
    rows = small_table(tmp_path)
    digests = {row.path: dict(row.digests) for row in rows}
    for row in rows:
        if row.digests:
            row.digests = {"0.19.2": row.digests["0.20.0"]}
    (tree / "part.py").write_text(BEFORE.replace("def function", "def gone"))
    (tree / "base.py").write_text(BASE.replace("return 2", "return 3"))
    found = command.review(command.Sources(tmp_path), rows, "0.20.0")
    assert found.errors == []
    assert "function" not in {name for _, name in found.digests}
    kept = digests["megatron.core.part.Child"]["0.20.0"]
    assert found.digests["megatron.core.part", "Child"] == kept
    assert [line.split(";")[0] for line in found.changed["0.19.2"]] == ["megatron.core.part.helped"]

    table = tmp_path / "table.yaml"
    modules = {}
    for row in rows:
        fields = {"kind": row.kind, "why": row.why, "ours": row.ours, "digests": row.digests}
        modules.setdefault(row.module, {})[row.name] = fields
    table.write_text(yaml.safe_dump(modules))
    command.write(table, found.digests, "0.20.0")
    written = yaml.safe_load(table.read_text())["megatron.core.part"]
    assert written["Child"]["digests"] == {"0.19.2": kept, "0.20.0": kept}
    assert written["function"]["digests"].keys() == {"0.19.2"}


def test_the_command_fails_for_a_tree_without_the_names(tree, tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "error: megatron.core.optimizer.optimizer.ChainedOptimizer is missing" in printed
    assert f"{len(read_table())} names: " in printed


IS_20 = upstream.like(INSTALLED).startswith("0.20")


@pytest.mark.skipif(not IS_20, reason="megatron-core 0.20 alone")
def test_loading_with_another_schedule_keeps_the_rates_of_each_group(monkeypatch):
    """0.20 gives all groups --lr and --min-lr after loading, in new dicts; here as it does."""
    from megatron_muon.megatron.upstream import v0_20

    parameters = [torch.zeros(1), torch.zeros(1)]
    rates = [{"max_lr": 7e-3, "min_lr": 0.0}, {"max_lr": 2e-3, "min_lr": 1e-4}]
    optimizer = SimpleNamespace(param_groups=[])
    for p, of_group in zip(parameters, rates, strict=True):
        optimizer.param_groups.append({"params": [p], **of_group})
    steps = []
    scheduler = SimpleNamespace(step=lambda increment: steps.append(increment))

    def load_checkpoint(ddp_model, optimizer, opt_param_scheduler):
        optimizer.param_groups = [{"params": [p], "max_lr": 2e-3} for p in parameters]
        return 3, 0

    monkeypatch.setattr(training, "load_checkpoint", load_checkpoint)
    for overrides in (True, False):
        flags = SimpleNamespace(override_opt_param_scheduler=overrides)
        monkeypatch.setattr(v0_20, "get_args", partial(copy, flags))
        with Patches() as patches:
            v0_20.keep_rates(patches)
            assert training.load_checkpoint([], optimizer, scheduler) == (3, 0)
        kept = [{name: group.get(name) for name in rates[0]} for group in optimizer.param_groups]
        assert (kept == rates) is overrides
    assert steps == [0]


@pytest.mark.skipif(not IS_20, reason="megatron-core 0.20 alone")
def test_only_mixers_that_this_package_splits_have_marks_of_megatron():
    """Marks of other modules would be the script's."""
    sources = command.Sources(Path(megatron.core.__file__).parents[2])
    found = set()
    for module in ("mamba_mixer", "gated_delta_product"):
        tree = sources.tree(f"megatron.core.ssm.{module}")
        found |= {
            each.name
            for each in tree.body
            if isinstance(each, ast.ClassDef)
            and '"use_muon"' in ast.unparse(each).replace("'", '"')
        }
    assert found == {"MambaMixer", "GatedDeltaProductMixer"}
    for name in found:
        assert upstream.installed().has_marked(type(name, (), {})())
    assert not upstream.installed().has_marked(torch.nn.Linear(1, 1))


def test_a_muon_that_megatron_has_turned_off_is_explained(monkeypatch):
    """It says "install emerging-optimizers" where an import from that package fails."""
    name = "megatron.core.optimizer.emerging_optimizers"
    monkeypatch.setattr(f"{name}.HAVE_EMERGING_OPTIMIZERS", False)
    monkeypatch.setitem(sys.modules, "emerging_optimizers.soap", None)  # as in 0.5
    why = (
        r"does not work with emerging-optimizers \S+ \(`from emerging_optimizers.soap import SOAP`"
    )
    with pytest.raises(UserError, match=f"{why} fails: .*type: pip install 'emerging-optim"):
        upstream.check.__wrapped__(name)
