"""Which checkpoints are complete and as they were written, and how one takes its place.

Story: of 30 flipped bits 22 were loaded without a word, and so was a rank's file of another
iteration.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_muon.checkpoint import content, folders
from megatron_muon.errors import UserError
from megatron_muon.megatron.checkpoint import loading, saving
from megatron_muon.patching import Patches
from megatron_muon.tools.doctor import doctor_command as doctor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(folder: Path, iteration: int = 8) -> Path:
    """A complete checkpoint of two tensors and two objects."""
    model = {"w": torch.arange(1000.0) + iteration, "v": torch.ones(3)}
    state = {"model": model, "iteration": iteration, "args": None}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.fixture
def save_dir(tmp_path: Path, patches: Patches) -> Path:
    """Two checkpoints with checksums, the second the latest."""
    saving.save_beside_and_rename(patches)
    for iteration in (4, 8):
        write(folders.iteration_folder(tmp_path, iteration), iteration)
    (tmp_path / folders.TRACKER).write_text("8")
    return tmp_path


@pytest.fixture
def latest(save_dir: Path) -> Path:
    return folders.iteration_folder(save_dir, 8)


def found_by_doctor(save_dir: Path, state: str = "wrong") -> list[str]:
    return [finding.text for finding in doctor.checkpoint(save_dir) if finding.state == state]


def test_complete_checkpoints(save_dir: Path, latest: Path) -> None:
    """The checksums are those that any other program finds."""
    assert folders.iterations(save_dir) == [4, 8]
    assert folders.latest(save_dir) == 8
    assert folders.newest_complete(save_dir) == 8
    assert folders.newest_complete(save_dir, but=8) == 4
    assert folders.problems(latest) == found_by_doctor(save_dir) == []
    loading._require_sound(latest, verify=True)
    assert content.read(latest)["model.w"].tolist() == list(range(8, 1008))
    assert content.read(latest, ["iteration", "none"]) == {"iteration": 8}
    names = {entry.name for entry in latest.iterdir()}
    assert names == {".metadata", "__0_0.distcp", folders.CHECKSUMS}
    sums = json.loads((latest / folders.CHECKSUMS).read_text())["crc32"]
    assert sums == {
        name: f"{zlib.crc32((latest / name).read_bytes()):08x}"
        for name in names - {folders.CHECKSUMS}
    }


DAMAGES = {
    "__0_0.distcp is cut short: 1,000 of ": lambda it: os.truncate(it / "__0_0.distcp", 1000),
    "__0_0.distcp cannot be read": lambda it: (it / "__0_0.distcp").unlink(),
    "has no .metadata: its save did not finish": lambda it: (it / ".metadata").unlink(),
    ".metadata cannot be read": lambda it: os.truncate(it / ".metadata", 100),
    ".metadata holds a int": lambda it: (it / ".metadata").write_bytes(pickle.dumps(7)),
    "does not exist": shutil.rmtree,
}


@pytest.mark.parametrize("says", DAMAGES)
def test_damage_without_checksums(save_dir: Path, latest: Path, says: str) -> None:
    (latest / folders.CHECKSUMS).unlink()
    DAMAGES[says](latest)
    (found,) = folders.problems(latest)
    assert says in found
    assert folders.newest_complete(save_dir) == 4
    assert "resume with --load" in folders.resume_hint(save_dir)
    assert "--ckpt-step 4" in folders.resume_hint(save_dir)


def test_thirty_flipped_bits(save_dir: Path, latest: Path) -> None:
    """Anywhere in the files, those of the metadata and of the checksums included; a run finds the
    first two alone.
    """
    rng = random.Random(5)
    paths = sorted(latest.iterdir())
    for flip in range(30):
        path = paths[flip % len(paths)]
        whole = path.read_bytes()
        bit = rng.randrange(len(whole) * 8)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        found, remedy = found_by_doctor(save_dir)
        assert f"{path.name} is damaged" in found, flip
        assert "--ckpt-step 4" in remedy
        if path.suffix != ".distcp":  # which the ranks compare together
            with pytest.raises(UserError, match=rf"{path.name} is damaged: .*--ckpt-step 4$"):
                loading._require_sound(latest, verify=True)
        path.write_bytes(whole)
    assert found_by_doctor(save_dir) == []


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", folders.CHECKSUMS])
def test_a_file_of_another_iteration(save_dir: Path, latest: Path, name: str) -> None:
    """It has the right size and is sound in itself."""
    of_4 = folders.iteration_folder(save_dir, 4) / name
    assert of_4.stat().st_size == (latest / name).stat().st_size
    shutil.copyfile(of_4, latest / name)
    accused = ".metadata" if name == folders.CHECKSUMS else name
    assert f"{accused} is damaged: its CRC-32 is " in found_by_doctor(save_dir)[0]


def test_one_that_was_written_without_loads_with_a_note(
    save_dir: Path, latest: Path, capsys
) -> None:
    (latest / folders.CHECKSUMS).unlink()
    loading._require_sound(latest, verify=True)
    assert (
        "iter_0000008 was written without checksums; the content of its files is not verified"
        in capsys.readouterr().out
    )
    assert "was written without checksums" in " ".join(found_by_doctor(save_dir, "note"))


@pytest.mark.parametrize("text", ["", "{}", "a directory"])
def test_without_verification_damaged_checksums_do_not_count(latest: Path, text: str) -> None:
    """The message named no way on, and --no-verify-checkpoint was none."""
    sums = latest / folders.CHECKSUMS
    sums.unlink()
    sums.mkdir() if text == "a directory" else sums.write_text(text)
    with pytest.raises(
        UserError, match=r"checksums\.json .*; --no-verify-checkpoint loads without it; .*-step 4$"
    ):
        loading._require_sound(latest, verify=True)
    loading._require_sound(latest, verify=False)
    (latest / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(UserError, match=r"__0_0\.distcp is cut short"):
        loading._require_sound(latest, verify=False)


@pytest.mark.parametrize("text", ["", "8x", "\xff\xfe4"])
def test_a_tracker_that_names_no_iteration(save_dir: Path, text: str) -> None:
    """Killed between opening and writing it: 0.19 ended the next run here, with exit status 0."""
    tracker = save_dir / folders.TRACKER
    tracker.write_text(text, "latin1")
    with pytest.raises(UserError, match=rf"instead of an iteration; type echo 8 > {tracker}$"):
        folders.latest(save_dir)
    tracker.unlink()
    assert folders.latest(save_dir) is None


@pytest.mark.parametrize("has_sums", [False, True])
def test_a_save_that_is_damaged_before_the_rename_replaces_nothing(
    save_dir: Path, latest: Path, has_sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes, and the index with its checksum, are looked at once more."""
    finish, before = folders.finish, (latest / ".metadata").stat().st_ino

    def damage_and_finish(folder: Path, sums: dict[str, int]) -> None:
        aside = folder.with_name(folder.name + folders.UNFINISHED)
        os.truncate(aside / (".metadata" if has_sums else "__0_0.distcp"), 10)
        finish(folder, sums if has_sums else None)

    monkeypatch.setattr(folders, "finish", damage_and_finish)
    with pytest.raises(OSError, match=r"\.metadata is damaged" if has_sums else "cut short: 10 of"):
        write(latest)
    assert folders.problems(latest) == []
    assert (latest / ".metadata").stat().st_ino == before


def test_the_same_iteration_again(save_dir: Path, latest: Path) -> None:
    """A save used to write over the files of the checkpoint that latest names."""
    before = (latest / ".metadata").stat().st_ino
    stale = folders.begin(latest)
    (stale / "__9_0.distcp").write_text("of a run with more ranks")
    write(folders.begin(latest))
    assert (latest / ".metadata").stat().st_ino == before
    folders.finish(latest)
    assert (latest / ".metadata").stat().st_ino != before
    assert sorted(entry.name for entry in latest.iterdir()) == [".metadata", "__0_0.distcp"]
    left = sorted(entry.name for entry in save_dir.iterdir())
    assert left == ["iter_0000004", "iter_0000008", folders.TRACKER]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    tracker = tmp_path / folders.TRACKER
    tracker.write_text("8")

    def fail() -> None:
        with folders.written_at_once(tracker) as stream:
            stream.write("12")
            stream.flush()
            assert tracker.read_text() == "8"
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert tracker.read_text() == "8"
    with folders.written_at_once(tracker) as stream:
        stream.write("12")
    assert tracker.read_text() == "12"
    assert list(tmp_path.iterdir()) == [tracker]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_kill_between_the_two_renames(save_dir: Path, latest: Path, is_whole: bool) -> None:
    """One of the two is whole: it gets the name back, the new one if it can."""
    old = (latest / ".metadata").stat().st_ino
    aside = write(folders.begin(latest))
    new = (aside / ".metadata").stat().st_ino
    if not is_whole:
        (aside / "__0_0.distcp").unlink()
    latest.rename(latest.with_name(latest.name + ".replaced"))
    folders.recover(save_dir)
    assert folders.problems(latest) == []
    assert (latest / ".metadata").stat().st_ino == (new if is_whole else old)
