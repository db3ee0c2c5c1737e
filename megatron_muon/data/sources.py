"""Finds the files to prepare and reads documents out of them, in an order that no file system decides.

A text file is one document; a line of a JSONL file is one. Files that are binary, not UTF-8 or empty are
counted and passed over. Nothing here tokenizes.
"""

import fnmatch
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
    """What to take from the inputs.

    Attributes:
        suffixes: File name endings taken from directories; empty means every file. A file named explicitly is
            always taken.
        exclude: `fnmatch` patterns against a file's or directory's name and its path relative to the input.
        file_format: `auto` reads `.jsonl` and `.ndjson` as JSONL and everything else as text.
        json_key: The field of a JSONL line that holds the document.
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
    """What reading passed over, and a running digest of the names and bytes that were read."""

    binary_files: int = 0
    not_utf8_files: int = 0
    empty_documents: int = 0
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def describe(self) -> str:
        """Returns for example `skipped: 2 binary files, 1 not UTF-8`, or nothing when nothing was skipped."""
        parts = [
            f"{number} {what}"
            for number, what in (
                (self.binary_files, "binary files"),
                (self.not_utf8_files, "files that are not UTF-8"),
                (self.empty_documents, "empty documents"),
            )
            if number
        ]
        return "skipped: " + ", ".join(parts) if parts else ""


def stdlib_directory() -> Path:
    """Returns the directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_sources(inputs: Iterable[Path], options: SourceOptions, not_these: Iterable[Path] = ()) -> list[Source]:
    """Lists the files of the inputs: inputs in the order given, a directory's files sorted by relative path.

    Args:
        inputs: Files, or directories to search through. Hidden files and directories below them are passed
            over.
        options: What to take.
        not_these: Files never taken, for example the output when it lies inside an input. A file reached
            twice is listed once.

    Raises:
        UserError: An input does not exist, or there is nothing to take.
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

    def excluded(name: str, relative: str) -> bool:
        return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(relative, p) for p in options.exclude)

    found: list[tuple[str, Path]] = []
    for directory, subdirectories, names in os.walk(root, onerror=_unreadable):
        here = Path(directory)
        prefix = here.relative_to(root).as_posix()
        prefix = "" if prefix == "." else prefix + "/"
        subdirectories[:] = [
            name
            for name in subdirectories
            if not name.startswith(".") and name not in SKIPPED_DIRECTORIES and not excluded(name, prefix + name)
        ]
        for name in names:
            if name.startswith(".") or (options.suffixes and not name.endswith(options.suffixes)):
                continue
            path = here / name
            if not excluded(name, prefix + name) and path.is_file():
                found.append((prefix + name, path))
    return sorted(found)


def _unreadable(error: OSError) -> None:
    raise UserError(f"cannot read directory {error.filename!r}: {error.strerror}; leave it out with --exclude")


def input_digest(sources: Iterable[Source]) -> str:
    """Returns the digest that reading all documents of `sources` arrives at, without decoding anything."""
    digest = hashlib.sha256()
    for source in sources:
        _digest_name(digest, source)
        with _open(source) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def read_documents(sources: Iterable[Source], options: SourceOptions, counts: ReadCounts) -> Iterator[tuple[str, str]]:
    """Yields (where it stands, text) for every document, updating `counts` on the way.

    Raises:
        UserError: A JSONL line is broken or lacks the field (names file and line), or a file cannot be read.
    """
    for source in sources:
        _digest_name(counts.digest, source)
        as_jsonl = options.file_format == "jsonl" or (
            options.file_format == "auto" and source.path.name.endswith(JSONL_SUFFIXES)
        )
        if as_jsonl:
            yield from _read_jsonl(source, options.json_key, counts)
        else:
            with _open(source) as file:
                raw = file.read()
            counts.digest.update(raw)
            text = _decode(raw, counts)
            if text:
                yield source.label, text


def _decode(raw: bytes, counts: ReadCounts) -> str:
    if not raw:
        counts.empty_documents += 1
        return ""
    if b"\0" in raw:
        counts.binary_files += 1
        return ""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        counts.not_utf8_files += 1
        return ""


def _read_jsonl(source: Source, key: str, counts: ReadCounts) -> Iterator[tuple[str, str]]:
    with _open(source) as file:
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
            text = record[key]
            if not isinstance(text, str):
                raise UserError(f"{place}: field {key!r} holds {type(text).__name__}, expected a string")
            if text:
                yield place, text
            else:
                counts.empty_documents += 1


def _digest_name(digest: "hashlib._Hash", source: Source) -> None:
    digest.update(f"\0{source.label}\0{source.size}\0".encode("utf-8", "surrogateescape"))


def _open(source: Source):  # type: ignore[no-untyped-def]
    try:
        return source.path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {str(source.path)!r}: {error.strerror}") from None
