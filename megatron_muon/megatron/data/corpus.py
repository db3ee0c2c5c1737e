"""Writes documents as Megatron's indexed data: `PREFIX.bin` and `PREFIX.idx`.

The same input and options give the same bytes, whatever the number of workers. Files are written under temporary names
and renamed at the end, under a lock, so several processes may ask for the same prefix at once and an interrupted run
leaves no half of a file. A manifest, `PREFIX.prepared.json`, is renamed last: where it is, the data is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.data import tokenizers
from megatron_muon.megatron.data.sources import Reader, Settings, Source, find_sources, input_digest
from megatron_muon.megatron.data.tokenizers import TokenizerSpec

STDLIB = f"python {platform.python_version()}"
"""What settings call the standard library of the running interpreter."""

_DEFAULTS = Settings()
_VERSION = 1
_STDLIB_EXCLUDED = ("lib-dynload", "idlelib/Icons", "config-*", "ensurepip/_bundled")
"""Parts of the interpreter's library directory that hold build products rather than Python to read."""


Progress = Callable[[int, int], None]


class Manifest(msgspec.Struct, kw_only=True):
    """What was written: `tokens` with the ids that end documents, what was `skipped` in words, `sizes` in bytes.

    The `documents` are pieces of one text where `is_cut`.
    """

    version: int
    settings: Settings
    input_digest: str
    documents: int
    is_cut: bool = False
    tokens: int
    vocab_size: int | None = None
    skipped: str
    sizes: dict[str, int]


class PreparedData(NamedTuple):
    """What `prepare` wrote, or found already written (`up_to_date`)."""

    prefix: Path
    manifest: Manifest
    up_to_date: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags with which training reads the data."""
        return ("--data-path", str(self.prefix), *self.manifest.settings.tokenizer.in_training().flags())


def prepare(
    inputs: Sequence[Path],
    output: Path,
    settings: Settings = _DEFAULTS,
    *,
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress = lambda read, total: None,
) -> PreparedData:
    """Tokenizes text files, JSONL files and directories of them into `output.bin` and `output.idx`.

    Other data at `output` is replaced with `overwrite` alone; `progress` gets the bytes of input done, and all.

    Raises:
        UserError: a missing or broken input, nothing to prepare, output that exists already or cannot be written.
    """
    tokenizers.check_spec(settings.tokenizer)
    if workers < 1:
        raise UserError(f"--workers {workers} is not possible; give 1 or more")
    # Beside data there may be a folder of that name: megatron-core caches its indices in PREFIX/cache.
    if not output.name or (output.is_dir() and not Path(f"{output}.bin").exists()):
        raise UserError(f"--output {str(output)!r} is a directory; give a prefix in it, such as data/corpus")
    paths = OutputPaths(output)
    try:
        found = _find(inputs, paths, settings)
        settings = msgspec.structs.replace(settings, tokenizer_digest=model_digest(settings.tokenizer))
        with paths.locked():
            manifest = paths.read_manifest()
            is_like = manifest is not None and manifest.settings == settings
            digest = input_digest(found) if is_like or overwrite or not paths.bin.exists() else ""
            if manifest and is_like and manifest.input_digest == digest:
                return PreparedData(output, manifest, up_to_date=True)
            if not overwrite and (existing := [str(path) for path in (paths.bin, paths.idx) if path.exists()]):
                raise UserError(
                    f"{' and '.join(existing)} exist already, with other data or made with other options; "
                    "add --overwrite to replace them, or choose another --output"
                )
            manifest = _write(Reader(found, settings), digest, paths, workers, progress)
            return PreparedData(output, manifest, up_to_date=False)
    except OSError as error:
        place = error.filename or output
        raise UserError(f"cannot read or write {str(place)!r}: {error.strerror or error}") from error


def ensure_stdlib_corpus(prefix: Path) -> None:
    """Prepares the standard library at `prefix` unless it is there already; that of another interpreter is replaced.

    Any number of processes may call this at once: the first prepares, the others wait and then find it there.
    """
    manifest, settings = OutputPaths(prefix).read_manifest(), Settings(stdlib=STDLIB)
    if manifest is None or manifest.settings != settings:
        prepare([], prefix, settings, overwrite=True)


class OutputPaths:
    """The files that belong to a prefix, and the lock that guards them; `cache` has training's indices of the data."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.all = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx", ".prepared.json")]
        self.bin, self.idx, self.manifest = self.all
        self.cache = prefix.with_name(f"{prefix.name}.cache")
        # One name, so that the lock's next holder clears what a killed process left.
        self.partial = prefix.with_name(f".{prefix.name}.partial")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the prefix's lock, waiting for whoever has it. The lock file stays: removing it would race."""
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        with self.prefix.with_name(f".{self.prefix.name}.lock").open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def read_manifest(self) -> Manifest | None:
        """The manifest if it is there, readable, and the files have the sizes that it states."""
        try:
            manifest = msgspec.json.decode(self.manifest.read_bytes(), type=Manifest)
            sizes = {"bin": self.bin.stat().st_size, "idx": self.idx.stat().st_size}
        except (OSError, msgspec.MsgspecError):
            return None
        return manifest if manifest.version == _VERSION and manifest.sizes == sizes else None


def stdlib_directory() -> Path:
    """The directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _find(inputs: Sequence[Path], paths: OutputPaths, settings: Settings) -> list[Source]:
    if not inputs and not settings.stdlib:
        raise UserError("nothing to prepare; give --input PATH... or --stdlib")
    found = find_sources(inputs, settings, paths.all) if inputs else []
    if settings.stdlib:
        only_python = Settings(suffixes=(".py",), exclude=(*_STDLIB_EXCLUDED, *settings.exclude))
        found += find_sources([stdlib_directory()], only_python, [*paths.all, *(source.path for source in found)])
    return found


def model_digest(spec: TokenizerSpec) -> str:
    """A digest of a model that is a file or directory: its path may hold another one next time."""
    if spec.model is None or not Path(spec.model).exists():
        return ""
    return input_digest(find_sources([Path(spec.model)], _DEFAULTS))


def _write(reader: Reader, digest: str, paths: OutputPaths, workers: int, progress: Progress) -> Manifest:
    """Writes the three files and returns the manifest. The caller holds the lock."""
    settings = reader.settings
    tokenizer = tokenizers.build(settings.tokenizer)
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    eod = getattr(tokenizer, "eod", None)
    if settings.append_eod and eod is None:
        raise UserError(f"{settings.tokenizer.tokenizer_type} has no end-of-document id; add --no-append-eod")
    end = np.array([eod] if settings.append_eod else [], np.int32)
    try:
        shutil.rmtree(paths.partial, ignore_errors=True)
        paths.partial.mkdir()
        partial = [paths.partial / path.name for path in paths.all]
        bin_, idx, manifest_file = partial
        builder = IndexedDatasetBuilder(str(bin_), dtype=DType.optimal_dtype(tokenizer.vocab_size))
        with builder.data_file:
            for ids in tokenizers.encode_documents(reader, settings.tokenizer, workers):
                builder.add_document(np.append(ids, end), [ids.size + end.size])
                progress(reader.read, reader.total)
        lengths = builder.sequence_lengths
        if not lengths:
            raise UserError(f"found no document in {len(reader.sources)} files ({reader.skipped or 'all empty'})")
        builder.finalize(str(idx))
        manifest = Manifest(
            version=_VERSION,
            settings=settings,
            input_digest=digest,
            documents=len(lengths),
            is_cut=reader.is_cut,
            tokens=sum(map(int, lengths)),
            vocab_size=int(tokenizer.vocab_size),
            skipped=reader.skipped,
            sizes={"bin": bin_.stat().st_size, "idx": idx.stat().st_size},
        )
        manifest_file.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        paths.manifest.unlink(missing_ok=True)  # between the renames there is no manifest that could promise anything
        for index in paths.cache.glob("*Dataset-*"):  # keyed by path and settings: stale for other documents
            index.unlink()
        for file, place in zip(partial, paths.all, strict=True):
            os.replace(file, place)
    finally:
        shutil.rmtree(paths.partial, ignore_errors=True)
    return manifest
