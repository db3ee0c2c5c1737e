"""`megatron-muon export`: a checkpoint as a folder of Hugging Face, or for Megatron's own tools."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.tools.parser import CommandParser

DESCRIPTION = """\
Writes a checkpoint in a form that other software reads: hf, a folder that transformers, vLLM and lm-evaluation-harness
load (safetensors, config.json, tokenizer), or torch_dist, for Megatron's own tools. One process does it without a GPU,
for a checkpoint of any strategy and number of ranks; memory stays near the largest tensor. What the target has no
counterpart for is refused.
"""

EXAMPLES = """\
examples:
  megatron-muon export --checkpoint runs/first --to hf exported/first
  megatron-muon export --checkpoint runs/first --to hf exported/first-bf16 --dtype bfloat16
  megatron-muon export --checkpoint runs/first --to torch_dist exported/first-megatron
"""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon export`."""
    from megatron_muon.tools.models.arguments import DTYPES, above_zero, add_checkpoint_arguments

    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_checkpoint_arguments(parser)
    parser.add_argument("--to", choices=("hf", "torch_dist"), required=True, help="the form to write")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="auto",
        help="of the tensors (auto: bfloat16 for a run with --bf16, else float32)")  # fmt: skip
    parser.add_argument("--max-file-gb", type=above_zero, default=1.0, metavar="GB",
        help="size of a safetensors file; as much memory is needed beside the largest tensor (1)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace the folder where it is there already")


def run(args: argparse.Namespace) -> int:
    """Exports."""
    from megatron_muon.tools.models import folder, written
    from megatron_muon.tools.models.architecture import check_named
    from megatron_muon.tools.models.source import counterpart, dtype_of, open_weights, tokenizer_of

    to_hf = args.to == "hf"
    if not to_hf and args.tokenizer is not None:
        raise UserError("--tokenizer is for --to hf: a torch_dist checkpoint holds no tokenizer; leave it out")
    with quiet_imports():
        weights = open_weights(args.checkpoint, verify=not args.no_verify_checkpoint)
        run_args, dtype = weights.args, dtype_of(args.dtype, weights.trained_in)
        source = counterpart(weights) if to_hf else None
        if source is None:
            check_named(run_args)
    with folder.new_folder(args.out, source=weights.folder, overwrite=args.overwrite) as out:
        if source is not None:
            tokenizer = tokenizer_of(source, args.tokenizer)
            limit = int(args.max_file_gb * 1e9)
            size = folder.write_tensors(out, source.rules, source.read, dtype=dtype, limit=limit)
            config = source.config(dtype, tokenizer)
            (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
            if tokenizer is not None:
                tokenizer.save_pretrained(out)
            what = f"{config['architectures'][0]}, {size / 1e6:,.1f} MB in {str(dtype).removeprefix('torch.')}"
        else:
            written.write(
                out, {name: weights.shape(name) for name in weights}, weights.__getitem__,
                layout=written.TORCH_DIST, args=run_args, iteration=weights.iteration, dtype=dtype,
                transformer_engine=run_args.transformer_impl == "transformer_engine",
            )  # fmt: skip
            what = f"torch_dist, iteration {weights.iteration}"
    print(f"{args.out}: {what}, from {weights.folder}")
    if to_hf and args.tokenizer != "none":
        print(f"try it: megatron-muon generate --checkpoint {args.out} --prompt 'Once upon a time'")
    return 0
