"""The folder of a run: where it is, what lies in it, when it may be used again. Plain files, no torch.

docs/experiments.md lists its files, and the fields of run.json and summary.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_muon.checkpoint import folders
from megatron_muon.checkpoint.locks import Lock
from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS, WANDB_RUN, places
from megatron_muon.megatron.places import CHECKPOINTS, EVENT_FILES, TENSORBOARD, RunFolder

_PLAIN = re.compile(r"[A-Za-z0-9/_.][A-Za-z0-9/_.,+=@%-]*\Z")
"""Needs no quotes in an experiment file."""


def places_of(root: Path, run: Mapping[str, Any]) -> RunFolder:
    """Where the files of a run lie now, as far as its run.json says."""
    tensorboard, save = (
        Path(moved(run.get(key) or str(root / name), run, root))
        for key, name in (("tensorboard_dir", TENSORBOARD), ("checkpoint_dir", CHECKPOINTS))
    )
    return RunFolder(root, tensorboard if tensorboard.is_dir() else root / TENSORBOARD, save)


def moved(path: str, run: Mapping[str, Any], root: Path) -> str:
    """Where a file or folder of a run is now that its folder may have been copied or renamed to `root`.

    A copy must neither go on from the original's checkpoints nor write into them.
    """
    if "folder" not in run:  # no run.json
        return path
    was, now = (
        Path(os.path.normpath(Path(run["directory"], each))) for each in (run["folder"], path)
    )
    if not now.is_relative_to(was) or (was.exists() and was.samefile(root)):
        return path
    return str(root / now.relative_to(was))


def name_of(config: Path) -> str:
    """A run's name after its experiment file; Megatron-LM's are all called model_config.yaml, so after their folder."""
    return (
        config.resolve().parent.name if config.stem in ("model_config", "config") else config.stem
    )


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file such that it is there whole or not at all; numbers that are not finite are null."""
    with folders.written_at_once(file) as stream:
        stream.write(json_text(content))


def json_text(content: Any) -> str:
    """Indented JSON, with null for numbers that are not finite."""
    return (
        msgspec.json.format(msgspec.json.encode(content, enc_hook=float), indent=2).decode() + "\n"
    )


def lock_of(root: Path) -> Lock:
    """The lock that whoever launched a run in `root` holds to its end."""
    return Lock(root / ".run.lock", f"a run is under way in {root}", "give another --out DIR")


def check_free(folder: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Raises a UserError where a user's files lie, or a run with steps, unless told to go on or to start anew."""
    if file := places.foreign_file(folder.root):
        raise UserError(
            f"{file} was not written by `megatron-muon train`; give another folder with --out DIR"
        )
    if not (resume or overwrite) and (what := places.held_by(folder)):
        raise UserError(
            f"{what}; give another folder with --out DIR, go on with that run with --resume, or"
            " start it anew with --overwrite, which deletes it"
        )


def refuse_living(folder: RunFolder) -> None:
    """Raises a UserError for a folder where a run is under way, or whose ranks have outlived it."""
    lock_of(folder.root).refuse_if_held()
    if folder.checkpoints is not None:
        folders.lock_of(folder.checkpoints).refuse_if_held()


def clear(folder: RunFolder) -> None:
    """Deletes a run's files, events and checkpoints; a UserError where they lie elsewhere, as others' may lie there."""
    root = folder.root
    for place in filter(None, (folder.tensorboard, folder.checkpoints)):
        if place.exists() and place.resolve().parent != root.resolve():
            raise UserError(
                f"--overwrite deletes nothing outside of {root}; remove {place} yourself, or give"
                " --out DIR"
            )
    own = (
        places.CONFIG,
        places.RUN,
        places.LOG,
        places.SUMMARY,
        WANDB_RUN,
        f"{places.TRACES}/{places.TRACE}",
    )
    for file in (
        *(file for name in own for file in root.glob(name)),
        *folder.tensorboard.glob(EVENT_FILES),
    ):
        file.unlink()
    (folder.tensorboard / FACTS).unlink(missing_ok=True)
    shutil.rmtree(root / "wandb", ignore_errors=True)
    if folder.checkpoints is not None:
        folders.delete_all(folder.checkpoints)


def config_text(
    flags: Iterable[tuple[str, tuple[str, ...]]], env: Mapping[str, str], *, heading: str
) -> str:
    """An experiment file that `config_file.load_config` reads back as exactly these flags and variables."""
    lines = [f"# {line}" for line in heading.splitlines()]
    if env:
        lines += ["ENV_VARS:", *(f"  {name}: {_quoted(value)}" for name, value in env.items())]
    lines += ["MODEL_ARGS:", *(f"  {flag}: {_written(values)}" for flag, values in flags)]
    return "\n".join(lines) + "\n"


def _written(values: tuple[str, ...]) -> str:
    if not values:
        return "true"
    is_alone = (
        len(values) == 1
        and values[0].lower() not in ("true", "false")
        and not values[0].startswith("[")
    )
    return _quoted(values[0]) if is_alone else f"[{', '.join(map(_quoted, values))}]"


def _quoted(text: str) -> str:
    if _PLAIN.match(text) and text.lower() not in ("null", "true", "false"):
        return text
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)


def config_hash(flags: Iterable[tuple[str, tuple[str, ...]]], env: Mapping[str, str]) -> str:
    """sha256 of the settings, in hexadecimal, whatever their order; where things lie is left out."""
    settings = sorted((flag, list(values)) for flag, values in flags if flag not in places.PLACES)
    return hashlib.sha256(json.dumps([settings, sorted(env.items())]).encode()).hexdigest()
