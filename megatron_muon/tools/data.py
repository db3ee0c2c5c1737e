"""`megatron-muon data`: the command line of `megatron_muon.megatron.data`."""

import argparse
import time
from pathlib import Path

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import STDLIB, prepare
from megatron_muon.megatron.data.sources import Settings
from megatron_muon.megatron.data.tokenizers import BYTE_LEVEL, TOKENIZER_TYPES, TokenizerSpec
from megatron_muon.tools.progress import progress

EXAMPLES = """\
examples:
  the text that every machine has, Python's own library:
    megatron-muon data prepare --stdlib --output data/stdlib
  a directory of sources:
    megatron-muon data prepare --input ~/src/project --suffix .py .md --output data/project
  JSONL with the text in the field "content":
    megatron-muon data prepare --input part-*.jsonl --json-key content --output data/parts
  a tokenizer from the Hugging Face hub or a directory:
    megatron-muon data prepare --input book.txt --output data/book \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2
"""

DESCRIPTION = """\
Writes text as Megatron's indexed data, OUTPUT.bin and OUTPUT.idx, for --data-path OUTPUT.

A text file is one document, a line of a JSONL file is one; a document that is the only one is cut at paragraphs into
up to 100, because --split divides documents between training and validation. Directories are searched in sorted
order; hidden files, __pycache__, site-packages and dist-packages are passed over; files that are binary or not UTF-8
are skipped and counted. The same input and options give the same bytes.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds `prepare` and its arguments."""
    parser.description = "Prepare text for training."
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare_parser = actions.add_parser("prepare", help="tokenize text into Megatron's .bin/.idx")
    prepare_parser.description, prepare_parser.epilog = DESCRIPTION, EXAMPLES
    add = prepare_parser.add_argument
    add("--input", nargs="+", type=Path, default=[], metavar="PATH", help="files or directories")
    add("--stdlib", action="store_true", help="take the running Python's standard library, about 30 MB")
    add("--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    add("--overwrite", action="store_true", help="replace existing output that holds something else")
    add("--suffix", nargs="+", default=[], metavar="S", help="file name endings to take from directories (all)")
    add("--exclude", nargs="+", default=[], metavar="PATTERN", help="name or path patterns to pass over: '*_pb2.py'")
    add("--format", choices=("auto", "text", "jsonl"), default="auto", help="auto: .jsonl and .ndjson are JSONL")
    add("--json-key", default="text", metavar="KEY", help="the field of a JSONL line that holds the text (text)")
    add("--tokenizer-type", choices=TOKENIZER_TYPES, default=BYTE_LEVEL, metavar="TYPE",
        help=f"{', '.join(TOKENIZER_TYPES)} (the first)")  # fmt: skip
    add("--tokenizer-model", metavar="MODEL", help="file, directory or name, as Megatron's flag of this name")
    add("--vocab-size", type=int, metavar="N", help="as Megatron's flag of this name")
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True,
        help="end every document with the end-of-document id (yes)")  # fmt: skip
    add("--workers", type=int, default=1, metavar="N", help="tokenizing processes; worth it for slow tokenizers (1)")


def run(args: argparse.Namespace) -> int:
    """Prepares the data and prints what was written and how to train on it."""
    if args.output.endswith("/"):  # which a Path would not show
        raise UserError(f"--output {args.output} is a directory; give a prefix in it, such as data/corpus")
    began = time.monotonic()
    settings = Settings(
        tokenizer=TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size), append_eod=args.append_eod,
        stdlib=STDLIB if args.stdlib else "", suffixes=tuple(args.suffix), exclude=tuple(args.exclude),
        format=args.format, json_key=args.json_key,
    )  # fmt: skip
    with progress("tokenizing", "kB") as show:
        prepared = prepare(
            args.input, Path(args.output), settings, workers=args.workers, overwrite=args.overwrite,
            progress=lambda read, total: show(read / 1e3, total / 1e3),
        )  # fmt: skip
    found = prepared.manifest
    if found.skipped:
        print(found.skipped)
    if found.is_cut:
        print(f"one text alone: cut at paragraphs into {found.documents} documents, so that --split can divide them")
    print(
        f"{'up to date' if prepared.up_to_date else 'prepared'} {prepared.prefix}: {found.documents:,} documents, "
        f"{found.tokens:,} tokens, {found.sizes['bin']:,} bytes, {time.monotonic() - began:.1f} s\n"
        f"train with: {' '.join(prepared.flags)}"
    )
    return 0
