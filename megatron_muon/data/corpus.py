"""Writes documents as Megatron's indexed data: `PREFIX.bin` and `PREFIX.idx`.

The same input and options give the same bytes, whatever the number of workers. Files are written under
temporary names and renamed at the end, under a lock, so several processes may ask for the same prefix at once
and an interrupted run leaves no half of a file. A manifest, `PREFIX.prepared.json`, is renamed last: where it
is, the data is complete.
"""

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_muon.data import pool, tokenizers
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
    """What `prepare` wrote, or found already written.

    Attributes:
        prefix: `PREFIX` as Megatron's `--data-path` takes it.
        documents: Number of documents.
        tokens: Number of tokens, end-of-document ids included.
        bytes: Size of `PREFIX.bin`.
        seconds: Wall time of this call.
        flags: The flags with which training reads the data.
        up_to_date: Nothing was written, because the same data was there.
        skipped: What was passed over, in words; empty when nothing was.
    """

    prefix: Path
    documents: int
    tokens: int
    bytes: int
    seconds: float
    flags: tuple[str, ...]
    up_to_date: bool = False
    skipped: str = ""


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
    progress: Progress | None = None,
) -> PreparedData:
    """Tokenizes the inputs into `output.bin` and `output.idx`.

    Args:
        inputs: Text files, JSONL files, directories of them.
        output: The prefix; missing parent directories are created.
        stdlib: Also take the running interpreter's standard library (`*.py` files), after the inputs.
        sources: Which files to take and how to read them.
        tokenizer: Which tokenizer; byte-level by default.
        append_eod: End every document with the tokenizer's end-of-document id.
        workers: Processes that tokenize. The result does not depend on it.
        overwrite: Replace existing output that holds something else.
        progress: Told about the bytes read.

    Raises:
        UserError: A missing or broken input, nothing to prepare, output that exists already or cannot be
            written.
    """
    start = time.perf_counter()
    options, spec = sources or SourceOptions(), tokenizer or TokenizerSpec()
    tokenizers.check_spec(spec)
    if workers < 1:
        raise UserError(f"--workers {workers} is not possible; give 1 or more")
    found = _find(list(inputs), output, stdlib, options)
    settings = _settings(options, spec, append_eod, stdlib)
    paths = OutputPaths(output)
    with paths.locked():
        manifest = paths.read_manifest()
        same_settings = manifest is not None and manifest["settings"] == settings
        if manifest is not None and same_settings and manifest["input_digest"] == input_digest(found):
            return _prepared(output, manifest, spec, start, up_to_date=True)
        existing = [str(path) for path in (paths.bin, paths.idx) if path.exists()]
        if existing and not overwrite:
            raise UserError(
                f"{' and '.join(existing)} exist already, with other data or made with other options; "
                f"add --overwrite to replace them, or choose another --output"
            )
        manifest = _write(found, paths, options, spec, append_eod, workers, settings, progress)
    return _prepared(output, manifest, spec, start)


def ensure_stdlib_corpus(prefix: Path) -> None:
    """Prepares the standard library at `prefix` unless it is there already.

    Any number of processes may call this at once: the first prepares, the others wait and then find it there.
    An older corpus at the same prefix (another interpreter, another version of this function) is replaced.

    Raises:
        UserError: The directory cannot be written.
    """
    paths, spec = OutputPaths(prefix), TokenizerSpec()
    settings = _settings(SourceOptions(), spec, True, True)

    def is_there() -> bool:
        manifest = paths.read_manifest()
        return manifest is not None and manifest["settings"] == settings

    if is_there():
        return
    with paths.locked():
        if not is_there():
            found = _find([], prefix, True, SourceOptions())
            _write(found, paths, SourceOptions(), spec, True, 1, settings, None)


class OutputPaths:
    """The files that belong to a prefix, and the lock that guards them."""

    def __init__(self, prefix: Path) -> None:
        """Names the files; touches nothing."""
        self.prefix = prefix
        self.bin, self.idx, self.manifest = (
            prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx", ".prepared.json")
        )
        self.lock = prefix.with_name(f".{prefix.name}.lock")

    def temporary(self, path: Path) -> Path:
        """Returns the name under which `path` is written; fixed, so that the lock's next holder reuses it."""
        return path.with_name(f".{path.name}.partial")

    def all(self) -> list[Path]:
        """Returns every file that may lie beside the prefix."""
        final = [self.bin, self.idx, self.manifest]
        return [*final, *(self.temporary(path) for path in final), self.lock]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the prefix's lock, waiting for whoever has it. The lock file stays: removing it would race.

        Raises:
            UserError: The directory cannot be created or written.
        """
        if not self.prefix.name or self.prefix.is_dir():
            raise UserError(f"--output {str(self.prefix)!r} is a directory; give a prefix in it, such as data/corpus")
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a")
        except OSError as error:
            raise UserError(
                f"cannot write to directory {str(self.prefix.parent)!r}: {error.strerror}; choose another --output"
            ) from None
        with file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def read_manifest(self) -> dict[str, Any] | None:
        """Returns the manifest if it is there, readable, and the files have the sizes that it states."""
        try:
            manifest = json.loads(self.manifest.read_text("utf-8"))
            sizes = {"bin": self.bin.stat().st_size, "idx": self.idx.stat().st_size}
            complete = manifest["version"] == MANIFEST_VERSION and manifest["sizes"] == sizes
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return manifest if complete else None


def _find(inputs: list[Path], output: Path, stdlib: bool, options: SourceOptions) -> list[Source]:
    if not inputs and not stdlib:
        raise UserError("nothing to prepare; give --input PATH... or --stdlib")
    own = OutputPaths(output).all()
    found = find_sources(inputs, options, own) if inputs else []
    if stdlib:
        only_python = SourceOptions(suffixes=(".py",), exclude=(*STDLIB_EXCLUDED, *options.exclude))
        taken = [*own, *(source.path for source in found)]
        found += find_sources([stdlib_directory()], only_python, taken)
    return found


def _settings(options: SourceOptions, spec: TokenizerSpec, append_eod: bool, stdlib: bool) -> dict[str, Any]:
    """Returns everything beside the input's bytes that decides what is written. JSON-comparable."""
    return {
        "tokenizer": [spec.tokenizer_type, spec.model, spec.vocab_size],
        "tokenizer_digest": model_digest(spec),
        "append_eod": append_eod,
        "stdlib": f"python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
        if stdlib
        else "",
        "suffixes": list(options.suffixes),
        "exclude": list(options.exclude),
        "format": options.file_format,
        "json_key": options.json_key,
    }


def model_digest(spec: TokenizerSpec) -> str:
    """Returns a digest of a model that is a file or directory: its path may hold another one next time."""
    if spec.model is None or not Path(spec.model).exists():
        return ""
    return input_digest(find_sources([Path(spec.model)], SourceOptions()))


def _write(
    sources: list[Source],
    paths: OutputPaths,
    options: SourceOptions,
    spec: TokenizerSpec,
    append_eod: bool,
    workers: int,
    settings: dict[str, Any],
    progress: Progress | None,
) -> dict[str, Any]:
    """Writes the three files and returns the manifest. The caller holds the lock."""
    encoder = tokenizers.build(spec)
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    if append_eod and encoder.eod is None:
        raise UserError(f"{spec.tokenizer_type} has no end-of-document id; add --no-append-eod")
    dtype = DType.optimal_dtype(encoder.vocab_size)
    counts = ReadCounts()
    temporary = [paths.temporary(path) for path in (paths.bin, paths.idx, paths.manifest)]
    documents = _reported(read_documents(sources, options, counts), sum(s.size for s in sources), progress)
    tokens = written = 0
    try:
        builder = IndexedDatasetBuilder(str(temporary[0]), dtype=dtype)
        try:
            for place, ids in pool.encode_documents(documents, spec, encoder, workers):
                ids = _checked(ids, place, encoder, dtype, append_eod)
                builder.add_document(ids, [ids.size])
                tokens, written = tokens + ids.size, written + 1
        finally:
            builder.data_file.close()
        if not written:
            raise UserError(f"found no document in {len(sources)} files ({counts.describe() or 'all empty'})")
        builder.finalize(str(temporary[1]))
        manifest = {
            "version": MANIFEST_VERSION,
            "settings": settings,
            "input_digest": counts.digest.hexdigest(),
            "documents": written,
            "tokens": tokens,
            "vocab_size": encoder.vocab_size,
            "skipped": counts.describe(),
            "sizes": {"bin": temporary[0].stat().st_size, "idx": temporary[1].stat().st_size},
        }
        temporary[2].write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        paths.manifest.unlink(missing_ok=True)  # between the renames there is no manifest that could promise anything
        for path, final in zip(temporary, (paths.bin, paths.idx, paths.manifest), strict=True):
            os.replace(path, final)
    except OSError as error:
        raise UserError(f"cannot write {str(paths.prefix)!r}: {error.strerror or error}") from error
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    return manifest


def _checked(
    ids: npt.NDArray[Any],
    place: str,
    encoder: tokenizers.Tokenizer,
    dtype: type[np.number[Any]],
    append_eod: bool,
) -> npt.NDArray[Any]:
    """Returns `ids` as `dtype`, ended by the end-of-document id; an id outside the vocabulary is an error."""
    if ids.size and (int(ids.max()) >= encoder.vocab_size or int(ids.min()) < 0):
        raise UserError(
            f"{place}: token ids reach from {int(ids.min())} to {int(ids.max())}, the vocabulary has "
            f"{encoder.vocab_size}; give a larger --vocab-size"
        )
    if not append_eod:
        return ids.astype(dtype)
    ended = np.empty(ids.size + 1, dtype=dtype)
    ended[:-1] = ids
    ended[-1] = encoder.eod
    return ended


def _reported(documents: Iterator[tuple[str, str]], total: int, progress: Progress | None) -> Iterator[tuple[str, str]]:
    """Passes documents on and reports the bytes that they hold (their characters, for speed)."""
    read = 0
    for document in documents:
        yield document
        read += len(document[1])
        if progress is not None:
            progress(min(read, total), total)
    if progress is not None:
        progress(total, total)


def _prepared(
    output: Path, manifest: dict[str, Any], spec: TokenizerSpec, start: float, *, up_to_date: bool = False
) -> PreparedData:
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
