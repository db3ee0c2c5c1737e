"""Writes documents as Megatron's indexed data: `PREFIX.bin` and `PREFIX.idx`.

The same input and options give the same bytes. Files are written under temporary names and renamed at the end, under a
lock, so several processes may ask for the same prefix at once and an interrupted run leaves no half of a file. A
manifest, `PREFIX.prepared.json`, is renamed last: where it is, the data is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.data.sources import Settings, Source, find_sources, read_documents
from megatron_muon.megatron.data.tokenizers import build, check_spec, encode

STDLIB = f"python {platform.python_version()}"
"""What settings call the standard library of the running interpreter."""

_DEFAULTS = Settings()
_Watch = Callable[[list[Source]], Iterable[Source]]


class Manifest(msgspec.Struct, kw_only=True):
    """What was written: `tokens` with the ids that end documents, what was `skipped` in words, `sizes` in bytes."""

    settings: Settings
    documents: int
    tokens: int
    vocab_size: int | None = None
    skipped: str
    sizes: dict[str, int]


def prepare(
    inputs: Sequence[Path],
    output: Path,
    settings: Settings = _DEFAULTS,
    *,
    overwrite: bool = False,
    watch: _Watch = iter,
) -> Manifest:
    """Tokenizes text files, JSONL files and directories of them into `output.bin` and `output.idx`.

    With `settings.stdlib` the input is the standard library, which is not written again where it is there. Data at
    `output` is replaced with `overwrite` alone. `watch` sees which file is read.

    Raises:
        UserError: a missing or broken input, nothing to prepare, output that exists already or cannot be written.
    """
    check_spec(settings.tokenizer)
    paths = OutputPaths(output)
    try:
        with paths.locked():
            manifest = paths.read_manifest()
            if settings.stdlib and manifest is not None and manifest.settings == settings:
                return manifest
            if not overwrite and (paths.bin.exists() or paths.idx.exists()):
                raise UserError(f"{paths.bin} exists already; add --overwrite to replace it, or give another --output")
            if settings.stdlib:
                found = find_sources([Path(sysconfig.get_path("stdlib"))], (".py",), paths.all)
                found = [source for source in found if not source[0].startswith("config-")]  # of Python's own build
            else:
                found = find_sources(inputs, settings.suffixes, paths.all)
            return _write(found, settings, paths, watch)
    except OSError as error:
        place = error.filename or output
        raise UserError(f"cannot read or write {str(place)!r}: {error.strerror or error}") from error


class OutputPaths:
    """The files that belong to a prefix, and the lock that guards them; `cache` has training's indices of the data."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.all = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx", ".prepared.json")]
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
                ids = encode(settings.tokenizer, document)
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
        paths.manifest.unlink(missing_ok=True)  # between the renames there is no manifest that could promise anything
        for index in paths.cache.glob("*Dataset-*"):  # keyed by path and settings: stale for other documents
            index.unlink()
        for file, place in zip(files, paths.all, strict=True):
            os.replace(file, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _sizes(bin_: Path, idx: Path) -> dict[str, int]:
    return {"bin": bin_.stat().st_size, "idx": idx.stat().st_size}
