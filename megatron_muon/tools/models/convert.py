"""Exports checkpoints to Hugging Face or torch_dist, and imports folders of Hugging Face."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.tokenizers import HUGGING_FACE, IN_TRAINING
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.flags.refusals import has_transformer_engine
from megatron_muon.tools.models import mapping
from megatron_muon.tools.models.architecture import (
    GPT2,
    check_named,
    check_nothing_is_lost,
    to_config,
    to_flags,
)
from megatron_muon.tools.models.hf_model import counterpart, from_folder, is_byte_level
from megatron_muon.tools.models.mapping import WeightRow
from megatron_muon.tools.models.weights import FSDP_DTENSOR, TORCH_DIST, Weights, write

_EXPERIMENT, _TOKENIZER = "model.yaml", "tokenizer"
_DIVISOR = 128
"""Megatron's default of --make-vocab-size-divisible-by."""

_MAX_CONTEXT = 4096
"""Longest --seq-length that an import chooses."""

_FILE_BYTES = 10**9
"""Size of a safetensors file; export needs as much memory besides the largest tensor."""

INDEX = "model.safetensors.index.json"

_BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""Tensors of older folders that are not weights."""


def export_model(args: argparse.Namespace) -> None:
    """Run `megatron-muon export`."""
    with new_folder(args.out) as out:
        weights = Weights(args.checkpoint, verify=not args.no_verify_checkpoint)
        dtype = weights.trained_in if args.dtype == "auto" else getattr(torch, args.dtype)
        if args.to == TORCH_DIST:
            what = _export_torch_dist(weights, out, args.tokenizer, dtype)
        else:
            what = _export_hf(weights, out, args.tokenizer, dtype)
    print(f"{args.out}: {what}, from {weights.folder}")


def _export_torch_dist(
    weights: Weights, out: Path, tokenizer: str | None, dtype: torch.dtype
) -> str:
    if tokenizer is not None:
        raise UserError(f"--tokenizer {tokenizer} has no place in torch_dist; leave it out")
    check_named(weights.args)
    iteration = weights.iteration
    write(
        out,
        weights.shapes,
        weights.read,
        layout=TORCH_DIST,
        args=weights.args,
        iteration=iteration,
        dtype=dtype,
    )
    return f"torch_dist, iteration {iteration}"


def _export_hf(weights: Weights, out: Path, tokenizer: str | None, dtype: torch.dtype) -> str:
    source = counterpart(weights, tokenizer)
    size = write_tensors(out, source.table, source.read, dtype=dtype)
    config = source.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(out)
    return f"{config['architectures'][0]}, {size / 1e6:,.1f} MB"


def import_model(args: argparse.Namespace) -> None:
    """Run `megatron-muon import`."""
    folder: Path = args.folder
    with new_folder(args.out) as out:
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder} has no config.json; give a folder that save_pretrained or a download"
                " made"
            )
        config = from_folder(AutoConfig, folder).to_dict()
        tokenizer = from_folder(AutoTokenizer, folder) if any(folder.glob("tokenizer*")) else None
        flags = _flags(args.out.resolve(), config, tokenizer)
        run_args = _run_args(flags)
        run_args.padded_vocab_size = math.ceil(config["vocab_size"] / _DIVISOR) * _DIVISOR
        check_nothing_is_lost(config, run_args)
        count = _import_weights(folder, out, to_config(run_args), run_args)
        if tokenizer is not None:
            tokenizer.save_pretrained(out / _TOKENIZER)
        head = f"# {folder.name}, imported. Add data, learning rates and batch sizes, here or by"
        content = yaml.safe_dump({"MODEL_ARGS": flags}, sort_keys=False)
        (out / _EXPERIMENT).write_text(f"{head} flags.\n{content}", "utf-8")
    kind = to_config(run_args)["model_type"]
    what = f"{kind} of {run_args.num_layers} layers, {count} weights"
    print(f"{args.out}: {what}; train it with --config {args.out / _EXPERIMENT}")


def _run_args(flags: dict[str, Any]) -> argparse.Namespace:
    words: list[str] = []
    for flag, value in flags.items():
        words.append(flag)
        if value is not True:
            words.append(str(value))
    args = arguments.parse(arguments.build_parser(), words)
    args.iteration = 0
    return args


def _import_weights(
    folder: Path, out: Path, config: dict[str, Any], args: argparse.Namespace
) -> int:
    """Write the weights of a folder as a checkpoint; the number of weights."""
    prefix = "transformer." if config["model_type"] == GPT2 else ""
    tensors = open_tensors(folder, prefix=prefix)
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)  # older folders hold it all the same
    table = mapping.weight_table(config, args)
    found = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    mapping.check_shapes(folder, found, mapping.hf_shapes(table))
    rows = {row.megatron: row for row in table}

    def read(name: str) -> Tensor:
        parts = [tensors[part][:] for part in rows[name].hf]
        return rows[name].to_megatron(parts)

    write(
        out,
        {name: row.shape for name, row in rows.items()},
        read,
        layout=FSDP_DTENSOR,
        args=args,
        iteration=None,
        dtype=torch.float32,
    )
    return len(rows)


def _flags(out: Path, config: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The flags of a run that continues from the import, as MODEL_ARGS."""
    impl = "transformer_engine" if has_transformer_engine() else "local"
    flags: dict[str, Any] = {
        "--optimizer": "muon",
        # that of the shipped experiments: a rate then means about the same step as AdamW's
        "--muon-extra-scale-factor": 0.2,
        **to_flags(config),
        "--use-megatron-fsdp": True,
        "--data-parallel-sharding-strategy": "optim_grads_params",
    }
    flags["--seq-length"] = min(flags["--max-position-embeddings"], _MAX_CONTEXT)
    flags["--make-vocab-size-divisible-by"] = _DIVISOR
    if impl == "transformer_engine" and "--num-experts" in flags:
        flags["--moe-grouped-gemm"] = True
    if str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.") == "bfloat16":
        flags["--bf16"] = True
    # for data of `data prepare`, whose byte-level tokenizer it stands for
    if tokenizer is None or is_byte_level(tokenizer):
        flags["--tokenizer-type"] = IN_TRAINING
    else:
        flags["--tokenizer-type"] = HUGGING_FACE
        flags["--tokenizer-model"] = str(out / _TOKENIZER)
    return flags | {"--transformer-impl": impl, "--load": str(out), "--finetune": True}


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, which is renamed to `out` at the end, and removed where anything fails.

    Raises:
        UserError: `out` is not empty, or cannot be written.
    """
    out = out.resolve()
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} exists already; give another folder, or remove it first")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(out)
    except OSError as error:
        raise UserError(f"{out} was not written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_tensors(
    folder: Path,
    table: Sequence[WeightRow],
    read: Callable[[WeightRow], Tensor],
    *,
    dtype: torch.dtype,
    limit: int = _FILE_BYTES,
) -> int:
    """Write the tensors of a table's weights, which `read` returns; the number of bytes.

    One file is held in memory at a time, of at most `limit` bytes unless a single tensor is larger.
    """
    row_of = {name: row for row in table for name in row.hf}
    split = split_state_dict_into_shards_factory(
        mapping.hf_shapes(table),
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    for file_name, names in split.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for row in dict.fromkeys(row_of[name] for name in names):
            tensors.update(row.tensors(read(row), dtype))
        file = folder / file_name
        file.touch()
        mode = file.stat().st_mode  # save_file makes one that only its user can read
        save_file({name: tensors[name] for name in names}, file, metadata={"format": "pt"})
        file.chmod(mode)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    total: int = split.metadata["total_size"]
    return total


def open_tensors(folder: Path, *, prefix: str = "") -> dict[str, Any]:
    """The weights of a folder as slices of safetensors by name: `[:]` reads one.

    Names get `prefix` where none has it: those of the published GPT-2 do not.

    Raises:
        UserError: the folder has no safetensors, or damaged ones.
    """
    tensors: dict[str, Any] = {}
    try:
        for path in sorted(folder.glob("model*.safetensors")):
            file: Any = safe_open(str(path), "pt")
            for name in file.keys():  # noqa: SIM118  # not a dict
                if not _BUFFERS.fullmatch(name):
                    tensors[name] = file.get_slice(name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the tensors in {folder} cannot be read: {error}") from error
    if not tensors:
        raise UserError(
            f"{folder} has no model*.safetensors; save the model with save_pretrained first"
        )
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {prefix + name: tensor for name, tensor in tensors.items()}
