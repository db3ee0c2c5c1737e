"""Text as Megatron's indexed data, `PREFIX.bin` and `PREFIX.idx`: written, and checked by a run.

The same input and options give the same bytes, in an order independent of the file system. Files
are written in a temporary folder and renamed at the end, under a lock, so several processes may
prepare the same prefix at once and an interrupted run leaves no partial file. A manifest,
`PREFIX.prepared.json`, is renamed last: where it exists, the data is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import platform
import re
import shutil
import struct
import sysconfig
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.data.tokenizers import (
    IN_TRAINING,
    TokenizerSpec,
    build,
    encode,
)

STDLIB = f"python {platform.python_version()}"
"""The standard library of this interpreter, as `CorpusSettings.stdlib`."""

_SKIPPED_DIRECTORIES = ("__pycache__", "site-packages", "dist-packages")
"""Compiled files and other people's packages."""

_PIECES = 100
"""Pieces of a single document: --split 98,2,0 leaves two of them, long enough, for validation."""

_SAMPLE_TOKENS = 1 << 20

type Source = tuple[str, Path]
"""An input file: its name relative to the input that led to it, and its path."""


class CorpusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `data prepare`, as the manifest records them.

    `stdlib` is the Python whose standard library is the input.
    """

    tokenizer: TokenizerSpec = TokenizerSpec()
    stdlib: str = ""
    json_key: str = "text"


class Manifest(msgspec.Struct, kw_only=True):
    """The written data: `tokens` include ends of documents, `sizes` are in bytes."""

    settings: CorpusSettings
    documents: int
    tokens: int
    vocab_size: int | None = None
    skipped: str
    sizes: dict[str, int]


_DEFAULTS = CorpusSettings()


def prepare(inputs: Sequence[Path], output: Path, settings: CorpusSettings = _DEFAULTS) -> Manifest:
    """Tokenize text files, JSONL files and directories of them into `output.bin` and `output.idx`.

    With `settings.stdlib` the input is the standard library: existing data of it is kept, and that
    of another Python replaced. Other existing data is never replaced.

    Raises:
        UserError: a missing or broken input, nothing to prepare, output that exists already or
            cannot be written.
    """
    paths = OutputPaths(output)
    try:
        with paths.locked():
            manifest = paths.read_manifest()
            is_stdlib = settings.stdlib and manifest is not None and manifest.settings.stdlib
            if is_stdlib and manifest is not None and manifest.settings == settings:
                return manifest
            if paths.bin.exists() and not is_stdlib:
                raise UserError(f"{paths.bin} exists already; remove it, or give another --output")
            if settings.stdlib:
                found = find_sources([Path(sysconfig.get_path("stdlib"))], ".py")
                # These files belong to the build of Python.
                found = [source for source in found if not source[0].startswith("config-")]
            else:
                found = find_sources(inputs)
            return _write(found, settings, paths)
    except OSError as error:
        place = str(error.filename or output)
        reason = error.strerror or error
        raise UserError(f"cannot read or write {place!r}: {reason}") from error


class OutputPaths:
    """The files of a prefix, and its lock; `cache` has training's indices of the data."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.bin = prefix.with_name(prefix.name + ".bin")
        self.idx = prefix.with_name(prefix.name + ".idx")
        self.manifest = prefix.with_name(prefix.name + ".prepared.json")
        self.cache = prefix.with_name(prefix.name + ".cache")
        self.all = [self.bin, self.idx, self.manifest]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the prefix's lock. The lock file stays: removing it would race."""
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        with self.prefix.with_name(f".{self.prefix.name}.lock").open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def read_manifest(self) -> Manifest | None:
        """The manifest, if it is readable and the data has the sizes that it states."""
        try:
            manifest = msgspec.json.decode(self.manifest.read_bytes(), type=Manifest)
            return manifest if manifest.sizes == _sizes(self.bin, self.idx) else None
        except (OSError, msgspec.MsgspecError):
            return None


def _write(found: list[Source], settings: CorpusSettings, paths: OutputPaths) -> Manifest:
    """Write the three files. The caller holds the lock."""
    from rich.console import Console
    from rich.progress import track

    tokenizer = build(settings.tokenizer)
    with quiet_imports():
        from megatron_muon.megatron.upstream import DType, IndexedDatasetBuilder
    skipped: Counter[str] = Counter()
    partial = paths.prefix.with_name(f".{paths.prefix.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    partial.mkdir()
    try:
        bin_, idx, manifest_file = files = [partial / path.name for path in paths.all]
        builder = IndexedDatasetBuilder(str(bin_), dtype=DType.optimal_dtype(tokenizer.vocab_size))
        with builder.data_file:
            shown = track(found, "tokenizing", console=Console(stderr=True), transient=True)
            for place, text in read_documents(shown, settings.json_key, skipped):
                ids = encode(tokenizer, place, text)
                builder.add_document(ids, [ids.size])
        counts = ", ".join(f"{count} {kind}" for kind, count in skipped.items())
        lengths = builder.sequence_lengths
        if not lengths:
            raise UserError(f"found no document in {len(found)} files ({counts})")
        builder.finalize(str(idx))
        manifest = Manifest(
            settings=settings,
            documents=len(lengths),
            tokens=sum(map(int, lengths)),
            vocab_size=int(tokenizer.vocab_size),
            skipped=counts,
            sizes=_sizes(bin_, idx),
        )
        manifest_file.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        # During the renames no manifest may vouch for the data.
        paths.manifest.unlink(missing_ok=True)
        # Megatron's indices are keyed by path and settings: stale for other documents.
        for index in paths.cache.glob("*Dataset-*"):
            index.unlink()
        for file, target in zip(files, paths.all, strict=True):
            os.replace(file, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _sizes(bin_: Path, idx: Path) -> dict[str, int]:
    return {"bin": bin_.stat().st_size, "idx": idx.stat().st_size}


def find_sources(inputs: Iterable[Path], suffix: str = "") -> list[Source]:
    """The files of the inputs, each once: inputs in order, files of a directory by relative path.

    Hidden files below a directory are skipped.
    """
    found: dict[str, Source] = {}
    for given in inputs:
        for name, path in _walk(given, suffix) if given.is_dir() else [(given.name, given)]:
            found.setdefault(os.path.realpath(path), (name, path))
    return list(found.values())


def _walk(root: Path, suffix: str) -> list[Source]:
    def fail(error: OSError) -> None:
        raise error

    found: list[Source] = []
    for directory, folders, names in root.walk(on_error=fail):
        folders[:] = [name for name in folders if name not in _SKIPPED_DIRECTORIES]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = directory / name
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def read_documents(
    sources: Iterable[Source], json_key: str, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield each document's place and text; count `skipped` files.

    A single document is cut into pieces, as --split divides documents among sets.
    """
    documents = _documents(sources, json_key, skipped)
    first = list(itertools.islice(documents, 2))
    if len(first) == 1:
        place, text = first[0]
        first = [(place, piece) for piece in cut(text)]
    yield from itertools.chain(first, documents)


def _documents(
    sources: Iterable[Source], json_key: str, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    for label, path in sources:
        if path.name.endswith((".jsonl", ".ndjson")):
            yield from _lines(path, json_key)
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            skipped["files that are not UTF-8 text"] += 1
        elif text:
            yield label, text
        else:
            skipped["empty files"] += 1


def _lines(path: Path, json_key: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            try:
                text = json.loads(line)[json_key] if line.strip() else ""
            except (ValueError, LookupError, TypeError) as error:
                text = error
            if not isinstance(text, str):
                raise UserError(
                    f"{place}: must be a JSON object on one line, with text in the field"
                    f" {json_key!r} (--json-key), found {text!r}"
                )
            if text:
                yield place, text


def cut(text: str) -> list[str]:
    """Cut a text after blank lines, or after lines where these are few, into similar lengths."""
    pieces = [text]
    for border in (r"\n\s*\n", r"\n(?:\s*\n)?"):
        ends = [match.end() for match in re.finditer(border, text)]
        places = {0, len(text)}
        for part in range(1, _PIECES):
            places.update(ends[bisect_left(ends, len(text) * part / _PIECES) :][:1])
        pieces = [text[start:end] for start, end in itertools.pairwise(sorted(places))]
        if len(pieces) > _PIECES // 2:
            break
    return pieces


def read_head(prefix: str) -> tuple[np.dtype[Any], int]:
    """The dtype of the token ids and the number of documents, from `PREFIX.idx`.

    Raises:
        UserError: a file is missing, the index is damaged, or `PREFIX.bin` is shorter than stated.
    """
    remedy = f"type: megatron-muon data prepare --input TEXT --output {prefix}"
    bin_, idx = Path(prefix + ".bin"), Path(prefix + ".idx")
    for file in (bin_, idx):
        if not file.exists():
            raise UserError(
                f"{file} does not exist; give the prefix of a .bin and an .idx file, or {remedy}"
            )
    from megatron_muon.megatron.upstream import _IndexReader

    try:
        index = _IndexReader(str(idx), multimodal=False)
        dtype = np.dtype(index.dtype)
        assert dtype.kind in "iu", dtype
    except (OSError, AssertionError, struct.error, ValueError):
        raise UserError(
            f"{idx} is not an index of Megatron's data, or is damaged; {remedy}"
        ) from None
    size, needed = bin_.stat().st_size, 0
    if len(index):
        needed = int(index.sequence_pointers[-1] + index.sequence_lengths[-1] * dtype.itemsize)
    if size < needed:
        raise UserError(
            f"{bin_} is cut short: {size:,} of {needed:,} bytes; copy it again, or prepare it anew"
        )
    return dtype, index.sequence_count


def check_vocabulary(prefix: str, args: argparse.Namespace) -> None:
    """Refuse data of another tokenizer, or with ids that the model has no row for.

    `megatron-muon data prepare` records the tokenizer in the manifest; of other data the first ids
    are read. A run's NullTokenizer stands for any tokenizer, with the size of its vocabulary.
    """
    manifest = OutputPaths(Path(prefix)).read_manifest()
    run = TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    differs = False
    if manifest is None:
        ids = np.fromfile(prefix + ".bin", read_head(prefix)[0], count=_SAMPLE_TOKENS)
        size = int(ids.max()) + 1 if ids.size else 0
        remedy = "the --vocab-size of the data"
        made_with = "an unknown tokenizer"
    else:
        spec = manifest.settings.tokenizer
        reader = spec.in_training()
        size = manifest.vocab_size or reader.vocab_size or 0
        remedy = " ".join(reader.flags())
        made_with = " ".join(spec.flags()[1:])
        if run.tokenizer_type != IN_TRAINING:
            differs = reader.kind_and_file() != run.kind_and_file()
    rows = args.padded_vocab_size
    if differs or size > rows:
        raise UserError(
            f"{prefix} was made with {made_with}, a vocabulary of {size}; this run has"
            f" {' '.join(run.flags()[1:])} and a model of {rows} (padded); train with {remedy}, or"
            " prepare the text with this run's tokenizer"
        )
