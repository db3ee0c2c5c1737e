"""Exports checkpoints to folders of Hugging Face, and imports them."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.tokenizers import HUGGING_FACE, IN_TRAINING
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.flags.config_file import as_argv
from megatron_muon.megatron.flags.refusals import has_transformer_engine
from megatron_muon.tools.models import mapping
from megatron_muon.tools.models.architecture import check_nothing_is_lost, to_config, to_flags
from megatron_muon.tools.models.hf_model import counterpart, from_folder, is_byte_level
from megatron_muon.tools.models.weights import Weights, write

_EXPERIMENT, _TOKENIZER = "model.yaml", "tokenizer"
_DIVISOR = 128
"""Megatron's default of --make-vocab-size-divisible-by."""

_MAX_CONTEXT = 4096
"""Longest --seq-length that an import chooses."""

_FILE_BYTES = 10**9
"""Size of a safetensors file."""


def export_model(args: argparse.Namespace) -> None:
    """Run `megatron-muon export`."""
    out: Path = args.out
    _check_new(out)
    checkpoint = Weights(args.checkpoint, verify=not args.no_verify_checkpoint)
    dtype = checkpoint.trained_in if args.dtype == "auto" else getattr(torch, args.dtype)
    model = counterpart(checkpoint, args.tokenizer, dtype)
    config = model.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(model.tensors, out, max_shard_size=_FILE_BYTES)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(out)
    file = out / "config.json"
    file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    for tensors in out.glob("*.safetensors"):
        tensors.chmod(file.stat().st_mode)  # safetensors makes files that only their user can read
    print(f"{out}: {config['architectures'][0]}, from {checkpoint.folder}")


def import_model(args: argparse.Namespace) -> None:
    """Run `megatron-muon import`."""
    folder, out = args.folder, args.out.resolve()
    _check_new(out)
    if not (folder / "config.json").is_file():  # transformers would download a model of this name
        raise UserError(
            f"{folder} has no config.json; give a folder that save_pretrained or a download made"
        )
    config = from_folder(AutoConfig, folder).to_dict()
    tokenizer = from_folder(AutoTokenizer, folder) if any(folder.glob("tokenizer*")) else None
    flags = _flags(out, config, tokenizer)
    run_args = args_of_flags(flags)
    run_args.padded_vocab_size = math.ceil(config["vocab_size"] / _DIVISOR) * _DIVISOR
    check_nothing_is_lost(config, run_args)
    weights = _megatron_weights(folder, to_config(run_args), run_args)
    out.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(out / _TOKENIZER)
    head = f"# {folder.name}, imported. Add data, learning rates and batch sizes, here or by flags."
    content = yaml.safe_dump({"MODEL_ARGS": flags}, sort_keys=False)
    (out / _EXPERIMENT).write_text(f"{head}\n{content}", "utf-8")
    write(out, weights, run_args)
    print(f"{out}: {len(weights)} weights; train it with --config {out / _EXPERIMENT}")


def _check_new(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists already; give another folder, or remove it first")


def args_of_flags(flags: dict[str, Any]) -> argparse.Namespace:
    """Megatron's arguments for MODEL_ARGS."""
    pairs = [(flag, () if value is True else (str(value),)) for flag, value in flags.items()]
    args = arguments.parse(arguments.build_parser(), list(as_argv(pairs)))
    args.iteration = 0
    return args


def _megatron_weights(
    folder: Path, config: dict[str, Any], args: argparse.Namespace
) -> dict[str, Tensor]:
    """The weights of a folder by their names in Megatron, in fp32."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read: {error}; download it again") from error
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)  # older folders hold it all the same
    table = mapping.weight_table(config, args)
    names = {name for row in table for name in row.hf}
    mapping.check_names(folder, tensors.keys(), names)
    weights = {}
    for row in table:
        parts = [tensors.pop(name) for name in row.hf]
        weights[row.megatron] = row.to_megatron(parts).float().contiguous()
    return weights


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
