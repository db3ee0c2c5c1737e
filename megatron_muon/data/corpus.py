"""Writes documents as Megatron's indexed data: `PREFIX.bin` and `PREFIX.idx`.

The same input and options give the same bytes, whatever the number of workers. Files are written under
temporary names and renamed at the end, under a lock, so several processes may ask for the same prefix at once
and an interrupted run leaves no half of a file. A manifest, `PREFIX.prepared.json`, is renamed last: where it
is, the data is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_muon.data import tokenizers
from megatron_muon.data.sources import (
    STDLIB_EXCLUDED,
    ReadCounts,
    Source,
    SourceOptions,
    find_sources,
    input_digest,
    read_documents,
    stdlib_directory,
)
from megatron_muon.data.tokenizers import TokenizerSpec
from megatron_muon.errors import UserError
from megatron_muon.quiet import quiet_imports

MANIFEST_VERSION = 1

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` wrote, or found already written (`up_to_date`).

    Attributes:
        tokens: number of tokens, end-of-document ids included.
        bytes: size of `PREFIX.bin`.
        flags: the flags with which training reads the data.
        skipped: what was passed over, in words; empty when nothing was.
    """

    prefix: Path
    documents: int
    tokens: int
    bytes: int
    seconds: float
    flags: tuple[str, ...]
    up_to_date: bool
    skipped: str


def prepare(
    inputs: Iterable[Path],
    output: Path,
    *,
    stdlib: bool = False,
    sources: SourceOptions | None = None,
    tokenizer: TokenizerSpec | None = None,
    append_eod: bool = True,
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress = lambda read, total: None,
) -> PreparedData:
    """Tokenizes the inputs into `output.bin` and `output.idx`.

    Args:
        inputs: text files, JSONL files, directories of them.
        output: the prefix; missing parent directories are created.
        stdlib: also take the running interpreter's standard library (`*.py` files), after the inputs.
        sources: which files to take and how to read them.
        tokenizer: which tokenizer; byte-level by default.
        append_eod: end every document with the tokenizer's end-of-document id.
        workers: processes that tokenize. The result does not depend on it.
        overwrite: replace existing output that holds something else.
        progress: told about the bytes read.

    Raises:
        UserError: a missing or broken input, nothing to prepare, output that exists already or cannot be written.
    """
    start = time.perf_counter()
    options, spec = sources or SourceOptions(), tokenizer or TokenizerSpec()
    tokenizers.check_spec(spec)
    if workers < 1:
        raise UserError(f"--workers {workers} is not possible; give 1 or more")
    paths = OutputPaths(output)
    found = _find(list(inputs), paths, stdlib, options)
    settings = _settings(options, spec, append_eod, stdlib)
    with paths.locked():
        manifest = paths.read_manifest()
        up_to_date = (
            manifest is not None
            and manifest["settings"] == settings
            and manifest["input_digest"] == input_digest(found)
        )
        existing = [str(path) for path in (paths.bin, paths.idx) if path.exists()]
        if existing and not up_to_date and not overwrite:
            raise UserError(
                f"{' and '.join(existing)} exist already, with other data or made with other options; "
                "add --overwrite to replace them, or choose another --output"
            )
        if manifest is None or not up_to_date:
            counts = ReadCounts()
            documents = _reported(read_documents(found, options, counts), sum(s.size for s in found), progress)
            manifest = _write(documents, counts, paths, spec, settings, workers)
    return PreparedData(
        prefix=output,
        documents=manifest["documents"],
        tokens=manifest["tokens"],
        bytes=manifest["sizes"]["bin"],
        seconds=time.perf_counter() - start,
        flags=("--data-path", str(output), *spec.training_flags()),
        up_to_date=up_to_date,
        skipped=manifest["skipped"],
    )


def ensure_stdlib_corpus(prefix: Path) -> None:
    """Prepares the standard library at `prefix` unless it is there already.

    Any number of processes may call this at once: the first prepares, the others wait and then find it there.
    An older corpus at the same prefix (another interpreter, another version of this function) is replaced.

    Raises:
        UserError: the directory cannot be written.
    """
    manifest = OutputPaths(prefix).read_manifest()
    if manifest is None or manifest["settings"] != _settings(SourceOptions(), TokenizerSpec(), True, True):
        prepare([], prefix, stdlib=True, overwrite=True)


class OutputPaths:
    """The files that belong to a prefix, and the lock that guards them."""

    def __init__(self, prefix: Path) -> None:
        """Names the files; touches nothing."""
        self.prefix = prefix
        self.bin, self.idx, self.manifest = (
            prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx", ".prepared.json")
        )
        # One name, so that the lock's next holder clears what a killed process left.
        self.partial = prefix.with_name(f".{prefix.name}.partial")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the prefix's lock, waiting for whoever has it. The lock file stays: removing it would race.

        Raises:
            UserError: the directory cannot be created or written.
        """
        directory = self.prefix.parent
        if not self.prefix.name or self.prefix.is_dir():
            raise UserError(f"--output {str(self.prefix)!r} is a directory; give a prefix in it, such as data/corpus")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = self.prefix.with_name(f".{self.prefix.name}.lock").open("a")
        except OSError as error:
            raise UserError(
                f"cannot write to directory {str(directory)!r}: {error.strerror}; choose another --output"
            ) from None
        with file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def read_manifest(self) -> dict[str, Any] | None:
        """The manifest if it is there, readable, and the files have the sizes that it states."""
        try:
            manifest = json.loads(self.manifest.read_text("utf-8"))
            sizes = {"bin": self.bin.stat().st_size, "idx": self.idx.stat().st_size}
            complete = manifest["version"] == MANIFEST_VERSION and manifest["sizes"] == sizes
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return manifest if complete else None


def _find(inputs: list[Path], paths: OutputPaths, stdlib: bool, options: SourceOptions) -> list[Source]:
    if not inputs and not stdlib:
        raise UserError("nothing to prepare; give --input PATH... or --stdlib")
    own = [paths.bin, paths.idx, paths.manifest]
    found = find_sources(inputs, options, own) if inputs else []
    if stdlib:
        only_python = SourceOptions(suffixes=(".py",), exclude=(*STDLIB_EXCLUDED, *options.exclude))
        found += find_sources([stdlib_directory()], only_python, [*own, *(source.path for source in found)])
    return found


def _settings(options: SourceOptions, spec: TokenizerSpec, append_eod: bool, stdlib: bool) -> dict[str, Any]:
    """All that decides what is written, beside the input's bytes. JSON-comparable."""
    return {
        "tokenizer": [spec.tokenizer_type, spec.model, spec.vocab_size],
        "tokenizer_digest": model_digest(spec),
        "append_eod": append_eod,
        "stdlib": f"python {platform.python_version()}" if stdlib else "",
        "suffixes": list(options.suffixes),
        "exclude": list(options.exclude),
        "format": options.file_format,
        "json_key": options.json_key,
    }


def model_digest(spec: TokenizerSpec) -> str:
    """A digest of a model that is a file or directory: its path may hold another one next time."""
    if spec.model is None or not Path(spec.model).exists():
        return ""
    return input_digest(find_sources([Path(spec.model)], SourceOptions()))


def _write(
    documents: Iterator[tuple[str, str]],
    counts: ReadCounts,
    paths: OutputPaths,
    spec: TokenizerSpec,
    settings: dict[str, Any],
    workers: int,
) -> dict[str, Any]:
    """Writes the three files and returns the manifest. The caller holds the lock."""
    encoder = tokenizers.build(spec)
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    if settings["append_eod"] and encoder.eod is None:
        raise UserError(f"{spec.tokenizer_type} has no end-of-document id; add --no-append-eod")
    dtype = DType.optimal_dtype(encoder.vocab_size)
    end = np.array([encoder.eod] if settings["append_eod"] else [], dtype)
    tokens = written = 0
    try:
        shutil.rmtree(paths.partial, ignore_errors=True)
        paths.partial.mkdir()
        bin_, idx, manifest_file = (paths.partial / path.name for path in (paths.bin, paths.idx, paths.manifest))
        builder = IndexedDatasetBuilder(str(bin_), dtype=dtype)
        try:
            for place, ids in tokenizers.encode_documents(documents, spec, workers):
                _check_ids(ids, place, encoder.vocab_size)
                ids = np.concatenate([ids, end], dtype=dtype, casting="unsafe")
                builder.add_document(ids, [ids.size])
                tokens, written = tokens + ids.size, written + 1
        finally:
            builder.data_file.close()
        if not written:
            raise UserError(f"found no document in {counts.files} files ({counts.describe() or 'all empty'})")
        builder.finalize(str(idx))
        manifest = {
            "version": MANIFEST_VERSION,
            "settings": settings,
            "input_digest": counts.digest.hexdigest(),
            "documents": written,
            "tokens": tokens,
            "vocab_size": encoder.vocab_size,
            "skipped": counts.describe(),
            "sizes": {"bin": bin_.stat().st_size, "idx": idx.stat().st_size},
        }
        manifest_file.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        paths.manifest.unlink(missing_ok=True)  # between the renames there is no manifest that could promise anything
        for file in (bin_, idx, manifest_file):
            os.replace(file, paths.prefix.with_name(file.name))
    except OSError as error:
        raise UserError(f"cannot write {str(paths.prefix)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(paths.partial, ignore_errors=True)
    return manifest


def _check_ids(ids: npt.NDArray[Any], place: str, vocab_size: int) -> None:
    if ids.size and (ids.max() >= vocab_size or ids.min() < 0):
        raise UserError(
            f"{place}: token ids reach from {ids.min()} to {ids.max()}, the vocabulary has {vocab_size}; give a larger "
            "--vocab-size"
        )


def _reported(documents: Iterator[tuple[str, str]], total: int, progress: Progress) -> Iterator[tuple[str, str]]:
    """Passes documents on and reports the bytes that they hold (their characters, for speed)."""
    read = 0
    for document in documents:
        yield document
        read += len(document[1])
        progress(min(read, total), total)
    progress(total, total)
