"""`megatron-muon export`, `import`, `generate` and `eval`: descriptions and arguments. What they do needs torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.tools.parser import CommandParser, positive

FSDP_DTENSOR, TORCH_DIST = "fsdp_dtensor", "torch_dist"
"""Layouts of checkpoints: for Megatron-FSDP, and for runs without it."""

_TEXTS = {
    "export": (
        """\
Writes a checkpoint in a form that other software reads: hf, a folder that transformers, vLLM and lm-evaluation-harness
load (safetensors, config.json, tokenizer), or torch_dist, for Megatron's own tools. One process does it without a GPU,
for a checkpoint of any strategy and number of ranks; memory stays near the largest tensor. What the target has no
counterpart for is refused.
""",
        """\
examples:
  megatron-muon export --checkpoint runs/first --to hf exported/first
  megatron-muon export --checkpoint runs/first --to hf exported/first-bf16 --dtype bfloat16
  megatron-muon export --checkpoint runs/first --to torch_dist exported/first-megatron
""",
    ),
    "import": (
        """\
Writes a model of Hugging Face (Llama, Mistral, Qwen 2 and 3, Mixtral, Qwen 3 MoE, GPT-2) as a checkpoint for --load DIR
--finetune, tokenizer and flags with it: OUT/model.yaml is an experiment file to add data and learning rates to.
Nothing is downloaded: FOLDER is a local one. What Megatron has no flag for is refused.
""",
        """\
examples:
  megatron-muon import --from hf models/Llama-3.2-1B imported/llama
  megatron-muon train --config imported/llama/model.yaml --nproc 8 --set data_path=data/mine --set lr=1e-4 ...
""",
    ),
    "generate": (
        """\
Has a checkpoint, or a folder that export has written, continue a prompt. The model is that of export, in memory, and
generation is that of transformers; it needs no GPU. These are models that continue text: they have learned no dialogue.
""",
        """\
examples:
  megatron-muon generate --checkpoint runs/first --prompt 'def main('
  megatron-muon generate --checkpoint runs/first --prompt 'import ' --temperature 0
  megatron-muon generate --checkpoint runs/first --interactive
""",
    ),
    "eval": (
        """\
Loss, perplexity and bits per byte of a checkpoint, or of a folder that export has written, on a text file, or on what
megatron-muon data prepare has made into tokens. Documents are taken one after the other and cut into samples as in
training; every token is predicted once. Bits per byte compare models with different tokenizers.
""",
        """\
examples:
  megatron-muon eval --checkpoint runs/first --text README.md
  megatron-muon eval --checkpoint runs/first --data data/docs
  megatron-muon eval --checkpoint exported/first --data data/docs --max-tokens 100000 --json docs.json
""",
    ),
}
"""Description and examples of each command."""


def configure(parser: CommandParser) -> None:
    """Adds description, examples and arguments of the command that `parser.prog` names."""
    command, add = parser.prog.split()[-1], parser.add_argument
    parser.description, parser.epilog = _TEXTS[command]
    if command != "import":
        add("--checkpoint", type=Path, required=True, metavar="DIR", help="a run's, --save's or an iteration's folder")
        add("--tokenizer", metavar="DIR", help="one that transformers loads, in place of the run's (export: or none)")
        add("--no-verify-checkpoint", action="store_true", help="do not compare files with their checksums first")
    {"export": _export, "import": _import, "generate": _generate, "eval": _eval}[command](add, parser)
    if command != "import":
        add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
            help="of the tensors (auto: the run's; where text is made or evaluated, float32 on a CPU)")  # fmt: skip
    if command in ("generate", "eval"):
        add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (auto)")
    else:
        add("--overwrite", action="store_true", help="replace the folder where it is there already")


def _export(add: Callable[..., object], parser: CommandParser) -> None:
    add("--to", choices=("hf", TORCH_DIST), required=True, help="the form to write")
    add("out", type=Path, metavar="OUT", help="the folder to write")
    add("--max-file-gb", type=_number("above 0", lambda size: size > 0), default=1.0, metavar="GB",
        help="size of a safetensors file; as much memory is needed beside the largest tensor (1)")  # fmt: skip


def _import(add: Callable[..., object], parser: CommandParser) -> None:
    add("--from", choices=("hf",), required=True, dest="form", help="the form of FOLDER")
    add("folder", type=Path, metavar="FOLDER", help="config.json, *.safetensors, tokenizer")
    add("out", type=Path, metavar="OUT", help="the folder to write")
    add("--layout", choices=(FSDP_DTENSOR, TORCH_DIST), default=FSDP_DTENSOR,
        help="for Megatron-FSDP (fsdp_dtensor), or for runs without it (torch_dist)")  # fmt: skip
    add("--tensor-parallel", type=positive, default=1, metavar="N",
        help="--tensor-model-parallel-size of the run, which pads the vocabulary (1)")  # fmt: skip
    add("--transformer-impl", choices=("local", "transformer_engine"),
        help="whose layers the run has (Transformer Engine's where it is installed)")  # fmt: skip


def _generate(add: Callable[..., object], parser: CommandParser) -> None:
    add("--prompt", metavar="TEXT", help="what to continue; '' starts a new document")
    add("--interactive", action="store_true", help="read prompts from the terminal, a line each")
    add("--max-new-tokens", type=positive, default=128, metavar="N", help="how much to write (128)")
    add("--temperature", type=_number("of at least 0", lambda value: value >= 0), default=0.8, metavar="T",
        help="0 takes the likeliest token each time (0.8)")  # fmt: skip
    add("--top-p", type=_number("above 0 and at most 1", lambda value: 0 < value <= 1), default=0.95, metavar="P",
        help="sample from the smallest set of tokens whose probability reaches P (0.95)")  # fmt: skip
    add("--seed", type=_seed, default=0, help="of the draws: the same text again on the same machine (0)")
    add("--untrained", action="store_true", help="show first what the same model writes with random weights")
    add("--wrap", type=positive, metavar="COLUMNS", help="break lines that are longer")


def _eval(add: Callable[..., object], parser: CommandParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="PREFIX", help="PREFIX.bin and PREFIX.idx, of megatron-muon data prepare")
    what.add_argument("--text", type=Path, metavar="FILE", help="a text file, as one document")
    add("--max-tokens", type=positive, metavar="N", help="stop after so many tokens (all)")
    add("--sequence-length", type=positive, metavar="N", help="tokens of a sample (as in training)")
    add("--batch-size", type=positive, default=8, metavar="N", help="samples at a time (8)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def _number(words: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A type for argparse: a finite number that `fits`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (abs(value) < float("inf") and fits(value)):
            raise argparse.ArgumentTypeError(f"must be a number {words}, found {text!r}")
        return value

    return parse


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**63 - 1}, found {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Does what `args.command` says."""
    if args.command == "export" and args.to == TORCH_DIST and args.tokenizer is not None:
        raise UserError("--tokenizer is for --to hf: a torch_dist checkpoint holds no tokenizer; leave it out")
    if args.command == "generate" and args.interactive == (args.prompt is not None):
        raise UserError("give --prompt TEXT, or --interactive to be asked for prompts")
    with quiet_imports():
        if args.command in ("export", "import"):
            from megatron_muon.tools.models import convert

            work = convert.export_model if args.command == "export" else convert.import_model
        else:
            from megatron_muon.tools.models import use

            work = use.generate if args.command == "generate" else use.evaluate
    work(args)
    return 0
