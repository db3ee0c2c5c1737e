"""Finds the files to prepare and reads documents out of them, in an order that no file system decides.

A text file is one document; a line of a JSONL file is one. A document that is the only one is cut into pieces.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.tokenizers import Document, TokenizerSpec

_SKIPPED_DIRECTORIES = ("__pycache__", "site-packages", "dist-packages")
"""Never entered, as what is hidden is not: compiled files and other people's packages."""

_PIECES = 100
"""Of the only document: --split 98,2,0 leaves two of them for validation, and each is long enough to learn from."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `data prepare`, as the manifest has them.

    `stdlib` is the Python whose standard library is the input; `suffixes` choose files in directories, none means all.
    """

    tokenizer: TokenizerSpec = TokenizerSpec()
    stdlib: str = ""
    suffixes: tuple[str, ...] = ()
    json_key: str = "text"


Source = tuple[str, Path]
"""An input file: its name relative to the input that led to it, and where it lies."""


def find_sources(inputs: Iterable[Path], suffixes: tuple[str, ...], not_these: Iterable[Path]) -> list[Source]:
    """Lists the files of the inputs, each once: inputs in the order given, a directory's files by relative path.

    What is hidden below a directory is passed over, as are files of `not_these`, such as the output.
    """
    found: dict[str, Source] = {}
    for given in inputs:
        for source in _walk(given, suffixes) if given.is_dir() else [(given.name, given)]:
            found.setdefault(os.path.realpath(source[1]), source)
    for path in not_these:
        found.pop(os.path.realpath(path), None)
    if not found:
        raise UserError(f"found no file {' '.join(suffixes)} in {', '.join(map(str, inputs))}")
    return list(found.values())


def _walk(root: Path, suffixes: tuple[str, ...]) -> list[Source]:
    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for directory, folders, names in root.walk(on_error=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED_DIRECTORIES]
        found += [directory / name for name in names if not name.startswith(".") and name.endswith(suffixes or "")]
    return sorted((path.relative_to(root).as_posix(), path) for path in found if path.is_file())


def read_documents(sources: Iterable[Source], json_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """Yields the documents of sources; counts what it has `skipped`.

    A document that is the only one comes in pieces, as --split divides documents among sets.
    """
    documents = _documents(sources, json_key, skipped)
    first = list(itertools.islice(documents, 2))
    if len(first) == 1:
        place, text = first[0]
        first = [(place, piece) for piece in cut(text)]
    yield from itertools.chain(first, documents)


def _documents(sources: Iterable[Source], json_key: str, skipped: Counter[str]) -> Iterator[Document]:
    for label, path in sources:
        if path.name.endswith((".jsonl", ".ndjson")):
            yield from ((place, text) for place, text in _lines(path, json_key) if text)
            continue
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if text and "\0" not in text:
            yield label, text
        else:
            skipped["files that are not UTF-8 text" if text else "empty files"] += 1


def _lines(path: Path, json_key: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            try:
                text = json.loads(line)[json_key] if line.strip() else ""
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                text = error
            if not isinstance(text, str):
                wanted = f"a JSON object on one line, with text in the field {json_key!r} (--json-key)"
                raise UserError(f"{place}: must be {wanted}, found {text!r}")
            yield place, text


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
