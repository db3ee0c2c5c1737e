"""A checkpoint of Megatron as a model of Hugging Face: to write (`counterpart`), and in memory for generate and eval.

Its tokenizer is one of `transformers` with the same ids for every text.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_muon.errors import RunFailedError, UserError, reason_of
from megatron_muon.megatron.data.corpus import read_head
from megatron_muon.megatron.data.tokenizers import BYTE_LEVEL_VOCAB_SIZE, HUGGING_FACE, IN_TRAINING
from megatron_muon.tools.models import mapping
from megatron_muon.tools.models.architecture import to_config
from megatron_muon.tools.models.checkpoint import Weights
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.screen import progress

_END_OF_DOCUMENT = "<eod>"

_LONGEST = 2048
"""Most tokens of a sample for an exported folder, which does not say how long training's were."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""What a terminal may obey: controls but tabs and new lines, and what turns the direction of writing."""


class Source(NamedTuple):
    """A checkpoint that has a counterpart: config.json but for the dtype, and a tokenizer of transformers or None."""

    weights: Weights
    config: dict[str, Any]
    rules: list[mapping.Rule]
    tokenizer: Any

    def read(self, rule: mapping.Rule) -> Tensor:
        """The weight of a rule; zeros where Megatron has none."""
        return self.weights.read(rule.megatron) if rule.megatron else torch.zeros(rule.shape)


def counterpart(weights: Weights, tokenizer: str | None) -> Source:
    """A checkpoint as a model of Hugging Face, with this tokenizer, by default the run's if transformers has it.

    A UserError where something of the model has no counterpart, or the tokenizer does not fit.
    """
    args, own, warning = weights.args, None, ""
    try:
        own = tokenizer_of(args)
    except UserError as error:
        warning = f"without a tokenizer: {error}; give one with the same ids by --tokenizer DIR"
    built = own if tokenizer is None else from_folder(transformers.AutoTokenizer, tokenizer)
    if built is None:
        print(f"megatron-muon: warning: {warning}", file=sys.stderr)
    # With a tokenizer of Hugging Face Megatron saves the padded size alone.
    config = to_config(args, vocab=args.vocab_size or (None if own is None else len(own)))
    _check_tokens(built, config["vocab_size"])
    rules = mapping.rules(config, args)
    mapping.check(
        weights.folder,
        weights.shapes,
        {rule.megatron: rule.shape for rule in rules if rule.megatron},
    )
    config |= {
        name: getattr(built, name, None)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    return Source(weights, config, rules, built)


def _check_tokens(tokenizer: Any, vocab: int) -> None:
    if tokenizer is not None and len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {vocab}; give its own by"
            " --tokenizer DIR"
        )


class Loaded(NamedTuple):
    """A model of transformers; `sequence_length` is training's, or the most that an exported folder takes."""

    model: Any
    tokenizer: Any
    where: Path
    sequence_length: int


def load(args: argparse.Namespace, *, untrained: bool = False) -> Loaded:
    """Loads what a command's arguments name, to CUDA where it is there; `untrained`, with random weights instead.

    A UserError as `Weights` and `counterpart` raise it, and where there is no tokenizer.
    """
    # its warnings are about what nobody here has chosen
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    directory: Path = args.checkpoint
    torch.manual_seed(0)  # of an untrained model
    source = None
    if (directory / "config.json").is_file():
        config, where = from_folder(transformers.AutoConfig, directory), directory
        length, trained_in = (
            min(config.max_position_embeddings, _LONGEST),
            config.dtype or torch.float32,
        )
        tokenizer = from_folder(transformers.AutoTokenizer, args.tokenizer or directory)
        _check_tokens(tokenizer, config.vocab_size)
    else:
        source = counterpart(
            Weights(directory, verify=not args.no_verify_checkpoint), args.tokenizer
        )
        weights, tokenizer = source.weights, source.tokenizer
        where, length, trained_in = weights.folder, weights.args.seq_length, weights.trained_in
        config = transformers.AutoConfig.for_model(**source.config)
    if tokenizer is None:
        raise UserError(
            f"text needs a tokenizer, and {where} has none; give one by --tokenizer DIR"
        )
    dtype = trained_in if device == "cuda" else torch.float32  # many CPUs multiply bfloat16 slowly
    if untrained:
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(
            dtype
        )
    elif source is None:
        model = from_folder(transformers.AutoModelForCausalLM, directory, dtype=dtype)
    else:
        state = {
            name: part
            for rule in source.rules
            for name, part in rule.tensors(source.read(rule), dtype)
        }
        kind = getattr(transformers, source.config["architectures"][0])
        model = kind.from_pretrained(None, config=config, state_dict=state)
    return Loaded(model.to(device).eval(), tokenizer, where, length)


def from_folder(loader: Any, place: Path | str, **how: Any) -> Any:
    """What a class of transformers loads from a folder or by a name; code that lies there is never run."""
    try:
        return loader.from_pretrained(str(place), trust_remote_code=False, **how)
    except Exception as error:  # whatever damaged files lead to
        version = transformers.__version__
        raise UserError(
            f"{place} cannot be loaded by transformers {version}: {reason_of(error)}"
        ) from error


def tokenizer_of(args: argparse.Namespace) -> Any:
    """A tokenizer of transformers with the ids of a run's; a `UserError` where there is none, or it cannot be loaded.

    In training the byte-level one of `data prepare` is a NullTokenizer of its size.
    """
    if args.tokenizer_type == HUGGING_FACE:
        return from_folder(transformers.AutoTokenizer, args.tokenizer_model)
    if args.tokenizer_type == IN_TRAINING and args.vocab_size == BYTE_LEVEL_VOCAB_SIZE:
        return _of_bytes()
    raise UserError(
        f"transformers has no --tokenizer-type {args.tokenizer_type} with {args.vocab_size} tokens"
    )


def is_of_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer is the byte-level one of this module: ids below 256 are bytes."""
    return bool(tokenizer.eos_token == _END_OF_DOCUMENT) and tokenizer.convert_tokens_to_ids(
        ["A", "z"]
    ) == [65, 122]


def _of_bytes() -> Any:
    """The ids of megatron-core's `ByteLevelTokenizer`: a byte is its own id, the last one ends a document.

    A BPE without merges over the characters that stand for bytes; what looks like a special token
    in a text is text.
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()} | {
        _END_OF_DOCUMENT: 256
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END_OF_DOCUMENT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


class Printer(transformers.TextStreamer):
    """Prints whole words as they come, without characters that a terminal would obey."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Prints a part of the text."""
        super().on_finalized_text(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text), stream_end)


def generate(args: argparse.Namespace) -> None:
    """`megatron-muon generate`."""
    if args.untrained:
        print("before training:")
        _write(load(args, untrained=True), args)
        print("\nafter training:")
    _write(load(args), args)


def _write(loaded: Loaded, args: argparse.Namespace) -> None:
    """Prints the prompt and what follows it, as it comes."""
    tokenizer, model = loaded.tokenizer, loaded.model
    ids = tokenizer(args.prompt.encode("utf-8", "replace").decode())["input_ids"]
    if not ids:
        ids = [
            token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None
        ][:1]
    if not ids:
        raise UserError(
            "this tokenizer has no token that starts a document; give a prompt that is not empty"
        )
    left = model.config.max_position_embeddings - len(ids)
    if left < 1:
        raise UserError(
            f"the prompt has {len(ids)} tokens, the model takes"
            f" {model.config.max_position_embeddings}"
        )
    how: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        how = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    inputs = torch.tensor([ids], device=model.device)
    how |= {"pad_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    how |= {
        "max_new_tokens": min(args.max_new_tokens, left),
        "attention_mask": torch.ones_like(inputs),
    }
    try:
        torch.manual_seed(args.seed)
        model.generate(inputs, streamer=Printer(tokenizer, skip_special_tokens=True), **how)
    # settings that make no sense, or weights that are not finite
    except (ValueError, RuntimeError) as error:
        raise UserError(f"nothing can be drawn: {reason_of(error)}") from error


def evaluate(args: argparse.Namespace) -> None:
    """`megatron-muon eval`."""
    loaded, name = load(args), args.data or str(args.text)
    ids = _ids(args, loaded.tokenizer)[: args.max_tokens]
    if not ids.size:
        raise UserError(f"{name} holds no token")
    config, length = loaded.model.config, args.sequence_length or loaded.sequence_length
    if ids.max() >= config.vocab_size:
        raise UserError(
            f"{name} holds token id {ids.max()}, the model has {config.vocab_size}; prepare it with"
            " its tokenizer"
        )
    if length > config.max_position_embeddings:
        raise UserError(
            f"--sequence-length {length}: the model takes {config.max_position_embeddings}"
        )
    parts = []
    with progress("evaluating", "tokens") as show:
        for loss, done in losses(
            loaded.model, ids, first=loaded.tokenizer.eos_token_id, length=length
        ):
            parts.append(loss)
            show(done, ids.size)
    nats = math.fsum(parts)
    loss, size = nats / ids.size, _bytes(loaded.tokenizer, ids)
    if not math.isfinite(loss):
        raise RunFailedError(
            f"the loss of {loaded.where} is not finite; its weights, or some of them, are not"
        )
    figures = {
        "checkpoint": str(loaded.where),
        "data": name,
        "tokens": int(ids.size),
        "bytes": size,
        "sequence_length": length,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": nats / math.log(2) / size if size else None,
    }
    write_json(args.json, figures)
    print(f"{loaded.where} on {name}: {ids.size:,} tokens in samples of {length}, {size:,} bytes")
    print(f"loss {loss:.4f}, perplexity {figures['perplexity']:.3f}", end="")
    print(f", bits per byte {figures['bits_per_byte']:.4f}" if size else "")


def _ids(args: argparse.Namespace, tokenizer: Any) -> Any:
    """The ids of --data, or those that `data prepare` makes of --text."""
    if args.text is None:
        return np.memmap(args.data + ".bin", read_head(args.data)[0], "r")
    try:
        text = args.text.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {args.text} is not a text file in UTF-8 ({error})") from None
    end = [] if tokenizer.eos_token_id is None or not text else [tokenizer.eos_token_id]
    return np.array([*tokenizer(text)["input_ids"], *end], np.int64)


def losses(
    model: Any, ids: Any, *, first: int | None, length: int, batch: int = 8
) -> Iterator[tuple[float, int]]:
    """Predicts every token once, in samples of `length`: sums of losses in nats, and how many tokens are done.

    `first`, the end of a document, stands before the first token.
    """
    before = int(ids[0]) if first is None else first
    for start in range(0, ids.size, batch * length):
        targets = torch.from_numpy(ids[start : start + batch * length].astype(np.int64))
        inputs = torch.cat([torch.tensor([before]), targets[:-1]])
        before = int(targets[-1])
        whole = len(targets) // length * length
        for part, shape in ((slice(0, whole), (-1, length)), (slice(whole, None), (1, -1))):
            if (rows := targets[part]).numel():
                with torch.inference_mode():
                    logits = model(inputs[part].view(shape).to(model.device)).logits
                loss = cross_entropy(
                    logits.flatten(0, 1).float(), rows.to(model.device), reduction="sum"
                )
                yield float(loss), start + len(targets)


def _bytes(tokenizer: Any, ids: Any) -> int:
    """Bytes of the text that these ids stand for; the end of a document is none."""
    if is_of_bytes(tokenizer):
        return int((ids < 256).sum())
    documents = np.split(ids, (ids == tokenizer.eos_token_id).nonzero()[0] + 1)
    return sum(
        len(tokenizer.decode(part.tolist(), skip_special_tokens=True).encode())
        for part in documents
    )
