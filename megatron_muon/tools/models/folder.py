"""A model's folder as Hugging Face has it: safetensors in files of bounded size; how one is written safely."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.tools.models.mapping import Rule

INDEX = "model.safetensors.index.json"

_WRITTEN_BY_US = ("config.json", "model.yaml", files.TRACKER)
"""Files of which an export or import has one."""

_BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""What older folders hold beside weights."""


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
        if not any((out / name).is_file() for name in _WRITTEN_BY_US):
            raise UserError(f"{out} is not a model that export or import has written, so it is not replaced")
    aside, before = (out.with_name(out.name + ending) for ending in (".unfinished", ".replaced"))
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


def write_tensors(
    folder: Path, rules: Sequence[Rule], read: Callable[[Rule], Tensor], *, dtype: torch.dtype, limit: int
) -> int:
    """Writes what `rules` make of the weights that `read` returns; the number of bytes.

    One file is held in memory at a time, of at most `limit` bytes unless a single tensor is larger.
    """
    shapes = {name: shape for rule in rules for name, shape in zip(rule.hf, rule.hf_shapes(), strict=True)}
    of = {name: rule for rule in rules for name in rule.hf}
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: shape.numel() * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    for name, names in split.filename_to_tensors.items():
        wanted = dict.fromkeys(of[name] for name in names)
        tensors = {name: part for rule in wanted for name, part in converted(rule, read(rule), dtype)}
        file = folder / name
        file.touch()
        mode = file.stat().st_mode  # save_file's own is for its user alone
        save_file({name: tensors[name] for name in names}, file, metadata={"format": "pt"})
        file.chmod(mode)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    total: int = split.metadata["total_size"]
    return total


def converted(rule: Rule, weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What a rule makes of a weight, by name: tensors with memory of their own."""
    for name, part in zip(rule.hf, rule.split(weight), strict=True):
        part = part.to(dtype)
        yield name, part.clone() if part.untyped_storage().nbytes() != part.nbytes else part.contiguous()


def open_tensors(folder: Path, *, prefix: str = "") -> dict[str, Any]:
    """The weights of a folder as slices of safetensors by name: `[:]` reads one, `get_shape()` does not.

    Names get `prefix` where none has it: GPT-2's are published without.

    Raises:
        UserError: the folder has no safetensors, or one is damaged.
    """
    index = folder / INDEX
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        else:
            names = sorted(file.name for file in folder.glob("*.safetensors"))
        opened: list[Any] = [safe_open(str(folder / name), "pt") for name in names]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"the tensors in {folder} cannot be read: {error}") from error
    if not opened:
        raise UserError(f"{folder} holds no *.safetensors; save the model with save_pretrained first")
    every = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118  # not a dict
    found = {name: tensor for name, tensor in every.items() if not _BUFFERS.fullmatch(name)}
    bare = not any(name.startswith(prefix) for name in found)
    return {prefix + name if bare else name: tensor for name, tensor in found.items()}
