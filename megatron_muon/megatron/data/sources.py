"""Finds the files to prepare and reads documents out of them, in an order that no file system decides.

A text file is one document; a line of a JSONL file is one. A document that is the only one is cut into pieces.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

import msgspec

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.tokenizers import Document, TokenizerSpec

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Never entered, whatever the suffixes: compiled files and other people's packages."""

_PIECES = 100
"""Of the only document: --split 98,2,0 leaves two of them for validation, and each is long enough to learn from."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what is written, beside the input's bytes: flags of `data prepare`, as the manifest has them.

    Attributes:
        stdlib: the Python whose standard library (`*.py` files) is taken too, after the inputs; "" takes none.
        suffixes: of files in directories; empty means every file. A file named explicitly is always taken.
        exclude: `fnmatch` patterns against a file's or directory's name and its path relative to the input.
    """

    tokenizer: TokenizerSpec = TokenizerSpec()
    tokenizer_digest: str = ""
    append_eod: bool = True
    stdlib: str = ""
    suffixes: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    format: Literal["auto", "text", "jsonl"] = "auto"
    json_key: str = "text"


class Source(NamedTuple):
    """One input file: where it lies, its name relative to the input that led to it, and its size in bytes."""

    path: Path
    label: str
    size: int


def find_sources(inputs: Sequence[Path], settings: Settings, not_these: Iterable[Path] = ()) -> list[Source]:
    """Lists the files of the inputs, each once: inputs in the order given, a directory's files by relative path.

    What is hidden below a directory is passed over, as are files of `not_these`, such as the output.
    """
    seen = {os.path.realpath(path) for path in not_these}
    sources: list[Source] = []
    for given in inputs:
        if not given.exists():
            raise UserError(f"input {str(given)!r} does not exist")
        for label, path in _walk(given, settings) if given.is_dir() else [(given.name, given)]:
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                sources.append(Source(path, label, path.stat().st_size))
    if not sources:
        wanted = f" with suffix {' '.join(settings.suffixes)}" if settings.suffixes else ""
        raise UserError(f"found no file{wanted} in {', '.join(map(str, inputs))}")
    return sources


def _walk(root: Path, settings: Settings) -> list[tuple[str, Path]]:
    """(relative POSIX path, path) of the wanted files below `root`, sorted by the former."""

    def wanted(relative: PurePath) -> bool:
        names = (relative.name, relative.as_posix())
        excluded = any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.exclude for name in names)
        return not (excluded or relative.name.startswith(".") or relative.name in _SKIPPED_DIRECTORIES)

    def fail(error: OSError) -> None:
        raise error

    found: list[tuple[str, Path]] = []
    for directory, subdirectories, names in root.walk(on_error=fail):
        here = directory.relative_to(root)
        subdirectories[:] = [name for name in subdirectories if wanted(here / name)]
        files = [name for name in names if not settings.suffixes or name.endswith(settings.suffixes)]
        files = [name for name in files if wanted(here / name) and (directory / name).is_file()]
        found += [((here / name).as_posix(), directory / name) for name in files]
    return sorted(found)


def input_digest(sources: Iterable[Source]) -> str:
    """A digest of names, sizes and bytes."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"\0{source.label}\0{source.size}\0".encode("utf-8", "surrogateescape"))
        with source.path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


class Reader:
    """Yields the documents of sources, once; counts the bytes that it has `read`, of `total`, and what it skips.

    A document that is the only one comes in pieces, as --split divides documents among sets; `is_cut` then.
    """

    def __init__(self, sources: Sequence[Source], settings: Settings) -> None:
        self.sources, self.settings = sources, settings
        self.total, self.read = sum(source.size for source in sources), 0
        self.is_cut = False
        self._skipped = {"binary files": 0, "files that are not UTF-8": 0, "empty documents": 0}

    @property
    def skipped(self) -> str:
        """For example `skipped: 2 binary files, 1 empty documents`; nothing when nothing was skipped."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self._skipped.items() if count)
        return f"skipped: {counts}" if counts else ""

    def __iter__(self) -> Iterator[Document]:
        documents = self._documents()
        first = list(itertools.islice(documents, 2))
        if len(first) == 1:
            place, text = first[0]
            first = [(place, piece) for piece in cut(text)]
            self.is_cut = len(first) > 1
        yield from itertools.chain(first, documents)

    def _documents(self) -> Iterator[Document]:
        for source in self.sources:
            is_jsonl = source.path.name.endswith((".jsonl", ".ndjson"))
            if self.settings.format != "auto":
                is_jsonl = self.settings.format == "jsonl"
            with source.path.open("rb") as file:
                for place, text in self._lines(source, file) if is_jsonl else self._whole(source, file):
                    if text:
                        yield place, text
                    else:
                        self._skipped["empty documents"] += 1

    def _whole(self, source: Source, file: BufferedReader) -> Iterator[Document]:
        raw = file.read()
        self.read += len(raw)
        try:
            if b"\0" in raw:
                self._skipped["binary files"] += 1
            else:
                yield source.label, raw.decode("utf-8")
        except UnicodeDecodeError:
            self._skipped["files that are not UTF-8"] += 1

    def _lines(self, source: Source, file: BufferedReader) -> Iterator[Document]:
        key = self.settings.json_key
        for number, line in enumerate(file, start=1):
            self.read += len(line)
            if not line.strip():
                continue
            place = f"{source.path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # broken JSON and broken UTF-8 alike, or nested too deeply
                raise UserError(f"{place}: not a JSON object on one line ({error})") from None
            fields = record if isinstance(record, dict) else {}
            if not isinstance(fields.get(key), str):
                found = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items())
                raise UserError(
                    f"{place}: no text in a field {key!r} (fields: {found or 'none'}); choose one with --json-key"
                )
            yield place, fields[key]


def cut(text: str) -> list[str]:
    """Cuts a text into at most `_PIECES` of similar length: after blank lines, or after lines where these are few."""
    pieces = [text]
    for border in (r"\n\s*\n", r"\n(?:\s*\n)?"):
        ends = [match.end() for match in re.finditer(border, text)]
        nearest = (bisect_left(ends, len(text) * part / _PIECES) for part in range(1, _PIECES))
        places = sorted({0, len(text), *(ends[index] for index in nearest if index < len(ends))})
        pieces = [text[start:end] for start, end in itertools.pairwise(places)]
        if len(pieces) > _PIECES // 2:
            break
    return pieces
