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
Writes text as Megatron's indexed data, OUTPUT.bin and OUTPUT.idx, for --data-path OUTPUT.

A text file is one document, and so is a line of a JSONL file (.jsonl, .ndjson). A single document
is cut at paragraphs into up to 100, because --split divides documents. Directories are searched in
sorted order, without hidden files, __pycache__, site-packages and dist-packages; files that are not
UTF-8 text are skipped and counted. For corpora that take hours, Megatron-LM's
tools/preprocess_data.py uses several processes.
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
    output = add("--output", type=Path, required=True, metavar="PREFIX")
    output.help = "write PREFIX.bin and PREFIX.idx"
    json_key = add("--json-key", default="text", metavar="KEY")
    json_key.help = "the field of a JSONL line that holds the text (text)"
    tokenizer = add("--tokenizer-type", choices=TOKENIZER_TYPES, default=BYTE_LEVEL, metavar="TYPE")
    tokenizer.help = f"{', '.join(TOKENIZER_TYPES)} (the first)"
    model = add("--tokenizer-model", metavar="MODEL")
    model.help = "file, directory or name, as Megatron's flag of this name"


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
