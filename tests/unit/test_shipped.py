"""Files that come with the package: what is taken where, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_muon import cli, shipped
from megatron_muon.megatron.flags import config_file

QUICKSTART = Path("configs/quickstart.yaml")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_config_that_is_not_here_is_the_one_that_comes_along():
    found = shipped.find(QUICKSTART)
    assert found == shipped.FOLDER / QUICKSTART
    assert str(found) in shipped.note(QUICKSTART)
    assert dict(config_file.load_config(QUICKSTART).flags)["--optimizer"] == ("muon",)


def test_a_file_of_ones_own_wins():
    QUICKSTART.parent.mkdir()
    QUICKSTART.write_text("MODEL_ARGS:\n  --optimizer: adam\n")
    assert shipped.find(QUICKSTART) == QUICKSTART
    assert shipped.note(QUICKSTART) == ""
    assert dict(config_file.load_config(QUICKSTART).flags)["--optimizer"] == ("adam",)


@pytest.mark.parametrize("name", ["quickstart.yaml", "configs/none.yaml", "configs/../setup.py", "configs", "setup.py"])
def test_nothing_else_is_looked_for(name):
    """A name that is wrong stays wrong, and the message names it as it was typed."""
    assert shipped.find(Path(name)) == Path(name)


def test_files_of_an_installed_package_lie_within_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    assert shipped.note(QUICKSTART) == ""
    (tmp_path / "shipped/configs").mkdir(parents=True)
    (tmp_path / "shipped" / QUICKSTART).write_text("")
    assert shipped.find(QUICKSTART) == tmp_path / "shipped" / QUICKSTART


def test_a_command_says_once_which_file_it_takes(capsys):
    assert cli.main(["plan", "--config", str(QUICKSTART), "--world-size", "2"]) == 0
    assert capsys.readouterr().err.count("configs/quickstart.yaml is not in this folder: taking ") == 1
