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

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError, quiet_imports, reason_of
from megatron_muon.megatron.data.tokenizers import HUGGING_FACE, IN_TRAINING
from megatron_muon.megatron.flags import arguments
from megatron_muon.tools.models import mapping
from megatron_muon.tools.models.architecture import Architecture, check_named, from_config, to_flags
from megatron_muon.tools.models.checkpoint import Weights, write
from megatron_muon.tools.models.command import FSDP_DTENSOR, TORCH_DIST
from megatron_muon.tools.models.mapping import Rule
from megatron_muon.tools.models.model import counterpart, dtype_of, is_of_bytes

_EXPERIMENT, _TOKENIZER = "model.yaml", "tokenizer"
_DIVISOR = 128
"""Megatron's default of --make-vocab-size-divisible-by."""

_LONGEST = 4096
"""A longer context is trained with only where it is asked for."""

INDEX = "model.safetensors.index.json"

_WRITTEN_BY_US = ("config.json", "model.yaml", files.TRACKER)
"""Files of which an export or import has one."""

_BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""What older folders hold beside weights."""


def export_model(args: argparse.Namespace) -> None:
    """`megatron-muon export`."""
    with quiet_imports():
        weights = Weights(args.checkpoint, verify=not args.no_verify_checkpoint)
        dtype = dtype_of(args.dtype, weights.trained_in)
        source = counterpart(weights, args.tokenizer) if args.to == "hf" else None
        if source is None:
            check_named(weights.args)
    with new_folder(args.out, source=weights.folder, overwrite=args.overwrite) as out:
        if source is None:
            write(
                out, weights.shapes, weights.read, layout=TORCH_DIST, args=weights.args, iteration=weights.iteration,
                dtype=dtype,
            )  # fmt: skip
            what = f"torch_dist, iteration {weights.iteration}"
        else:
            size = write_tensors(out, source.rules, source.read, dtype=dtype, limit=int(args.max_file_gb * 1e9))
            config = source.config(dtype)
            (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
            if source.tokenizer is not None:
                source.tokenizer.save_pretrained(out)
            what = f"{config['architectures'][0]}, {size / 1e6:,.1f} MB in {config['torch_dtype']}"
    print(f"{args.out}: {what}, from {weights.folder}")
    if source is not None and source.tokenizer is not None:
        print(f"try it: megatron-muon generate --checkpoint {args.out} --prompt 'Once upon a time'")


def import_model(args: argparse.Namespace) -> None:
    """`megatron-muon import`."""
    with quiet_imports():
        config, tokenizer = _read(args.folder)
        multiple = _DIVISOR * args.tensor_parallel
        model = from_config(config, rows=-(-config["vocab_size"] // multiple) * multiple)
        tensors = open_tensors(args.folder, prefix="transformer." if config["model_type"] == "gpt2" else "")
        if model.tied:
            tensors.pop("lm_head.weight", None)  # older folders hold it all the same
        rules = mapping.rules(model)
        found = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
        mapping.check(args.folder, found, mapping.hf_shapes(rules))
        table = {rule.megatron: rule for rule in rules if rule.megatron}
        flags = _flags(args, model, config, tokenizer)
        argv = [word for flag, value in flags.items() for word in ([flag] if value is True else [flag, str(value)])]
        run_args = arguments.parse(arguments.build_parser(), argv)
        run_args.padded_vocab_size, run_args.iteration = model.rows, 0
    with new_folder(args.out, source=args.folder, overwrite=args.overwrite) as out:
        write(
            out, {name: rule.shape for name, rule in table.items()},
            lambda name: table[name].join([tensors[part][:] for part in table[name].hf]),
            layout=args.layout, args=run_args, iteration=None, dtype=torch.float32,
        )  # fmt: skip
        if tokenizer is not None:
            tokenizer.save_pretrained(out / _TOKENIZER)
        head = f"# {args.folder.name}, imported. Add data, learning rates and batch sizes, here or by --set.\n"
        (out / _EXPERIMENT).write_text(head + yaml.safe_dump({"MODEL_ARGS": flags}, sort_keys=False), "utf-8")
    print(f"{args.out}: {model.model_type} of {model.layers} layers as {args.layout}, {len(table)} weights")
    print(
        f"next: megatron-muon train --config {args.out / _EXPERIMENT} --nproc N --set data_path=PREFIX "
        "--set lr=RATE --set train_iters=STEPS --set micro_batch_size=1 --set global_batch_size=SIZE"
    )


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    """A folder's config with all defaults, and its tokenizer, None where it has none."""
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json; give the folder that save_pretrained or a download has made")
    what = "config.json"
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False).to_dict()
        what = "tokenizer"
        found = any(path.glob("tokenizer*"))
        return config, AutoTokenizer.from_pretrained(str(path), trust_remote_code=False) if found else None
    except Exception as error:  # whatever files of another kind lead to
        raise UserError(f"the {what} of {path} cannot be read: {reason_of(error)}") from error


def _flags(args: argparse.Namespace, model: Architecture, config: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The flags of a run that goes on from the import, as MODEL_ARGS."""
    impl = args.transformer_impl or ("transformer_engine" if arguments.has_transformer_engine() else "local")
    # The factor of the shipped experiments: a rate then means about the same step as AdamW's.
    flags = {"--optimizer": "muon", "--muon-extra-scale-factor": 0.2} | to_flags(model)
    if args.layout == FSDP_DTENSOR:
        flags |= {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": "optim_grads_params"}
    flags["--seq-length"] = min(model.positions, _LONGEST)
    flags["--make-vocab-size-divisible-by"] = _DIVISOR
    if args.tensor_parallel > 1:
        flags["--tensor-model-parallel-size"] = args.tensor_parallel
    if impl == "transformer_engine" and model.experts:
        flags["--moe-grouped-gemm"] = True
    if str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.") == "bfloat16":
        flags["--bf16"] = True
    out = args.out.resolve()
    if tokenizer is None or is_of_bytes(tokenizer):  # data of `data prepare`, whose byte-level tokenizer it stands for
        flags["--tokenizer-type"] = IN_TRAINING
    else:
        flags |= {"--tokenizer-type": HUGGING_FACE, "--tokenizer-model": str(out / _TOKENIZER)}
    return flags | {"--transformer-impl": impl, "--load": str(out), "--finetune": True}


@contextmanager
def new_folder(out: Path, *, source: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write in, which gets the name `out` at the end, and none where anything fails.

    `overwrite` replaces what a former export or import has left, and nothing else. A `UserError` where `out` may not be
    replaced, cannot be written, or lies in `source` or around it.
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

    Names get `prefix` where none has it: GPT-2's are published without. A folder without safetensors, or with damaged
    ones, is a `UserError`.
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
