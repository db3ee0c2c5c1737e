"""The tokenizer of a run, as one that `transformers` loads: with the same ids for every text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_muon.errors import UserError, reason_of
from megatron_muon.megatron.data.corpus import OutputPaths
from megatron_muon.megatron.data.tokenizers import (
    BYTE_LEVEL,
    BYTE_LEVEL_VOCAB_SIZE,
    HUGGING_FACE,
    IN_TRAINING,
    TokenizerSpec,
)

END_OF_DOCUMENT = "<eod>"

_REMEDY = "give one with the same ids, a folder or name that transformers loads: --tokenizer DIR"


def spec_of(args: argparse.Namespace) -> TokenizerSpec:
    """The tokenizer that made a run's data.

    A NullTokenizer stands for another: the one that the manifest names, where the data is still there; else, if its
    vocabulary has that size, the byte-level one.
    """
    spec = TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    if spec.tokenizer_type != IN_TRAINING:
        return spec
    for prefix in [name for name in args.data_path or [] if not name.replace(".", "").isdecimal()]:
        if manifest := OutputPaths(Path(prefix)).read_manifest():
            return manifest.settings.tokenizer
    return TokenizerSpec(BYTE_LEVEL, vocab_size=args.vocab_size) if args.vocab_size == BYTE_LEVEL_VOCAB_SIZE else spec


def build(spec: TokenizerSpec) -> Any:
    """A tokenizer of `transformers`.

    Raises:
        UserError: there is none for this one, or it cannot be loaded.
    """
    if spec.tokenizer_type == BYTE_LEVEL:
        return _of_bytes(spec.vocab_size or BYTE_LEVEL_VOCAB_SIZE)
    if spec.tokenizer_type != HUGGING_FACE:
        raise UserError(f"--tokenizer-type {spec.tokenizer_type} has no counterpart in transformers; {_REMEDY}")
    try:
        return transformers.AutoTokenizer.from_pretrained(spec.model, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer has exceptions of its own
        raise UserError(f"the tokenizer {spec.model} cannot be loaded ({reason_of(error)}); {_REMEDY}") from error


def is_of_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer is the byte-level one of this module: ids below 256 are bytes."""
    return bool(tokenizer.eos_token == END_OF_DOCUMENT) and tokenizer.convert_tokens_to_ids(["A", "z"]) == [65, 122]


def _of_bytes(vocabulary: int) -> Any:
    """The ids of megatron-core's `ByteLevelTokenizer`: a byte is its own id, the last one ends a document.

    A BPE without merges over the 256 characters that stand for bytes. What looks like a special token within a text is
    text: `split_special_tokens`.
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    vocab |= {f"<unused{number}>": number for number in range(256, vocabulary - 1)}
    vocab[END_OF_DOCUMENT] = vocabulary - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_DOCUMENT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
