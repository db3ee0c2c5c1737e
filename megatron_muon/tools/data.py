"""`megatron-muon data`: the command line of `megatron_muon.megatron.data.corpus`."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import STDLIB, CorpusSettings, prepare
from megatron_muon.megatron.data.tokenizers import BYTE_LEVEL, TOKENIZER_TYPES, TokenizerSpec

EXAMPLES = """\
examples:
  megatron-muon data prepare --stdlib --output data/stdlib
  megatron-muon data prepare --input ~/src/project --suffix .py .md --output data/project
  megatron-muon data prepare --input part-*.jsonl --json-key content --output data/parts
  megatron-muon data prepare --input book.txt --output data/book \\
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2
"""

DESCRIPTION = """\
Writes text as Megatron's indexed data, OUTPUT.bin and OUTPUT.idx, for --data-path OUTPUT.

A text file is one document, and so is a line of a JSONL file (.jsonl, .ndjson). A single document
is cut at paragraphs into up to 100, because --split divides documents. Directories are searched in
sorted order, without hidden files, __pycache__, site-packages and dist-packages; files that are not
UTF-8 text are skipped and counted.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds `prepare` and its arguments."""
    parser.description = "Prepare text for training."
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare_parser = actions.add_parser("prepare", help="tokenize text into Megatron's .bin/.idx")
    prepare_parser.description, prepare_parser.epilog = DESCRIPTION, EXAMPLES
    add = prepare_parser.add_argument
    what = prepare_parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--input", nargs="+", type=Path, default=[], metavar="PATH", help="files or directories"
    )
    what.add_argument(
        "--stdlib", action="store_true", help="the running Python's standard library, about 30 MB"
    )
    add("--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    add(
        "--overwrite", action="store_true", help="replace existing output that holds something else"
    )
    add(
        "--suffix",
        nargs="+",
        default=[],
        metavar="S",
        help="file name endings to take from directories (all)",
    )
    add(
        "--json-key",
        default="text",
        metavar="KEY",
        help="the field of a JSONL line that holds the text (text)",
    )
    add(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        default=BYTE_LEVEL,
        metavar="TYPE",
        help=f"{', '.join(TOKENIZER_TYPES)} (the first)",
    )
    add(
        "--tokenizer-model",
        metavar="MODEL",
        help="file, directory or name, as Megatron's flag of this name",
    )
    add("--vocab-size", type=int, metavar="N", help="as Megatron's flag of this name")


def run(args: argparse.Namespace) -> int:
    """Prepare the data; print its size and the flags that train on it."""
    # Data may have a folder of its name: Megatron-LM caches its indices in PREFIX/cache.
    is_folder = Path(args.output).is_dir() and not Path(f"{args.output}.bin").exists()
    if is_folder or args.output.endswith("/"):
        raise UserError(
            f"--output {args.output} is a directory; give a prefix in it, such as data/corpus"
        )
    settings = CorpusSettings(
        tokenizer=TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size),
        stdlib=STDLIB if args.stdlib else "",
        suffixes=tuple(args.suffix),
        json_key=args.json_key,
    )
    made = prepare(
        args.input,
        Path(args.output),
        settings,
        overwrite=args.overwrite,
        watch=lambda files: track(
            files, "tokenizing", console=Console(stderr=True), transient=True
        ),
    )
    print(
        f"{args.output}: {made.documents:,} documents, {made.tokens:,} tokens; skipped:"
        f" {made.skipped or 'nothing'}"
    )
    print(
        f"train with: --data-path {args.output}"
        f" {' '.join(made.settings.tokenizer.in_training().flags())}"
    )
    return 0
