"""`megatron-muon data`: the command line of `megatron_muon.megatron.data.corpus`."""

import argparse
from pathlib import Path

from megatron_muon.megatron.data.corpus import STDLIB, CorpusSettings, prepare
from megatron_muon.megatron.data.tokenizers import BYTE_LEVEL, TOKENIZER_TYPES, TokenizerSpec

EXAMPLES = """\
examples:
  megatron-muon data prepare --stdlib --output data/stdlib
  megatron-muon data prepare --input src/*.py docs --output data/project
  megatron-muon data prepare --input part-*.jsonl --json-key content --output data/parts
  megatron-muon data prepare --input book.txt --output data/book \\
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2
"""

DESCRIPTION = """\
Tokenizes text into Megatron's indexed format, PREFIX.bin and PREFIX.idx, for --data-path PREFIX.

Each text file is one document, and so is each line of a JSONL file (.jsonl, .ndjson). A single
document is cut at paragraphs into up to 100, because --split assigns whole documents. Directories
are searched in sorted order, except hidden files, __pycache__, site-packages and dist-packages;
files that are not UTF-8 text are skipped and counted. For corpora that take hours, use
Megatron-LM's tools/preprocess_data.py, which runs several processes.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds `prepare` and its arguments."""
    parser.description = "Prepares text for training."
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare_parser = actions.add_parser("prepare", help="tokenize text into .bin and .idx files")
    prepare_parser.description, prepare_parser.epilog = DESCRIPTION, EXAMPLES
    add = prepare_parser.add_argument
    what = prepare_parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--input", nargs="+", type=Path, default=[], metavar="PATH", help="files or directories"
    )
    what.add_argument(
        "--stdlib", action="store_true", help="this Python's standard library, about 30 MB"
    )
    add(
        "--output",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="write PREFIX.bin and PREFIX.idx",
    )
    add(
        "--json-key",
        default="text",
        metavar="KEY",
        help="JSONL field that contains the text (default: text)",
    )
    add(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        default=BYTE_LEVEL,
        metavar="TYPE",
        help=f"{', '.join(TOKENIZER_TYPES)} (default: the first)",
    )
    add(
        "--tokenizer-model",
        metavar="MODEL",
        help="file, directory or name, as for Megatron's flag",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the data; print its size and the flags that train on it."""
    settings = CorpusSettings(
        tokenizer=TokenizerSpec(args.tokenizer_type, args.tokenizer_model),
        stdlib=STDLIB if args.stdlib else "",
        json_key=args.json_key,
    )
    made = prepare(args.input, args.output, settings)
    skipped = made.skipped or "nothing"
    print(f"{args.output}: {made.documents:,} documents, {made.tokens:,} tokens; skipped:", skipped)
    flags = made.settings.tokenizer.in_training().flags()
    print(f"train with: --data-path {args.output}", *flags)
    return 0
