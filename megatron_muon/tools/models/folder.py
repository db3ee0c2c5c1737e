"""A model's folder as Hugging Face has it: config.json, safetensors in files of bounded size, a tokenizer."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.tools.models.mapping import Rule

INDEX = "model.safetensors.index.json"
UNFINISHED = ".unfinished"

_OURS = ("config.json", "model.yaml", files.TRACKER)
"""Files of which an export or import has one."""


@contextmanager
def new_folder(out: Path, *, source: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write in, which gets the name `out` at the end, and none where anything fails.

    `overwrite` replaces what a former export or import has left, and nothing else.

    Raises:
        UserError: `out` is there and must not be replaced, cannot be written, or lies in `source` or around it.
    """
    out, source = out.resolve(), source.resolve()
    if out == source or out in source.parents or source in out.parents:
        raise UserError(f"{out} and {source} lie one in the other; give another folder to write")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not overwrite:
            raise UserError(f"{out} is there already; give another folder, or --overwrite to replace it")
        if not out.is_dir() or not any((out / name).is_file() for name in _OURS):
            raise UserError(f"{out} is not a model that export or import has written, so it is not replaced")
    aside, before = (out.with_name(out.name + ending) for ending in (UNFINISHED, ".replaced"))
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        if out.is_dir():
            shutil.rmtree(before, ignore_errors=True)
            out.rename(before)
        aside.rename(out)
        shutil.rmtree(before, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{out} was not written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True)
class _File:
    name: str
    rules: list[Rule]


def write_tensors(
    folder: Path, rules: list[Rule], read: Callable[[Rule], Tensor], *, dtype: torch.dtype, limit: int
) -> int:
    """Writes what `rules` make of the weights that `read` returns; the number of bytes.

    One file is held in memory at a time, of at most `limit` bytes unless a single weight is larger.
    """
    parts = _files(rules, dtype, limit)
    sizes: dict[str, int] = {}
    place: dict[str, str] = {}
    for file in parts:
        written = _write_file(folder / file.name, file.rules, read, dtype)
        sizes |= written
        place |= dict.fromkeys(written, file.name)
    total = sum(sizes.values())
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return total


def _write_file(file: Path, rules: list[Rule], read: Callable[[Rule], Tensor], dtype: torch.dtype) -> dict[str, int]:
    """Writes one file; the bytes of each tensor in it."""
    from safetensors.torch import save_file

    tensors = {name: tensor for rule in rules for name, tensor in converted(rule, read(rule), dtype)}
    file.touch()
    mode = file.stat().st_mode  # save_file's own is for its user alone
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def converted(rule: Rule, weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What a rule makes of a weight, by name: tensors with memory of their own."""
    for name, part in zip(rule.hf, rule.split(weight), strict=True):
        part = part.to(dtype)
        yield name, part.clone() if part.untyped_storage().nbytes() != part.nbytes else part.contiguous()


def _files(rules: list[Rule], dtype: torch.dtype, limit: int) -> list[_File]:
    """The files, each with its rules in order."""
    groups: list[list[Rule]] = [[]]
    held = 0
    for rule in rules:
        size = sum(math.prod(shape) for shape in rule.hf_shapes()) * dtype.itemsize
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(rule)
        held += size
    if len(groups) == 1:
        return [_File("model.safetensors", groups[0])]
    return [_File(f"model-{n:05d}-of-{len(groups):05d}.safetensors", group) for n, group in enumerate(groups, 1)]


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder; looking one up reads it, and nothing is kept.

    Names get `prefix` where none has it: GPT-2's are published without.

    Raises:
        UserError: the folder has no safetensors, or one is damaged.
    """

    def __init__(self, folder: Path, *, prefix: str = "") -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / INDEX
        try:
            if index.is_file():
                names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            else:
                names = [file.name for file in sorted(folder.glob("*.safetensors"))]
            self._files: list[Any] = [safe_open(str(folder / name), "pt") for name in names]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(f"the tensors in {folder} cannot be read: {error}") from error
        if not self._files:
            raise UserError(f"{folder} holds no *.safetensors; save the model with save_pretrained first")
        places = {name: (file, name) for file in self._files for name in file.keys()}  # noqa: SIM118  # not a dict
        if not any(name.startswith(prefix) for name in places):
            places = {prefix + name: place for name, place in places.items()}
        self._of: dict[str, tuple[Any, str]] = places

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self._of[name]
        tensor: Tensor = file.get_tensor(stored)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        file, stored = self._of[name]
        return tuple(file.get_slice(stored).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


_BUFFERS = re.compile(r".*(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""What older folders hold beside weights."""


def check(tensors: Tensors, rules: list[Rule], folder: Path, *, tied: bool) -> None:
    """Refuses a folder that lacks a tensor, has one of another shape, or one that no rule takes."""
    wanted = {name: tuple(shape) for rule in rules for name, shape in zip(rule.hf, rule.hf_shapes(), strict=True)}
    others = {name for name in tensors.keys() - wanted.keys() if not _BUFFERS.fullmatch(name)}
    others -= {"lm_head.weight"} if tied else set()
    lacks = wanted.keys() - tensors.keys()
    shapes = {name for name in wanted.keys() & tensors.keys() if tensors.shape(name) != wanted[name]}
    for what, names in {"lacks": lacks, "has another shape of": shapes, "has no place in Megatron for": others}.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{folder} {what} {', '.join(sorted(names)[:3])}{more}")
