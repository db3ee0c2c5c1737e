"""The contents of the wheel, which is built here, without a network and in seconds."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {f"scripts/slurm/{name}.sbatch" for name in ("pretrain", "sweep")}
NOT_COPIED = {".venv", ".git", "build", "dist", "runs", "data"}


def build(tree: Path, to: Path) -> Path:
    """Builds the wheel of a tree by the backend in pyproject.toml, as pip does."""
    code = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, to], cwd=tree, check=True, capture_output=True, text=True
    )
    (file,) = to.glob("*.whl")
    return file


def contents(wheel: Path) -> dict[str, str]:
    """A digest of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def below(*folders: str) -> set[str]:
    """Files of the repository under some folders."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file())
    return {str(file.relative_to(ROOT)) for file in files if file.suffix not in (".pyc", ".log")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel of a copy of this tree, in which an earlier build has left a stale module."""
    tree, to = (tmp_path_factory.mktemp(name) for name in ("tree", "built"))
    shutil.copytree(
        ROOT,
        tree,
        ignore=lambda folder, _: NOT_COPIED if folder == str(ROOT) else {"__pycache__"},
        dirs_exist_ok=True,
    )
    stale = tree / "build/lib/megatron_muon/gone.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    return build(tree, to)


def test_a_wheel_has_the_package_the_configs_and_slurms_scripts_and_nothing_else(built):
    of_package = {name for name in contents(built) if ".dist-info/" not in name}
    shipped = {f"megatron_muon/shipped/{name}" for name in below("configs") | SCRIPTS}
    assert of_package == below("megatron_muon") | shipped
    assert "megatron_muon/py.typed" in of_package
    assert len(shipped) > 10


def test_an_installed_wheel_finds_its_files(built, tmp_path):
    """From an empty folder, with nothing of the repository on the path."""
    site, config = tmp_path / "site", "configs/recipes/muonh.yaml"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    code = f"from megatron_muon import shipped; print(shipped.find(shipped.Path({config!r})))"
    line, environ = (
        [sys.executable, "-P", "-c", code],
        {
            **os.environ,
            "PYTHONPATH": str(site),
        },
    )
    done = subprocess.run(
        line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(site / "megatron_muon/shipped" / config)
