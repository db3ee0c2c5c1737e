"""Checksums of a checkpoint's files: every flipped bit and every file of another iteration is found.

Story: of 30 flipped bits 22 were loaded without a word, and so was a rank's file of another iteration.
"""

from __future__ import annotations

import json
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_muon.checkpoint import checksums, files
from megatron_muon.errors import UserError
from megatron_muon.megatron.checkpoint import loading, saving
from megatron_muon.patching import Patches
from megatron_muon.tools import doctor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def save_dir(tmp_path: Path, patches: Patches) -> Path:
    """Two checkpoints, the second the latest, of a large and some small tensors and a few objects."""
    saving.save_beside_and_rename(patches)
    for iteration in (4, 8):
        torch.manual_seed(iteration)
        model = {f"w{i}": torch.randn(200, 300 if i else 3) for i in range(4)}
        state = {"model": model, "iteration": iteration, "args": None}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(files.iteration_folder(tmp_path, iteration)), no_dist=True)
    (tmp_path / files.TRACKER).write_text("8")
    return tmp_path


def latest(save_dir: Path) -> Path:
    return files.iteration_folder(save_dir, 8)


def found_by_doctor(save_dir: Path, state: str = "wrong") -> list[str]:
    return [finding.text for finding in doctor.checkpoint(save_dir) if finding.state == state]


def test_a_sound_checkpoint(save_dir: Path) -> None:
    """The checksums are those that any other program finds."""
    names = {entry.name for entry in latest(save_dir).iterdir()}
    assert names == {".metadata", "__0_0.distcp", checksums.NAME}
    sums = json.loads((latest(save_dir) / checksums.NAME).read_text())["crc32"]
    for name in names - {checksums.NAME}:
        assert sums[name] == f"{zlib.crc32((latest(save_dir) / name).read_bytes()):08x}"
    loading._require_sound(latest(save_dir), verify=True)
    assert found_by_doctor(save_dir) == []


def test_thirty_flipped_bits(save_dir: Path) -> None:
    """Anywhere in the files, those of the metadata and of the checksums included; a run finds the first two alone."""
    rng = random.Random(5)
    paths = sorted(latest(save_dir).iterdir())
    for flip in range(30):
        path = paths[flip % len(paths)]
        whole = path.read_bytes()
        bit = rng.randrange(len(whole) * 8)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        (found, remedy) = found_by_doctor(save_dir)
        assert f"{path.name} is damaged" in found, flip
        assert "--ckpt-step 4" in remedy
        if path.suffix != ".distcp":  # which the ranks compare together
            with pytest.raises(UserError, match=rf"{path.name} is damaged: .*--ckpt-step 4$"):
                loading._require_sound(latest(save_dir), verify=True)
        path.write_bytes(whole)
    assert found_by_doctor(save_dir) == []


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", checksums.NAME])
def test_a_file_of_another_iteration(save_dir: Path, name: str) -> None:
    """It has the right size and is sound in itself."""
    of_4 = files.iteration_folder(save_dir, 4) / name
    assert of_4.stat().st_size == (latest(save_dir) / name).stat().st_size
    shutil.copyfile(of_4, latest(save_dir) / name)
    accused = ".metadata" if name == checksums.NAME else name
    assert f"{accused} is damaged: its CRC-32 is " in found_by_doctor(save_dir)[0]


def test_one_that_was_written_without_loads_with_a_note(save_dir: Path, capsys) -> None:
    (latest(save_dir) / checksums.NAME).unlink()
    loading._require_sound(latest(save_dir), verify=True)
    assert "iter_0000008 was written without checksums; what its files hold is not verified" in capsys.readouterr().out
    assert "was written without checksums" in " ".join(found_by_doctor(save_dir, "note"))


@pytest.mark.parametrize("text", ["", "{}", "a directory"])
def test_without_verification_damaged_checksums_do_not_count(save_dir: Path, text: str) -> None:
    """The message named no way on, and --no-verify-checkpoint was none."""
    sums = latest(save_dir) / checksums.NAME
    sums.unlink()
    sums.mkdir() if text == "a directory" else sums.write_text(text)
    with pytest.raises(UserError, match=r"checksums\.json .*; --no-verify-checkpoint loads without it; .*-step 4$"):
        loading._require_sound(latest(save_dir), verify=True)
    loading._require_sound(latest(save_dir), verify=False)
    (latest(save_dir) / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(UserError, match=r"__0_0\.distcp is cut short"):
        loading._require_sound(latest(save_dir), verify=False)


def test_ranks_share_the_files() -> None:
    """Each is read by one rank, which is the one that wrote it where the layout is the same."""
    sums = dict.fromkeys([".metadata", *(f"__{rank}_0.distcp" for rank in range(12))], 0)
    for ranks in (1, 5, 12, 20):
        shares = [checksums.share(sums, rank, ranks) for rank in range(ranks)]
        assert sorted(name for share in shares for name in share) == sorted(sums.keys() - {".metadata"})
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert checksums.share(sums, 11, 12) == ["__11_0.distcp"]


def test_a_file_that_changes_before_the_rename_is_not_given_the_name(
    tmp_path: Path, patches: Patches, monkeypatch
) -> None:
    """The index is looked at once more; a save that has gone wrong replaces nothing."""
    saving.save_beside_and_rename(patches)
    finish = files.finish

    def damage(folder: Path, sums: dict[str, int]) -> None:
        index = folder.with_name(folder.name + files.UNFINISHED) / ".metadata"
        index.write_bytes(index.read_bytes() + b"\0")
        finish(folder, sums)

    monkeypatch.setattr(files, "finish", damage)
    writer = dcp.FileSystemWriter(latest(tmp_path))
    with pytest.raises(OSError, match=r"\.metadata is damaged"):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert files.iterations(tmp_path) == []
