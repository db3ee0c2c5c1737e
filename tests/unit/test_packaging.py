"""setup.py, requirements/lock.txt and the scripts agree, and set-up says clearly what it lacks."""

import ast
import functools
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import megatron_muon
from megatron_muon import cli

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "lock.txt"
FOLDERS = ("scripts/**/*.sh", "scripts/slurm/*.sbatch", "requirements/*.sh", "examples/*_*.sh")
SCRIPTS = [file for folder in FOLDERS for file in ROOT.glob(folder) if file.stem != "train_once"]
TOOLS = "bash cat cksum dirname env grep head mv rm sed sleep tail uname wc"
READ_SETUP = """
import json
import setuptools
import distutils.core
dist = distutils.core.run_setup("setup.py", stop_after="init")
print(json.dumps({
    "version": dist.metadata.version,
    "requires": dist.install_requires, "extras": dist.extras_require,
    "packages": dist.packages,
    "package_data": dist.package_data, "scripts": dist.entry_points["console_scripts"],
}))
"""


@functools.cache
def setup_metadata() -> dict:
    """What setup.py declares, read in a process of its own so that nothing of distutils stays
    behind.
    """
    done = subprocess.run(
        [sys.executable, "-c", READ_SETUP], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return ast.literal_eval(done.stdout.strip().splitlines()[-1])


@functools.cache
def lock_pins() -> dict[str, Version]:
    lines = [
        line for line in LOCK.read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", line) for line in lines]
    assert all(pins), (
        f"not NAME==VERSION: {[line for line, pin in zip(lines, pins, strict=True) if not pin]}"
    )
    versions = {canonicalize_name(pin[1]): Version(pin[2]) for pin in pins}
    assert len(versions) == len(pins), "a name is pinned twice"
    assert "megatron-muon" not in versions, "the package itself is installed from the checkout"
    return versions


def test_setup_declares_the_version_the_types_and_a_command_that_exists():
    metadata = setup_metadata()
    assert metadata["version"] == megatron_muon.__version__
    assert "py.typed" in metadata["package_data"]["megatron_muon"]
    assert (ROOT / "megatron_muon" / "py.typed").is_file()
    (script,) = metadata["scripts"]
    name, _, target = script.partition(" = ")
    assert EntryPoint(name, target, "console_scripts").load() is cli.main


@pytest.mark.parametrize("group", ["requires", "plots", "dev"])
def test_lock_lies_within_the_ranges(group):
    metadata = setup_metadata()
    for line in metadata["requires"] if group == "requires" else metadata["extras"][group]:
        requirement = Requirement(line)
        version = lock_pins().get(canonicalize_name(requirement.name))
        assert version is not None, f"{line}: not in requirements/lock.txt"
        assert version in requirement.specifier, f"{line}: requirements/lock.txt has {version}"


@pytest.mark.parametrize(
    "script",
    [*SCRIPTS, ROOT / ".ci/run"],
    ids=lambda path: path.name,
)
def test_scripts_are_executable_bash(script):
    assert script.stat().st_mode & stat.S_IXUSR, f"chmod +x {script}"
    assert script.read_text("utf-8").startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", script], check=True)


def test_the_script_hands_its_flags_and_the_ranks_to_the_command(tmp_path):
    """It takes the place of the script's process, so that signals reach it and its exit status is
    the script's.
    """
    tree = tmp_path / "a tree"
    for name, code in (
        ("scripts/lib/setup.sh", "exit 0"),
        (".venv/bin/megatron-muon", 'echo "$PPID $*"\nexit 7'),
    ):
        (tree / name).parent.mkdir(parents=True)
        (tree / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (tree / name).chmod(0o755)
    shutil.copy(ROOT / "scripts/quickstart.sh", tree / "scripts/quickstart.sh")
    line, env = [tree / "scripts/quickstart.sh", "--muon-lr", "0.01"], {**os.environ, "NPROC": "3"}
    done = subprocess.run(
        line,
        cwd="/",
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stdout.splitlines()[-1] == f"{os.getpid()} quickstart --nproc 3 -- --muon-lr 0.01"


# scripts/lib/setup.sh on a machine of another make


@pytest.fixture
def bare_machine(tmp_path):
    """A tree without .venv at a path with spaces, and an environment whose PATH holds no Python."""
    tree, tools = tmp_path / "a tree", tmp_path / "tools"
    for folder in (tree / "scripts/lib", tree / "requirements", tree / "megatron_muon", tools):
        folder.mkdir(parents=True)
    for name in ("setup.py", ".python-version", "megatron_muon/version.py", "scripts/lib/setup.sh"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copy(ROOT / "scripts/lib/check_env.py", tree / "scripts/lib")
    (tree / "requirements" / "lock.txt").write_text("nothing==1.0\n")
    for tool in TOOLS.split():
        (tools / tool).symlink_to(shutil.which(tool))
    environment = {"PATH": str(tools), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "none")}
    return tree, tools, environment


def run_setup(tree, environment):
    return subprocess.run(
        [tree / "scripts/lib/setup.sh"],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def fake_python(path, answer):
    """A stand-in for an interpreter: answers the probe, and says what else it was asked."""
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then printf \'{answer}\\n%s\\n\' "$0"; exit; fi\necho'
        ' "asked: $*" >&2\nexit 3\n'
    )
    path.chmod(0o755)


@pytest.mark.parametrize("version", [None, "3.11", "3.12 without python3.12-venv"])
def test_no_python_is_one_line_and_exit_1_and_unusable_ones_are_named(bare_machine, version):
    tree, tools, environment = bare_machine
    if version is not None:
        fake_python(tools / "python3", version)
    done = run_setup(tree, environment)
    assert (
        done.returncode,
        done.stdout,
        len(done.stderr.splitlines()),
    ) == (1, "", 1), done.stderr
    assert (
        f"{tools / 'python3'} is {version}" if version else "no Python 3.12 or 3.13 found"
    ) in done.stderr
    assert version or "apt install python3.12" in done.stderr
    assert not (tree / ".venv").exists()


def test_python_of_the_lock_wins_over_a_newer_one_and_a_named_one_over_both(bare_machine, tmp_path):
    tree, tools, environment = bare_machine
    fake_python(tools / "python3", "3.13")
    fake_python(tools / "python3.12", "3.12")
    made = run_setup(tree, environment).stderr
    assert f"making .venv with Python 3.12 ({tools / 'python3.12'})" in made
    done = run_setup(tree, {**environment, "PYTHON": str(tools / "python3")})
    assert f"making .venv with Python 3.13 ({tools / 'python3'})" in done.stderr
    assert f"asked: -m venv {tree / '.venv'}" in done.stderr
    assert done.returncode == 1  # the stand-in makes no environment, and set-up says so
    assert "failed: see above" in done.stderr


def check_env(site_packages, *arguments):
    script = ROOT / "scripts" / "lib" / "check_env.py"
    code = (
        "import runpy, sys, sysconfig\n"
        f"sysconfig.get_path = lambda name: {str(site_packages)!r}\n"
        f"sys.argv[1:] = {[str(argument) for argument in arguments]!r}\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_broken_distributions_are_found_and_their_metadata_removed(tmp_path):
    """An interrupted pip leaves METADATA without RECORD, or files cut short, and takes that for
    installed.
    """
    lock = tmp_path / "lock.txt"
    lock.write_text("# comment\ngood==1\nGone.File==1\nno-record==1\nother_version==2\nabsent==1\n")
    for name, version, recorded, content in [
        ("good", "1", 4, b"good"),
        ("gone_file", "1", 4, None),
        ("no_record", "1", None, b"file"),
        ("other_version", "1", 4, b"file"),
    ]:
        metadata = tmp_path / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        if recorded is not None:
            kept = f"{metadata.name}/METADATA,,\n"  # one that is there beside one that may not be
            (metadata / "RECORD").write_text(f"{kept}{name}.py,sha256=x,{recorded}\n{name}.pyc,,\n")
        if content is not None:
            (tmp_path / f"{name}.py").write_bytes(content)
    broken = ["absent", "gone-file", "no-record", "other-version"]
    assert check_env(tmp_path, lock) == broken
    assert check_env(tmp_path, "--repair", lock) == broken
    assert {path.name for path in tmp_path.glob("*.dist-info")} == {
        "good-1.dist-info",
        "other_version-1.dist-info",  # whole, so pip replaces it in the ordinary way
    }


def test_a_command_that_needs_megatron_says_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['megatron'] = None\n", "utf-8"
    )
    commands = ["train --dry-run", "plan --world-size 2"]
    lines = ["quickstart", *(f"{line} --config configs/quickstart.yaml" for line in commands)]
    code = (
        "import sys; from megatron_muon.cli import main; print(*(main(line.split()) for line in"
        " sys.argv[1:]))"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    line = [sys.executable, "-c", code, *lines]
    run = subprocess.run(
        line,
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines()[-1].split() == ["2"] * len(lines), run.stderr
    errors = [line for line in run.stderr.splitlines() if "error:" in line]
    assert len(errors) == len(lines), run.stderr
    assert all(
        line.endswith("type pip install '.[megatron]' in the checkout of megatron_muon")
        for line in errors
    )


WITH = {
    "tokenizers": "transformers",
    "safetensors": "transformers",
    "huggingface_hub": "transformers",
    "yaml": "pyyaml",
    "megatron": "megatron-core",
    "triton": "torch",
}
"""Packages by what installs them, where that has another name or is another package's need."""


def test_all_that_is_imported_is_declared() -> None:
    """A package that only this environment has would be missing after `pip install .`, in an empty
    environment.
    """
    files = [file for file in (ROOT / "megatron_muon").rglob("*.py") if "shipped" not in file.parts]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    declared = [
        *setup_metadata()["requires"],
        *(one for extra in setup_metadata()["extras"].values() for one in extra),
    ]
    names = {canonicalize_name(Requirement(one).name) for one in declared}
    others = found - sys.stdlib_module_names - {"megatron_muon"}
    assert {
        name for name in others if canonicalize_name(WITH.get(name, name)) not in names
    } == set()


# scripts/versions.py: the table that it keeps, and what it takes from the lock


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """The script, with a page of its own."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / "scripts/versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{module.HEADER}\nMore.\n")
    monkeypatch.setattr(module, "PAGE", page)
    return module


def test_a_failed_test_is_named_and_the_page_has_the_table(versions):
    failed = {"passed": 1200, "failed": ["tests.unit.test_x::test_y"], "skipped": 0, "seconds": 1}
    pair = {"torch": "2.15.0", "python": "3.12.1", "commit": "0123456789"}
    versions.write({**pair, "unit": failed, "functional": {**failed, "failed": []}})
    named = "1,200 passed, 1 failed (`tests.unit.test_x::test_y`) | 1,200 passed | 0123456789 |"
    assert f"| 2.15.0 | 3.12.1 | {named}" in versions.PAGE.read_text()
    assert versions.HEADER in (ROOT / "docs/questions.md").read_text("utf-8")
    assert all((ROOT / name).is_file() for name in versions.FUNCTIONAL)


def test_what_a_release_of_torch_chooses_is_not_taken_from_the_lock(versions):
    lines = (ROOT / "requirements/lock.txt").read_text("utf-8").splitlines()
    left_out = {line.partition("==")[0] for line in lines if versions.OF_TORCH.match(line)}
    assert {"torch", "triton", "setuptools"} < left_out
    assert all(re.match("torch|triton|setuptools|nvidia-|cuda-", name) for name in left_out)
