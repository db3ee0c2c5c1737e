"""Writes a checkpoint as a folder of Hugging Face or for Megatron's own tools, and such a folder as a checkpoint."""

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
    check_named,
    check_nothing_is_lost,
    to_config,
    to_flags,
)
from megatron_muon.tools.models.checkpoint import FSDP_DTENSOR, TORCH_DIST, Weights, write
from megatron_muon.tools.models.mapping import Rule
from megatron_muon.tools.models.model import counterpart, from_folder, is_of_bytes

_EXPERIMENT, _TOKENIZER = "model.yaml", "tokenizer"
_DIVISOR = 128
"""Megatron's default of --make-vocab-size-divisible-by."""

_LONGEST = 4096
"""A longer context is trained with only where it is asked for."""

_FILE_BYTES = 10**9
"""Size of a safetensors file; as much memory is needed beside the largest tensor."""

INDEX = "model.safetensors.index.json"

_BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""What older folders hold beside weights."""


def export_model(args: argparse.Namespace) -> None:
    """`megatron-muon export`."""
    with new_folder(args.out) as out:
        weights = Weights(args.checkpoint, verify=not args.no_verify_checkpoint)
        dtype = weights.trained_in if args.dtype == "auto" else getattr(torch, args.dtype)
        if args.to == TORCH_DIST:
            if args.tokenizer is not None:
                raise UserError(
                    f"--tokenizer {args.tokenizer} has no place in torch_dist; leave it out"
                )
            check_named(weights.args)
            write(
                out,
                weights.shapes,
                weights.read,
                layout=TORCH_DIST,
                args=weights.args,
                iteration=weights.iteration,
                dtype=dtype,
            )
            print(f"{args.out}: torch_dist, iteration {weights.iteration}, from {weights.folder}")
            return
        source = counterpart(weights, args.tokenizer)
        size = write_tensors(out, source.rules, source.read, dtype=dtype)
        config = source.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(out)
    print(f"{args.out}: {config['architectures'][0]}, {size / 1e6:,.1f} MB, from {weights.folder}")


def import_model(args: argparse.Namespace) -> None:
    """`megatron-muon import`."""
    folder: Path = args.folder
    with new_folder(args.out) as out:
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder} has no config.json; give the folder that save_pretrained or a download"
                " made"
            )
        config = from_folder(AutoConfig, folder).to_dict()
        tokenizer = from_folder(AutoTokenizer, folder) if any(folder.glob("tokenizer*")) else None
        flags = _flags(args.out.resolve(), config, tokenizer)
        argv = [
            word
            for flag, value in flags.items()
            for word in ([flag] if value is True else [flag, str(value)])
        ]
        run_args = arguments.parse(arguments.build_parser(), argv)
        run_args.padded_vocab_size, run_args.iteration = (
            -(-config["vocab_size"] // _DIVISOR) * _DIVISOR,
            0,
        )
        check_nothing_is_lost(config, run_args)
        ours = to_config(run_args)
        tensors = open_tensors(
            folder, prefix="transformer." if ours["model_type"] == "gpt2" else ""
        )
        if config["tie_word_embeddings"]:
            tensors.pop("lm_head.weight", None)  # older folders hold it all the same
        rules = mapping.rules(ours, run_args)
        found = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
        mapping.check(folder, found, mapping.hf_shapes(rules))
        table = {rule.megatron: rule for rule in rules}
        write(
            out,
            {name: rule.shape for name, rule in table.items()},
            lambda name: table[name].join([tensors[part][:] for part in table[name].hf]),
            layout=FSDP_DTENSOR,
            args=run_args,
            iteration=None,
            dtype=torch.float32,
        )
        if tokenizer is not None:
            tokenizer.save_pretrained(out / _TOKENIZER)
        head = (
            f"# {folder.name}, imported. Add data, learning rates and batch sizes, here or by"
            " --set.\n"
        )
        (out / _EXPERIMENT).write_text(
            head + yaml.safe_dump({"MODEL_ARGS": flags}, sort_keys=False), "utf-8"
        )
    what = f"{ours['model_type']} of {run_args.num_layers} layers, {len(table)} weights"
    print(f"{args.out}: {what}; train it with --config {args.out / _EXPERIMENT}")


def _flags(out: Path, config: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The flags of a run that goes on from the import, as MODEL_ARGS."""
    impl = "transformer_engine" if has_transformer_engine() else "local"
    # The factor of the shipped experiments: a rate then means about the same step as AdamW's.
    flags: dict[str, Any] = {"--optimizer": "muon", "--muon-extra-scale-factor": 0.2} | to_flags(
        config
    )
    flags |= {
        "--use-megatron-fsdp": True,
        "--data-parallel-sharding-strategy": "optim_grads_params",
    }
    flags["--seq-length"] = min(flags["--max-position-embeddings"], _LONGEST)
    flags["--make-vocab-size-divisible-by"] = _DIVISOR
    if impl == "transformer_engine" and "--num-experts" in flags:
        flags["--moe-grouped-gemm"] = True
    if str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.") == "bfloat16":
        flags["--bf16"] = True
    # data of `data prepare`, whose byte-level tokenizer it stands for
    if tokenizer is None or is_of_bytes(tokenizer):
        flags["--tokenizer-type"] = IN_TRAINING
    else:
        flags |= {"--tokenizer-type": HUGGING_FACE, "--tokenizer-model": str(out / _TOKENIZER)}
    return flags | {"--transformer-impl": impl, "--load": str(out), "--finetune": True}


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, which gets the name `out` at the end, and none where anything fails.

    A UserError where `out` holds something already, or cannot be written.
    """
    out = out.resolve()
    aside = out.with_name(out.name + ".unfinished")
    try:
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} is there already; give another folder, or remove it first")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        aside.rename(out)
    except OSError as error:
        raise UserError(f"{out} was not written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_tensors(
    folder: Path,
    rules: Sequence[Rule],
    read: Callable[[Rule], Tensor],
    *,
    dtype: torch.dtype,
    limit: int = _FILE_BYTES,
) -> int:
    """Writes what `rules` make of the weights that `read` returns; the number of bytes.

    One file is held in memory at a time, of at most `limit` bytes unless a single tensor is larger.
    """
    of = {name: rule for rule in rules for name in rule.hf}
    split = split_state_dict_into_shards_factory(
        mapping.hf_shapes(rules),
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    for name, names in split.filename_to_tensors.items():
        wanted = dict.fromkeys(of[name] for name in names)
        tensors = {name: part for rule in wanted for name, part in rule.tensors(read(rule), dtype)}
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


def open_tensors(folder: Path, *, prefix: str = "") -> dict[str, Any]:
    """The weights of a folder as slices of safetensors by name: `[:]` reads one, `get_shape()` does not.

    Names get `prefix` where none has it: GPT-2's are published without. A folder without
    safetensors, or with damaged ones, is a `UserError`.
    """
    try:
        opened: list[Any] = [
            safe_open(str(file), "pt") for file in sorted(folder.glob("model*.safetensors"))
        ]
    except (OSError, SafetensorError) as error:
        raise UserError(f"the tensors in {folder} cannot be read: {error}") from error
    if not opened:
        raise UserError(
            f"{folder} holds no model*.safetensors; save the model with save_pretrained first"
        )
    every = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118  # not a dict
    found = {name: tensor for name, tensor in every.items() if not _BUFFERS.fullmatch(name)}
    bare = not any(name.startswith(prefix) for name in found)
    return {prefix + name if bare else name: tensor for name, tensor in found.items()}
