"""Descriptions and arguments of `megatron-muon export`, `import`, `generate` and `eval`.

Their work needs torch, which is imported when they run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_muon.errors import quiet_imports
from megatron_muon.tools.parser import CommandParser, positive

_DESCRIPTIONS = {
    "export": """\
Converts a checkpoint to a folder that transformers, vLLM and lm-evaluation-harness load
(safetensors, config.json, tokenizer). It runs in one process without a GPU, and holds the model in
memory. Settings without a counterpart there are refused. torch_dist also keeps the optimizer's
state: Megatron's own --optimizer muon continues it, under DDP.

examples:
  megatron-muon export --checkpoint runs/first --to hf exported/first
  megatron-muon export --checkpoint runs/first --to torch_dist exported/ddp
""",
    "import": """\
Converts a Hugging Face model (Llama, Mistral, Qwen 2 and 3, Mixtral, Qwen 3 MoE, GPT-2) to a
checkpoint for --load DIR --finetune, with its tokenizer and flags: OUT/model.yaml is an
experiment file; add data and learning rates to it. Nothing is downloaded: FOLDER is a local
folder in the current format of transformers' save_pretrained. Settings for which Megatron has no
flag are refused.

examples:
  megatron-muon import --from hf models/Llama-3.2-1B imported/llama
""",
    "generate": """\
Continues a prompt with a checkpoint: converts it in memory, as export does, and generates text with
transformers. It needs no GPU. The models continue text; they are not trained to chat.

examples:
  megatron-muon generate --checkpoint runs/first --prompt 'import ' --temperature 0
""",
    "eval": """\
Prints a checkpoint's loss, perplexity and bits per byte on a text file. The file is one document,
cut into samples as in training; every token is predicted once. Use bits per byte to compare models
with different tokenizers. For benchmarks, export the model and use lm-evaluation-harness.

examples:
  megatron-muon eval --checkpoint runs/first --text README.md
""",
}


def configure(parser: CommandParser) -> None:
    """Add description and arguments of the command that `parser.prog` names."""
    command = parser.prog.split()[-1]
    parser.description = _DESCRIPTIONS[command]
    add = parser.add_argument
    if command == "import":
        add("--from", choices=("hf",), required=True, dest="form", help="format of FOLDER")
        add(
            "folder",
            type=Path,
            metavar="FOLDER",
            help="contains config.json, model*.safetensors and a tokenizer",
        )
        add("out", type=Path, metavar="OUT", help="folder to write")
        return
    add(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="run folder, --save directory or iter_ folder",
    )
    add("--tokenizer", metavar="DIR", help="tokenizer for transformers, instead of the run's")
    add("--no-verify-checkpoint", action="store_true", help="skip checksum verification")
    if command == "export":
        add(
            "--to",
            choices=("hf", "torch_dist"),
            required=True,
            help="format to write: Hugging Face's, or that of Megatron's own Muon",
        )
        add(
            "--dtype",
            choices=("auto", "float32", "bfloat16", "float16"),
            default="auto",
            help="dtype of the tensors (auto: the run's)",
        )
        add("out", type=Path, metavar="OUT", help="folder to write")
    elif command == "generate":
        add("--prompt", required=True, metavar="TEXT", help="'' starts a new document")
        add(
            "--max-new-tokens",
            type=positive,
            default=128,
            metavar="N",
            help="length (default: 128)",
        )
        add(
            "--temperature",
            type=float,
            default=0.8,
            metavar="T",
            help="sampling temperature; 0: always the likeliest token (default: 0.8)",
        )
    else:
        add("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text file")


def run(args: argparse.Namespace) -> int:
    """Run the command `args.command`."""
    with quiet_imports():
        if args.command == "export" and args.to == "torch_dist":
            from megatron_muon.tools.models.to_upstream import export as work
        elif args.command == "export":
            from megatron_muon.tools.models.convert import export_model as work
        elif args.command == "import":
            from megatron_muon.tools.models.convert import import_model as work
        elif args.command == "generate":
            from megatron_muon.tools.models.run_model import generate as work
        else:
            from megatron_muon.tools.models.run_model import evaluate as work
        work(args)
    return 0
