"""Pickles of a checkpoint are read without running what they name, by a run's load and by the
doctor alike.

Story: whoever could write to a checkpoint could run any command on the machine that loaded it, or
that only looked.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.training import checkpointing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_muon.checkpoint import content, folders
from megatron_muon.errors import UserError
from megatron_muon.megatron.checkpoint import loading as checkpoint_loading
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.patching import Patches
from megatron_muon.tools.doctor import doctor_command as doctor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

assert megatron.core  # which tells torch the classes that its checkpoints may hold


class Command:
    """A pickle of it runs a command wherever it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """The file that the command makes; it must not be there in the end."""
    made = tmp_path / "made-by-the-pickle"
    yield made
    assert not made.exists()


def write(save_dir: Path, iteration: int = 8, **entries: Any) -> Path:
    folder = folders.iteration_folder(save_dir, iteration)
    state = {"model": {"w": torch.ones(3)}, "iteration": iteration, **entries}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def poison_index(folder: Path, command: Command) -> None:
    index = folder / ".metadata"
    poisoned = pickle.loads(index.read_bytes())
    poisoned.planner_data = command
    index.write_bytes(pickle.dumps(poisoned))


def load(folder: Path, *names: str) -> dict[str, Any]:
    """As megatron-core does it: with torch's own reader and planner."""
    state: dict[str, Any] = dict.fromkeys(names)
    dcp.load(
        state,
        storage_reader=dcp.FileSystemReader(folder),
        planner=DefaultLoadPlanner(),
        no_dist=True,
    )
    return state


def found_by_doctor(folder: Path) -> list[str]:
    return [finding.text for finding in doctor.checkpoint(folder) if finding.state == "wrong"]


def test_the_command_runs_without_the_patch(tmp_path: Path) -> None:
    """The tests below can fail."""
    folder = write(tmp_path, note=Command(f"touch {tmp_path / 'entry'}"))
    poison_index(folder, Command(f"touch {tmp_path / 'index'}"))
    load(folder, "note")
    assert (tmp_path / "entry").exists()
    assert (tmp_path / "index").exists()


def test_an_index_that_names_a_command(tmp_path: Path, mark: Path, patches: Patches) -> None:
    write(tmp_path, 4)
    folder = write(tmp_path)
    poison_index(folder, Command(f"touch {mark}"))
    names_it = r"\.metadata names posix\.system, which no checkpoint needs; it was not run"
    (found,) = folders.problems(folder)
    assert "names posix.system" in found
    with pytest.raises(UserError, match=names_it):
        content.read_entries(folder)
    assert "names posix.system" in found_by_doctor(folder)[0]
    assert "--ckpt-step 4" in found_by_doctor(folder)[1]
    checkpoint_loading.run_no_pickles(patches)
    with pytest.raises(UserError, match=names_it):
        dcp.FileSystemReader(folder).read_metadata()
    with pytest.raises(CheckpointException, match=r"names posix\.system"):
        load(folder, "iteration")


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()


PATH = b"cpathlib\nPosixPath\n"
ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
EVERY_PARENT_IS_ETC = b"(N}" + text("parent") + PATH + text("/etc") + b"\x85Rstb"
CHANGES = {
    "PosixPath": PATH + EVERY_PARENT_IS_ETC,
    "_MEM_FORMAT_ENCODING": ENCODING + b"K\x00\x85R}" + text("_value_") + b"K\x07sb",
    "function": b"ctorch.serialization\n_get_layout\n}" + text("x") + b"K\x07sb",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_an_index_changes_no_class(tmp_path: Path, kind: str) -> None:
    """Allowed classes are the process's own: state for one of them moved all paths, and the next
    save deleted there.
    """
    folder = write(tmp_path)
    sound = pickle.dumps(pickle.loads((folder / ".metadata").read_bytes()), protocol=2)
    (folder / ".metadata").write_bytes(
        sound[:2] + CHANGES[kind] + b"0" + sound[2:],
    )
    before = Path("/a/b").parent
    (found,) = folders.problems(folder)
    assert re.search(rf"\.metadata names changes of \S*{kind}, which .* do not trust this", found)
    assert Path("/a/b").parent == before


@pytest.mark.parametrize("name", ["args", "opt_param_scheduler"])
def test_an_entry_that_names_a_command(
    tmp_path: Path, mark: Path, patches: Patches, name: str
) -> None:
    write(tmp_path, 4)
    command = Command(f"touch {mark}")
    folder = write(
        tmp_path,
        **{name: command if name == "args" else {"x": [1, command]}},
    )
    assert folders.problems(folder) == []
    found, remedy = found_by_doctor(folder)
    assert f"entry '{name}" in found
    assert "posix.system" in found
    assert "--ckpt-step 4" in remedy
    entry = {"args": "args", "opt_param_scheduler": "opt_param_scheduler.x"}[name]
    with pytest.raises(UserError, match=r"posix\.system"):
        content.read(folder, [entry])
    checkpoint_loading.run_no_pickles(patches)
    with pytest.raises(CheckpointException, match=r"posix\.system"):
        load(folder, entry)
    assert load(folder, "iteration") == {"iteration": 8}


def test_what_megatron_saves_is_read(tmp_path: Path) -> None:
    """Arguments with the types that its flags have, states of random numbers, tensors within
    lists.
    """
    parser = arguments.build_parser()
    given = parser.parse_args(
        ["--attention-backend", "fused", "--exit-signal", "SIGUSR1", "--optimizer", "muon"]
    )
    given.params_dtype = torch.bfloat16
    rng = [
        {
            "np_rng_state": np.random.default_rng(1).integers(9, size=3, dtype=np.uint32),
            "random": (3, (1, 2), None),
        }
    ]
    folder = write(
        tmp_path,
        args=given,
        rng_state={"(0, 0)": rng},
        rates=(0.1, [torch.ones(2)]),
    )
    read = content.read(folder)
    assert vars(read["args"]) == vars(given)
    assert isinstance(read["args"], argparse.Namespace)
    assert read["args"].exit_signal is signal.SIGUSR1
    assert read["rng_state.(0, 0).0.np_rng_state"].tolist() == rng[0]["np_rng_state"].tolist()


def test_a_checkpoint_that_cannot_be_read_is_a_line(
    tmp_path: Path, monkeypatch, patches: Patches
) -> None:
    """A shard of zeros was 1,100 lines of traceback."""
    write(tmp_path, 4)
    folder = write(tmp_path)
    (tmp_path / folders.TRACKER).write_text("8")
    (folder / "__0_0.distcp").write_bytes(bytes((folder / "__0_0.distcp").stat().st_size))

    def read(load_dir: str, args: argparse.Namespace) -> Any:
        return load(folders.iteration_folder(Path(load_dir), 8), "iteration")

    monkeypatch.setattr(checkpointing, "_load_base_checkpoint", read)
    checkpoint_loading.run_no_pickles(patches)
    entry = r"entry 'iteration' cannot be read \("
    with pytest.raises(
        UserError, match=rf"checkpoint 8 in .* cannot be loaded \(rank 0: {entry}.*-step 4$"
    ) as raised:
        checkpointing._load_base_checkpoint(str(tmp_path), argparse.Namespace(ckpt_step=None))
    assert "weights_only" not in str(raised.value)
