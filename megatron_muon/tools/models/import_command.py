"""`megatron-muon import`: a model of Hugging Face as a checkpoint to go on from with Muon."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError, quiet_imports, reason_of
from megatron_muon.tools.parser import CommandParser, positive

DESCRIPTION = """\
Writes a model of Hugging Face (Llama, Mistral, Qwen 2 and 3, Mixtral, Qwen 3 MoE, GPT-2) as a checkpoint for --load DIR
--finetune, tokenizer and flags with it: OUT/model.yaml is an experiment file to add data and learning rates to.
Nothing is downloaded: FOLDER is a local one. What Megatron has no flag for is refused.
"""

EXAMPLES = """\
examples:
  megatron-muon import --from hf models/Llama-3.2-1B imported/llama
  megatron-muon train --config imported/llama/model.yaml --nproc 8 --set data_path=data/mine --set lr=1e-4 ...
"""

EXPERIMENT = "model.yaml"
_TOKENIZER = "tokenizer"
_DIVISOR = 128
"""Megatron's default of --make-vocab-size-divisible-by."""

_LONGEST = 4096
"""A longer context is trained with only where it is asked for."""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon import`."""
    from megatron_muon.tools.models.written import FSDP_DTENSOR, TORCH_DIST

    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("--from", choices=("hf",), required=True, dest="form", help="the form of FOLDER")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="config.json, *.safetensors, tokenizer")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--layout", choices=(FSDP_DTENSOR, TORCH_DIST), default=FSDP_DTENSOR,
        help="for Megatron-FSDP (fsdp_dtensor), or for runs without it (torch_dist)")  # fmt: skip
    parser.add_argument("--tensor-parallel", type=positive, default=1, metavar="N",
        help="--tensor-model-parallel-size of the run, which pads the vocabulary (1)")  # fmt: skip
    parser.add_argument("--transformer-impl", choices=("local", "transformer_engine"),
        help="whose layers the run has (Transformer Engine's where it is installed)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace the folder where it is there already")


def run(args: argparse.Namespace) -> int:
    """Imports."""
    from megatron_muon.tools.models import folder, written

    with quiet_imports():
        import torch

        from megatron_muon.megatron.flags.arguments import has_transformer_engine
        from megatron_muon.tools.models.hf_config import from_config
        from megatron_muon.tools.models.mapping import rules

        config, tokenizer = _read(args.folder)
        multiple = _DIVISOR * args.tensor_parallel
        model = from_config(config, rows=-(-config["vocab_size"] // multiple) * multiple)
        tensors = folder.Tensors(args.folder, prefix="transformer." if config["model_type"] == "gpt2" else "")
        every = rules(model)
        folder.check(tensors, every, args.folder, tied=model.tied)
        table = {rule.megatron: rule for rule in every if rule.megatron}
        impl = args.transformer_impl or ("transformer_engine" if has_transformer_engine() else "local")
        flags = _flags(args, model, config, tokenizer, impl)
        run_args = _arguments(flags, model.rows)
    with folder.new_folder(args.out, source=args.folder, overwrite=args.overwrite) as out:
        written.write(
            out, {name: rule.shape for name, rule in table.items()},
            lambda name: table[name].join([tensors[part] for part in table[name].hf]), layout=args.layout,
            args=run_args, iteration=None, dtype=torch.float32, transformer_engine=impl == "transformer_engine",
        )  # fmt: skip
        if tokenizer is not None:
            tokenizer.save_pretrained(out / _TOKENIZER)
        (out / EXPERIMENT).write_text(_experiment(args, flags), "utf-8")
    print(f"{args.out}: {model.model_type} of {model.layers} layers as {args.layout}, {len(table)} weights")
    print(
        f"next: megatron-muon train --config {args.out / EXPERIMENT} --nproc N --set data_path=PREFIX "
        "--set lr=RATE --set train_iters=STEPS --set micro_batch_size=1 --set global_batch_size=SIZE"
    )
    return 0


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    """A folder's config with all defaults, and its tokenizer, None where it has none."""
    from transformers import AutoConfig, AutoTokenizer

    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json; give the folder that save_pretrained or a download has made")
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False).to_dict()
    except Exception as error:  # whatever a config.json of another kind leads to
        raise UserError(f"{path / 'config.json'} cannot be read: {reason_of(error)}") from error
    if not any(path.glob("tokenizer*")):
        return config, None
    try:
        return config, AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer has exceptions of its own
        raise UserError(f"the tokenizer in {path} cannot be loaded: {reason_of(error)}") from error


def _flags(args: argparse.Namespace, model: Any, config: dict[str, Any], tokenizer: Any, impl: str) -> dict[str, Any]:
    """The flags of a run that goes on from the import, as MODEL_ARGS."""
    from megatron_muon.megatron.data.tokenizers import HUGGING_FACE, IN_TRAINING
    from megatron_muon.tools.models.architecture import to_flags
    from megatron_muon.tools.models.tokenizer import is_of_bytes
    from megatron_muon.tools.models.written import FSDP_DTENSOR

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


def _arguments(flags: dict[str, Any], rows: int) -> argparse.Namespace:
    """Megatron's arguments for these flags, as a checkpoint of such a run would have them."""
    from megatron_muon.megatron.flags import arguments

    argv = [word for flag, value in flags.items() for word in ([flag] if value is True else [flag, str(value)])]
    args = arguments.parse(arguments.build_parser(), argv)
    args.padded_vocab_size, args.iteration = rows, 0
    return args


def _experiment(args: argparse.Namespace, flags: dict[str, Any]) -> str:
    import yaml

    head = f"# {args.folder.name}, imported. Add data, learning rates and batch sizes, here or by --set.\n"
    return head + yaml.safe_dump({"MODEL_ARGS": flags}, sort_keys=False)
