"""Finds the files to prepare and reads documents out of them, in an order that no file system decides.

A text file is one document; a line of a JSONL file is one. Files that are binary, not UTF-8 or empty are
counted and passed over. Nothing here tokenizes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import BinaryIO, Literal

from megatron_muon.errors import UserError

SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Never entered, whatever the suffixes: compiled files and other people's packages."""

STDLIB_EXCLUDED = ("lib-dynload", "idlelib/Icons", "config-*", "ensurepip/_bundled")
"""Parts of the interpreter's library directory that hold build products rather than Python to read."""

JSONL_SUFFIXES = (".jsonl", ".ndjson")

_BLOCK_BYTES = 1 << 20

FileFormat = Literal["auto", "text", "jsonl"]


@dataclass(frozen=True)
class SourceOptions:
    """What to take from the inputs: the flags of `data prepare`.

    Attributes:
        suffixes: of files in directories; empty means every file. A file named explicitly is always taken.
        exclude: `fnmatch` patterns against a file's or directory's name and its path relative to the input.
        file_format: `auto` reads `.jsonl` and `.ndjson` as JSONL and everything else as text.
    """

    suffixes: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    file_format: FileFormat = "auto"
    json_key: str = "text"


@dataclass(frozen=True)
class Source:
    """One input file: where it lies, its name relative to the input that led to it, and its size in bytes."""

    path: Path
    label: str
    size: int


@dataclass
class ReadCounts:
    """How many files were read, what was passed over, and a running digest of the names and bytes that were read."""

    files: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def describe(self) -> str:
        """For example `skipped: 2 binary files, 1 empty documents`; nothing when nothing was skipped."""
        kinds = [kind for kind in ("binary files", "files that are not UTF-8", "empty documents") if self.skipped[kind]]
        return "skipped: " + ", ".join(f"{self.skipped[kind]} {kind}" for kind in kinds) if kinds else ""


def stdlib_directory() -> Path:
    """The directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_sources(inputs: Iterable[Path], options: SourceOptions, not_these: Iterable[Path] = ()) -> list[Source]:
    """Lists the files of the inputs: inputs in the order given, a directory's files sorted by relative path.

    What is hidden below a directory is passed over, as are files of `not_these`, such as the output. A file reached
    twice is listed once.

    Raises:
        UserError: an input does not exist, or there is nothing to take.
    """
    inputs = list(inputs)
    seen = {os.path.realpath(path) for path in not_these}
    sources: list[Source] = []
    for given in inputs:
        if not given.exists():
            raise UserError(f"input {str(given)!r} does not exist")
        labelled = _walk(given, options) if given.is_dir() else [(given.name, given)]
        for label, path in labelled:
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                sources.append(Source(path=path, label=label, size=path.stat().st_size))
    if not sources:
        wanted = f" with suffix {' '.join(options.suffixes)}" if options.suffixes else ""
        raise UserError(f"found no file{wanted} in {', '.join(str(path) for path in inputs)}")
    return sources


def _walk(root: Path, options: SourceOptions) -> list[tuple[str, Path]]:
    """Returns (relative POSIX path, path) of the wanted files below `root`, sorted by the former."""

    def excluded(relative: PurePath) -> bool:
        names = (relative.name, relative.as_posix())
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in options.exclude for name in names)

    def unreadable(error: OSError) -> None:
        raise UserError(f"cannot read directory {error.filename!r}: {error.strerror}; leave it out with --exclude")

    found: list[tuple[str, Path]] = []
    for directory, subdirectories, names in os.walk(root, onerror=unreadable):
        here = Path(directory).relative_to(root)
        subdirectories[:] = [
            name
            for name in subdirectories
            if not name.startswith(".") and name not in SKIPPED_DIRECTORIES and not excluded(here / name)
        ]
        for name in names:
            if name.startswith(".") or (options.suffixes and not name.endswith(options.suffixes)):
                continue
            if not excluded(here / name) and (root / here / name).is_file():
                found.append(((here / name).as_posix(), root / here / name))
    return sorted(found)


def input_digest(sources: Iterable[Source]) -> str:
    """The digest that reading all documents of `sources` arrives at, without decoding anything."""
    digest = hashlib.sha256()
    for source in sources:
        with _open(source, digest) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def read_documents(sources: Iterable[Source], options: SourceOptions, counts: ReadCounts) -> Iterator[tuple[str, str]]:
    """Yields (where it stands, text) for every document, updating `counts` on the way.

    Raises:
        UserError: a JSONL line is broken or lacks the field (names file and line), or a file cannot be read.
    """
    for source in sources:
        counts.files += 1
        is_jsonl = options.file_format == "jsonl" or (
            options.file_format == "auto" and source.path.name.endswith(JSONL_SUFFIXES)
        )
        with _open(source, counts.digest) as file:
            documents: Iterable[tuple[str, str | None]]
            if is_jsonl:
                documents = _read_jsonl(source, file, options.json_key, counts)
            else:
                raw = file.read()
                counts.digest.update(raw)
                documents = [(source.label, _decode(raw, counts))]
            for place, text in documents:
                if text:
                    yield place, text
                elif text is not None:
                    counts.skipped["empty documents"] += 1


def _decode(raw: bytes, counts: ReadCounts) -> str | None:
    """The text; None where it is counted as passed over."""
    if b"\0" in raw:
        counts.skipped["binary files"] += 1
        return None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        counts.skipped["files that are not UTF-8"] += 1
        return None


def _read_jsonl(source: Source, file: BinaryIO, key: str, counts: ReadCounts) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(file, start=1):
        counts.digest.update(line)
        if not line.strip():
            continue
        place = f"{source.path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # broken JSON and broken UTF-8 alike, or nested too deeply
            raise UserError(f"{place}: not a JSON object on one line ({error})") from None
        if not isinstance(record, dict):
            raise UserError(f"{place}: expected a JSON object, found {type(record).__name__}")
        if key not in record:
            fields = ", ".join(sorted(record)) or "none"
            raise UserError(f"{place}: no field {key!r} (fields: {fields}); choose one with --json-key")
        if not isinstance(text := record[key], str):
            raise UserError(f"{place}: field {key!r} holds {type(text).__name__}, expected a string")
        yield place, text


def _open(source: Source, digest: hashlib._Hash) -> BinaryIO:
    """Opens a file, whose name and size go into the digest before its bytes."""
    digest.update(f"\0{source.label}\0{source.size}\0".encode("utf-8", "surrogateescape"))
    try:
        return source.path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {str(source.path)!r}: {error.strerror}") from None
