"""Which checkpoints are complete, and how one takes its place."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_muon.checkpoint import content, files
from megatron_muon.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(folder: Path) -> Path:
    """A complete checkpoint of one tensor and one object."""
    state = {"model": {"w": torch.arange(1000.0)}, "iteration": 8}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    for iteration in (4, 8):
        write(files.iteration_folder(tmp_path, iteration))
    (tmp_path / files.TRACKER).write_text("8")
    return tmp_path


def test_complete_checkpoints(save_dir: Path) -> None:
    assert files.iterations(save_dir) == [4, 8]
    assert files.latest(save_dir) == 8
    assert files.newest_complete(save_dir) == 8
    assert files.newest_complete(save_dir, but=8) == 4
    assert files.problems(save_dir / "iter_0000008") == []
    assert content.read(save_dir / "iter_0000008")["model.w"].tolist() == list(range(1000))
    assert content.read(save_dir / "iter_0000008", ["iteration", "none"]) == {"iteration": 8}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: os.truncate(folder / "__0_0.distcp", 1000), "__0_0.distcp is cut short: 1,000 of "),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp cannot be read"),
        (lambda folder: (folder / ".metadata").unlink(), "has no .metadata: its save did not finish"),
        (lambda folder: os.truncate(folder / ".metadata", 100), ".metadata cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(7)), ".metadata holds a int"),
        (lambda folder: folder.rename(folder.parent / "elsewhere"), "does not exist"),
    ],
)
def test_damage(save_dir: Path, damage, says: str) -> None:
    damage(save_dir / "iter_0000008")
    (found,) = files.problems(save_dir / "iter_0000008")
    assert says in found
    assert files.newest_complete(save_dir) == 4
    assert "resume with --load" in files.resume_hint(save_dir)
    assert "--ckpt-step 4" in files.resume_hint(save_dir)


@pytest.mark.parametrize("text", ["", "8x", "iter_8", "\xff\xfe4"])
def test_a_tracker_that_names_no_iteration(save_dir: Path, text: str) -> None:
    """Killed between opening and writing it: 0.19 ended the next run here, with exit status 0."""
    tracker = save_dir / files.TRACKER
    tracker.write_text(text, "latin1")
    with pytest.raises(UserError, match=rf"instead of an iteration; .* iteration 8: type echo 8 > {tracker}$"):
        files.latest(save_dir)
    tracker.unlink()
    assert files.latest(save_dir) is None
    tracker.mkdir()
    with pytest.raises(UserError, match="Is a directory"):
        files.latest(save_dir)


def test_a_save_takes_its_place_when_it_is_whole(save_dir: Path) -> None:
    folder = files.iteration_folder(save_dir, 12)
    folder.mkdir()  # megatron-core makes it first
    aside = files.begin(folder)
    assert files.iterations(save_dir) == [4, 8]
    assert files.unfinished(save_dir) == [aside]
    write(aside)
    files.finish(folder)
    assert files.problems(folder) == []
    assert files.unfinished(save_dir) == []


def test_a_save_that_is_cut_short_replaces_nothing(save_dir: Path) -> None:
    folder = files.iteration_folder(save_dir, 8)
    write(files.begin(folder))
    os.truncate(save_dir / "iter_0000008.saving" / "__0_0.distcp", 10)
    with pytest.raises(OSError, match=r"cut short: 10 of"):
        files.finish(folder)
    assert files.problems(folder) == []


def test_the_same_iteration_again(save_dir: Path) -> None:
    """A save used to write over the files of the checkpoint that latest names."""
    folder = files.iteration_folder(save_dir, 8)
    before = (folder / ".metadata").stat().st_ino
    stale = files.begin(folder)
    (stale / "__9_0.distcp").write_text("of a run with more ranks")
    write(files.begin(folder))
    assert (folder / ".metadata").stat().st_ino == before
    files.finish(folder)
    assert (folder / ".metadata").stat().st_ino != before
    assert sorted(entry.name for entry in folder.iterdir()) == [".metadata", "__0_0.distcp"]
    assert sorted(entry.name for entry in save_dir.iterdir()) == ["iter_0000004", "iter_0000008", files.TRACKER]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_kill_between_the_two_renames(save_dir: Path, is_whole: bool) -> None:
    """One of the two is whole: it gets the name back, the new one if it can."""
    folder = files.iteration_folder(save_dir, 8)
    old = (folder / ".metadata").stat().st_ino
    aside = write(files.begin(folder))
    new = (aside / ".metadata").stat().st_ino
    if not is_whole:
        (aside / "__0_0.distcp").unlink()
    folder.rename(folder.with_name(folder.name + ".replaced"))
    files.recover(save_dir)
    assert files.problems(folder) == []
    assert (folder / ".metadata").stat().st_ino == (new if is_whole else old)


def test_a_file_appears_whole_or_not_at_all(save_dir: Path) -> None:
    tracker = save_dir / files.TRACKER

    def fail() -> None:
        with files.written_at_once(tracker) as stream:
            stream.write("12")
            stream.flush()
            assert tracker.read_text() == "8"
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert tracker.read_text() == "8"
    with files.written_at_once(tracker) as stream:
        stream.write("12")
    assert tracker.read_text() == "12"
    assert not [entry for entry in save_dir.iterdir() if entry.name.startswith(".")]


def test_what_is_missing() -> None:
    state = ("a.momentum_buffer", "b.exp_avg", "b.exp_avg_sq", "b.step", "d.exp_avg")
    settings = (content.setting("a", "lr"), content.setting("d", "eps"))
    entries = dict.fromkeys([*(f"optimizer.state.{name}" for name in state), *settings])
    wanted = {name: {"momentum_buffer": 0} for name in "abc"}
    wanted["d"] = dict.fromkeys(["exp_avg", "exp_avg_sq", "step"], 0)
    adaptive = content.compare({"a": {"momentum_buffer": 0, "moment2_buffer": 0}}, entries)
    assert adaptive == ({"a.momentum_buffer", "a.moment2_buffer"}, set(), {"a"})
    replaced, absent, fresh = content.compare(wanted, entries)
    assert replaced == {"b.momentum_buffer"}
    assert absent == {"c.momentum_buffer", "d.exp_avg", "d.exp_avg_sq", "d.step"}  # half a state is none
    assert fresh == {"b", "c", "d"}
    meta = {name: {"lr": 1.0, "momentum": 0.9, "is_expert_parallel": True} for name in "abcd"}
    asked = content.without_fresh({"state": wanted, "param_to_group_meta": meta}, fresh, entries)
    assert asked == {"state": {"a": {"momentum_buffer": 0}}, "param_to_group_meta": {"a": {"lr": 1.0}}}
    slots = content.optimizer_slots(entries)
    assert [content.optimizer_of(slots[name]) for name in "abd"] == ["muon", "adam", "lion"]


def test_state_of_another_size_starts_afresh() -> None:
    """NorMuon keeps a number for each row, AdaMuon one for each element."""

    class Stored:
        def __init__(self, *size: int) -> None:
            self.size = torch.Size(size)

    entries = {"optimizer.state.a.momentum_buffer": Stored(4, 2), "optimizer.state.a.moment2_buffer": Stored(4, 2)}
    whole, by_row = torch.zeros(4, 2), torch.zeros(4, 1)
    nothing = (set(), set(), set())
    assert content.compare({"a": {"momentum_buffer": whole, "moment2_buffer": whole}}, entries) == nothing
    other = content.compare({"a": {"momentum_buffer": whole, "moment2_buffer": by_row}}, entries)
    assert other == ({"a.momentum_buffer", "a.moment2_buffer"}, set(), {"a"})
    halves = {"b_w": {"momentum_buffer": whole, "moment2_buffer": torch.zeros(8, 1)}, "b_v": {"momentum_buffer": whole}}
    assert content.laid_out_by_rank({"a": {"momentum_buffer": whole, "moment2_buffer": whole}, **halves}) == {
        "b_w",
        "b_v",
    }
