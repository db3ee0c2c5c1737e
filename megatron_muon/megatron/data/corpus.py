"""Text as Megatron's indexed data, `PREFIX.bin` and `PREFIX.idx`: `prepare` writes it, a run checks what it reads.

The same input and options give the same bytes, in an order that no file system decides. Files are
written under temporary names and renamed at the end, under a lock, so several processes may ask for
the same prefix at once and an interrupted run leaves no half of a file. A manifest,
`PREFIX.prepared.json`, is renamed last: where it is, the data is complete.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.data.tokenizers import (
    IN_TRAINING,
    TokenizerSpec,
    build,
    check_spec,
    encode,
)

STDLIB = f"python {platform.python_version()}"
"""What settings call the standard library of the running interpreter."""

_SKIPPED_DIRECTORIES = ("__pycache__", "site-packages", "dist-packages")
"""Never entered, as what is hidden is not: compiled files and other people's packages."""

_PIECES = 100
"""Of the only document: --split 98,2,0 leaves two of them for validation, and each is long enough to learn from."""

_SAMPLE_TOKENS = 1 << 20

Source = tuple[str, Path]
"""An input file: its name relative to the input that led to it, and where it lies."""

_Watch = Callable[[list[Source]], Iterable[Source]]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `data prepare`, as the manifest has them.

    `stdlib` is the Python whose standard library is the input; `suffixes` choose files in
    directories, none means all.
    """

    tokenizer: TokenizerSpec = TokenizerSpec()
    stdlib: str = ""
    suffixes: tuple[str, ...] = ()
    json_key: str = "text"


class Manifest(msgspec.Struct, kw_only=True):
    """What was written: `tokens` with the ids that end documents, what was `skipped` in words, `sizes` in bytes."""

    settings: Settings
    documents: int
    tokens: int
    vocab_size: int | None = None
    skipped: str
    sizes: dict[str, int]


_DEFAULTS = Settings()


def prepare(
    inputs: Sequence[Path],
    output: Path,
    settings: Settings = _DEFAULTS,
    *,
    overwrite: bool = False,
    watch: _Watch = iter,
) -> Manifest:
    """Tokenizes text files, JSONL files and directories of them into `output.bin` and `output.idx`.

    With `settings.stdlib` the input is the standard library, which is not written again where it is
    there. Data at `output` is replaced with `overwrite` alone. `watch` sees which file is read.

    Raises:
        UserError: a missing or broken input, nothing to prepare, output that exists already or
            cannot be written.
    """
    check_spec(settings.tokenizer)
    paths = OutputPaths(output)
    try:
        with paths.locked():
            manifest = paths.read_manifest()
            if settings.stdlib and manifest is not None and manifest.settings == settings:
                return manifest
            if not overwrite and (paths.bin.exists() or paths.idx.exists()):
                raise UserError(
                    f"{paths.bin} exists already; add --overwrite to replace it, or give another"
                    " --output"
                )
            if settings.stdlib:
                found = find_sources([Path(sysconfig.get_path("stdlib"))], (".py",), paths.all)
                # of Python's own build
                found = [source for source in found if not source[0].startswith("config-")]
            else:
                found = find_sources(inputs, settings.suffixes, paths.all)
            return _write(found, settings, paths, watch)
    except OSError as error:
        place = error.filename or output
        raise UserError(
            f"cannot read or write {str(place)!r}: {error.strerror or error}"
        ) from error


class OutputPaths:
    """The files that belong to a prefix, and the lock that guards them; `cache` has training's indices of the data."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.all = [
            prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx", ".prepared.json")
        ]
        self.bin, self.idx, self.manifest = self.all
        self.cache = prefix.with_name(f"{prefix.name}.cache")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the prefix's lock, waiting for whoever has it. The lock file stays: removing it would race."""
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        with self.prefix.with_name(f".{self.prefix.name}.lock").open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def read_manifest(self) -> Manifest | None:
        """The manifest, if it is there, readable, and its data too, in the sizes that it states."""
        try:
            manifest = msgspec.json.decode(self.manifest.read_bytes(), type=Manifest)
            return manifest if manifest.sizes == _sizes(self.bin, self.idx) else None
        except (OSError, msgspec.MsgspecError):
            return None


def _write(found: list[Source], settings: Settings, paths: OutputPaths, watch: _Watch) -> Manifest:
    """Writes the three files and returns the manifest. The caller holds the lock."""
    tokenizer = build(settings.tokenizer)
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    skipped: Counter[str] = Counter()
    partial = paths.prefix.with_name(f".{paths.prefix.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
    partial.mkdir()
    try:
        bin_, idx, manifest_file = files = [partial / path.name for path in paths.all]
        builder = IndexedDatasetBuilder(str(bin_), dtype=DType.optimal_dtype(tokenizer.vocab_size))
        with builder.data_file:
            for document in read_documents(watch(found), settings.json_key, skipped):
                ids = encode(tokenizer, *document)
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
        # between the renames there is no manifest that could promise anything
        paths.manifest.unlink(missing_ok=True)
        # keyed by path and settings: stale for other documents
        for index in paths.cache.glob("*Dataset-*"):
            index.unlink()
        for file, place in zip(files, paths.all, strict=True):
            os.replace(file, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _sizes(bin_: Path, idx: Path) -> dict[str, int]:
    return {"bin": bin_.stat().st_size, "idx": idx.stat().st_size}


def find_sources(
    inputs: Iterable[Path], suffixes: tuple[str, ...], not_these: Iterable[Path]
) -> list[Source]:
    """Lists the files of the inputs, each once: inputs in the order given, a directory's files by relative path.

    What is hidden below a directory is passed over, as are files of `not_these`, such as the
    output.
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
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED_DIRECTORIES
        ]
        found += [
            directory / name
            for name in names
            if not name.startswith(".") and name.endswith(suffixes or "")
        ]
    return sorted((path.relative_to(root).as_posix(), path) for path in found if path.is_file())


def read_documents(
    sources: Iterable[Source], json_key: str, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yields where the documents of sources stand, and their texts; counts what it has `skipped`.

    A document that is the only one comes in pieces, as --split divides documents among sets.
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


def _lines(path: Path, json_key: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            try:
                text = json.loads(line)[json_key] if line.strip() else ""
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                text = error
            if not isinstance(text, str):
                wanted = (
                    f"a JSON object on one line, with text in the field {json_key!r} (--json-key)"
                )
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


def read_head(prefix: str) -> tuple[np.dtype[Any], int]:
    """The dtype of the token ids and the number of documents, from `PREFIX.idx`.

    A UserError where a file is not there, the index is damaged, or `PREFIX.bin` is shorter than it
    says.
    """
    remedy = f"type: megatron-muon data prepare --input TEXT --output {prefix}"
    for file in (Path(prefix + ".bin"), Path(prefix + ".idx")):
        if not file.exists():
            raise UserError(
                f"{file} does not exist; give the prefix of a .bin and an .idx file, or {remedy}"
            )
    from megatron.core.datasets.indexed_dataset import _IndexReader

    try:
        index = _IndexReader(str(file), multimodal=False)
        dtype = np.dtype(index.dtype)
        assert dtype.kind in "iu", dtype
        size = Path(prefix + ".bin").stat().st_size
    except (OSError, AssertionError, struct.error, ValueError):  # or of a type unknown to Megatron
        raise UserError(
            f"{file} is not an index of Megatron's data, or is damaged; {remedy}"
        ) from None
    least = (
        int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * dtype.itemsize
        if len(index)
        else 0
    )
    if size < least:
        raise UserError(
            f"{prefix}.bin is cut short: {size:,} of {least:,} bytes; copy it again, or prepare it"
            " anew"
        )
    return dtype, index.sequence_count


def check_vocabulary(prefix: str, args: argparse.Namespace) -> None:
    """Refuses data that another tokenizer made, or with ids that the model has no row for, by a `UserError`.

    `megatron-muon data prepare` leaves the tokenizer beside the data. Of other data the beginning
    is looked at. A run's NullTokenizer stands for any tokenizer: only the size of its vocabulary
    counts.
    """
    manifest, rows = OutputPaths(Path(prefix)).read_manifest(), args.padded_vocab_size
    run = TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    if manifest is None:
        ids = np.fromfile(prefix + ".bin", read_head(prefix)[0], count=_SAMPLE_TOKENS)
        differs, size, remedy = (
            False,
            int(ids.max()) + 1 if ids.size else 0,
            "the --vocab-size of the data",
        )
        made_with = "a tokenizer that is not known"
    else:
        made = manifest.settings.tokenizer
        reads = made.in_training()
        theirs, ours = ([spec.tokenizer_type, Path(spec.model or "").name] for spec in (reads, run))
        differs = run.tokenizer_type != IN_TRAINING and theirs != ours  # in whatever folder
        size, remedy = manifest.vocab_size or reads.vocab_size or 0, " ".join(reads.flags())
        made_with = " ".join(made.flags()[1:])
    if differs or size > rows:
        raise UserError(
            f"{prefix} was made with {made_with}, a vocabulary of {size}; this run has"
            f" {' '.join(run.flags()[1:])} and a model of {rows} (padded); train with {remedy}, or"
            " prepare the text with this run's tokenizer"
        )
