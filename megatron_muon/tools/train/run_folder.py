"""The folder of a run: its files, their formats, and who may use it. Plain files, no torch.

docs/experiments.md lists its files, and the fields of run.json and summary.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError
from megatron_muon.megatron.places import (
    CHECKPOINTS,
    CONFIG,
    LOG,
    PLACES,
    RUN,
    SUMMARY,
    TENSORBOARD,
    RunFolder,
    held_by,
    read_json,
)

type Flags = Iterable[tuple[str, tuple[str, ...]]]
"""Flags with their values; none for a bare flag."""

_PLAIN = re.compile(r"[A-Za-z0-9/_.][A-Za-z0-9/_.,+=@%-]*\Z")
"""Needs no quotes in an experiment file."""

_WORDS = ("null", "true", "false")
"""Need quotes there, as they have a meaning of their own."""


def places_of(root: Path, run: Mapping[str, Any]) -> RunFolder:
    """The places of a run by its run.json."""
    tensorboard = moved(run.get("tensorboard_dir") or str(root / TENSORBOARD), run, root)
    save = moved(run.get("checkpoint_dir") or str(root / CHECKPOINTS), run, root)
    return RunFolder(root, Path(tensorboard), Path(save))


def moved(path: str, run: Mapping[str, Any], root: Path) -> str:
    """A path of a run whose folder may have been copied or renamed to `root`.

    A copy must neither resume from the original's checkpoints nor write into them.
    """
    folder = run.get("folder")
    if folder is None or not Path(path).is_relative_to(folder):
        return path
    return str(root / Path(path).relative_to(folder))


def name_of(config: Path) -> str:
    """A run's name: that of its file, or of the folder of one of Megatron-LM's model_config.yaml."""
    if config.stem in ("model_config", "config"):
        return config.resolve().parent.name
    return config.stem


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    with folders.written_at_once(file) as stream:
        stream.write(json_text(content))


def json_text(content: Any) -> str:
    """Indented JSON, with null for numbers that are not finite."""
    text = msgspec.json.format(msgspec.json.encode(content, enc_hook=float), indent=2)
    return text.decode() + "\n"


@contextlib.contextmanager
def claimed(root: Path) -> Iterator[int]:
    """Claims a folder for one run, by a lock on train.log; yields the descriptor that holds it.

    A process that inherits the descriptor keeps the lock, so it outlives a launcher that was
    killed. A file system without locks is used without one.

    Raises:
        UserError: another run uses the folder, or it cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        log = (root / LOG).open("ab")
    except OSError as error:
        raise UserError(f"cannot write to {root}: {error.strerror}; give --out DIR") from None
    with log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            run = read_json(root / RUN)
            since = f" (on {run.get('host')}, since {run.get('started')})" if run else ""
            raise UserError(
                f"a run is under way in {root}{since}; wait for its end, or give another --out DIR"
            ) from None
        except OSError:
            pass
        yield log.fileno()


def check_free(folder: RunFolder, *, resume: bool) -> None:
    """Raises a UserError for a folder with a user's files, or with a run unless it is resumed."""
    root = folder.root
    if "config_hash" not in read_json(root / RUN):
        for file in (root / name for name in (CONFIG, RUN, LOG, SUMMARY)):
            if file.exists() and file.stat().st_size:
                raise UserError(
                    f"{file} was not written by `megatron-muon train`; give another --out DIR"
                )
    run = held_by(folder)
    if run and not resume:
        raise UserError(
            f"{run}; give another folder with --out DIR, go on with that run with --resume, or"
            f" delete it: rm -r {root}"
        )


def config_text(flags: Flags, env: Mapping[str, str], *, heading: str) -> str:
    """An experiment file that `load_config` reads back as exactly these flags and variables."""
    lines = [f"# {line}" for line in heading.splitlines()]
    if env:
        lines.append("ENV_VARS:")
        lines += [f"  {name}: {_quoted(value)}" for name, value in env.items()]
    lines.append("MODEL_ARGS:")
    lines += [f"  {flag}: {_yaml(values)}" for flag, values in flags]
    return "\n".join(lines) + "\n"


def _yaml(values: tuple[str, ...]) -> str:
    if not values:
        return "true"
    items = [_quoted(value) for value in values]
    is_switch = values[0].lower() in ("true", "false")
    if len(values) == 1 and not is_switch and not values[0].startswith("["):
        return items[0]
    return f"[{', '.join(items)}]"


def _quoted(text: str) -> str:
    if _PLAIN.match(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)


def config_hash(flags: Flags, env: Mapping[str, str]) -> str:
    """SHA-256 of the settings, independent of their order and of where files go."""
    settings = sorted((flag, list(values)) for flag, values in flags if flag not in PLACES)
    text = json.dumps([settings, sorted(env.items())])
    return hashlib.sha256(text.encode()).hexdigest()
