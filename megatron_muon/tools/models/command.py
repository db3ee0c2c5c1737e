"""`megatron-muon export`, `import`, `generate` and `eval`: descriptions and arguments. What they do needs torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_muon.errors import quiet_imports
from megatron_muon.tools.parser import CommandParser, positive

_TEXTS = {
    "export": (
        """\
Writes a checkpoint in a form that other software reads: hf, a folder that transformers, vLLM and lm-evaluation-harness
load (safetensors, config.json, tokenizer), or torch_dist, for Megatron's own tools. One process does it without a GPU;
memory stays near the largest tensor. What the target has no counterpart for is refused.

examples:
  megatron-muon export --checkpoint runs/first --to hf exported/first
"""
    ),
    "import": (
        """\
Writes a model of Hugging Face (Llama, Mistral, Qwen 2 and 3, Mixtral, Qwen 3 MoE, GPT-2) as a checkpoint for --load DIR
--finetune, tokenizer and flags with it: OUT/model.yaml is an experiment file to add data and learning rates to.
Nothing is downloaded: FOLDER is a local one. What Megatron has no flag for is refused.

examples:
  megatron-muon import --from hf models/Llama-3.2-1B imported/llama
"""
    ),
    "generate": (
        """\
Has a checkpoint, or a folder that export has written, continue a prompt. The model is that of export, in memory, and
generation is that of transformers; it needs no GPU. These are models that continue text: they have learned no dialogue.

examples:
  megatron-muon generate --checkpoint runs/first --prompt 'import ' --temperature 0
"""
    ),
    "eval": (
        """\
Loss, perplexity and bits per byte of a checkpoint, or of a folder that export has written, on a text file, or on what
megatron-muon data prepare has made into tokens. Documents are taken one after the other and cut into samples as in
training; every token is predicted once. Bits per byte compare models with different tokenizers.

examples:
  megatron-muon eval --checkpoint runs/first --text README.md
"""
    ),
}
"""Description and example of each command."""


def configure(parser: CommandParser) -> None:
    """Adds description and arguments of the command that `parser.prog` names."""
    command, add = parser.prog.split()[-1], parser.add_argument
    parser.description = _TEXTS[command]
    if command == "import":
        add("--from", choices=("hf",), required=True, dest="form", help="the form of FOLDER")
        add(
            "folder", type=Path, metavar="FOLDER", help="config.json, model*.safetensors, tokenizer"
        )
    else:
        add(
            "--checkpoint",
            type=Path,
            required=True,
            metavar="DIR",
            help="a run's, --save's or an iteration's folder",
        )
        add("--tokenizer", metavar="DIR", help="one that transformers loads, in place of the run's")
        add(
            "--no-verify-checkpoint",
            action="store_true",
            help="do not compare files with their checksums first",
        )
    if command == "export":
        add("--to", choices=("hf", "torch_dist"), required=True, help="the form to write")
        add(
            "--dtype",
            choices=("auto", "float32", "bfloat16", "float16"),
            default="auto",
            help="of the tensors (auto: the run's)",
        )
    if command in ("export", "import"):
        add("out", type=Path, metavar="OUT", help="the folder to write")
    if command == "generate":
        add(
            "--prompt",
            required=True,
            metavar="TEXT",
            help="what to continue; '' starts a new document",
        )
        add(
            "--max-new-tokens",
            type=positive,
            default=128,
            metavar="N",
            help="how much to write (128)",
        )
        add(
            "--temperature",
            type=float,
            default=0.8,
            metavar="T",
            help="0 takes the likeliest token each time (0.8)",
        )
        add(
            "--top-p",
            type=float,
            default=0.95,
            metavar="P",
            help="sample from the smallest set of tokens whose probability reaches P (0.95)",
        )
        add(
            "--seed",
            type=int,
            default=0,
            help="of the draws: the same text again on the same machine (0)",
        )
        add(
            "--untrained",
            action="store_true",
            help="show first what the same model writes with random weights",
        )
    if command == "eval":
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument(
            "--data",
            metavar="PREFIX",
            help="PREFIX.bin and PREFIX.idx, of megatron-muon data prepare",
        )
        what.add_argument("--text", type=Path, metavar="FILE", help="a text file, as one document")
        add("--max-tokens", type=positive, metavar="N", help="stop after so many tokens (all)")
        add(
            "--sequence-length",
            type=positive,
            metavar="N",
            help="tokens of a sample (as in training)",
        )
        add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Does what `args.command` says."""
    with quiet_imports():
        if args.command in ("export", "import"):
            from megatron_muon.tools.models import convert

            work = convert.export_model if args.command == "export" else convert.import_model
        else:
            from megatron_muon.tools.models import model

            work = model.generate if args.command == "generate" else model.evaluate
        work(args)
    return 0
