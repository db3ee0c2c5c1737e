"""Text from a model in memory, and how well it predicts one."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import TextStreamer

from megatron_muon.errors import RunFailedError, UserError, quiet_imports
from megatron_muon.megatron.data.vocabulary import read_head, require_files
from megatron_muon.tools.models.model import Loaded, is_of_bytes, load
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.progress import progress

_MOST_BEFORE = 80
"""Tokens that a model with random weights writes: a line tells enough."""


def generate(args: argparse.Namespace) -> None:
    """`megatron-muon generate`."""
    with quiet_imports():
        before = load(args, untrained=True) if args.untrained else None
        after = load(args)
    for prompt in _asked(f"{after.where}; an empty line or Ctrl-D ends") if args.interactive else [args.prompt]:
        try:
            if before is not None:
                print("before training:")
                _write(before, prompt, args, most=_MOST_BEFORE)
                print("\nafter training:")
            _write(after, prompt, args)
        except UserError as error:
            if not args.interactive:
                raise
            print(f"megatron-muon: error: {error}", file=sys.stderr)


def _asked(greeting: str) -> Iterator[str]:
    """Prompts as they are typed."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(greeting)
    try:
        while prompt := input("> " if is_terminal else ""):
            yield prompt
    except EOFError:
        return


def _write(loaded: Loaded, prompt: str, args: argparse.Namespace, most: int = sys.maxsize) -> None:
    """Prints the prompt and what follows it, as it comes."""
    tokenizer, model = loaded.tokenizer, loaded.model
    ids = tokenizer(prompt.encode("utf-8", "replace").decode())["input_ids"]
    if not ids:
        ids = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids:
        raise UserError("this tokenizer has no token that starts a document; give a prompt that is not empty")
    left = model.config.max_position_embeddings - len(ids)
    if left < 1:
        raise UserError(f"the prompt has {len(ids)} tokens, the model takes {model.config.max_position_embeddings}")
    torch.manual_seed(args.seed)
    how: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        how = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    streamer = Printer(tokenizer, args.wrap)
    streamer.on_finalized_text(prompt)
    inputs = torch.tensor([ids], device=model.device)
    try:
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(args.max_new_tokens, left, most),
            streamer=streamer,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **how,
        )
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise UserError("probabilities are not finite: give a larger --temperature, or other weights") from None


class Printer(TextStreamer):
    """Prints whole words as they come, in lines of at most `width`, without characters that a terminal would obey."""

    def __init__(self, tokenizer: Any, width: int | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._width, self._column = width or sys.maxsize, 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Prints a part of the text."""
        for letter in text + "\n" * stream_end:
            if letter == "\n" or self._column >= self._width:
                print()
                self._column = 0
            if letter != "\n":
                print("\N{REPLACEMENT CHARACTER}" if _is_control(letter) else letter, end="")
                self._column += 1
        sys.stdout.flush()


def _is_control(letter: str) -> bool:
    """Whether a terminal may obey a character: controls, halves of pairs, and what turns the direction of writing."""
    kind, turns = unicodedata.category(letter), "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return letter != "\t" and (kind in ("Cc", "Cs") or letter in turns)


def evaluate(args: argparse.Namespace) -> None:
    """`megatron-muon eval`."""
    with quiet_imports():
        if args.text is None:
            require_files(args.data, "--data")
            dtype = read_head(args.data)[0]
        text = "" if args.text is None else _read(args.text)
        loaded = load(args)
    name = args.data or str(args.text)
    ids = np.memmap(args.data + ".bin", dtype, "r") if args.text is None else _tokenized(text, loaded.tokenizer)
    ids = ids[: args.max_tokens]
    config = loaded.model.config
    if not ids.size:
        raise UserError(f"{name} holds no token")
    if ids.max() >= config.vocab_size:
        raise UserError(
            f"{name} holds token id {ids.max()}, the model has {config.vocab_size}; prepare it with its tokenizer"
        )
    length = args.sequence_length or loaded.sequence_length
    if length > config.max_position_embeddings:
        raise UserError(f"--sequence-length {length}: the model takes {config.max_position_embeddings}")
    parts = []
    with progress("evaluating", "tokens") as show:
        for loss, done in losses(
            loaded.model, ids, first=loaded.tokenizer.eos_token_id, length=length, batch=args.batch_size
        ):
            parts.append(loss)
            show(done, ids.size)
    nats = math.fsum(parts)
    if not math.isfinite(nats):
        raise RunFailedError(f"the loss of {loaded.where} is not finite; its weights, or some of them, are not")
    loss, size = nats / ids.size, _bytes(loaded.tokenizer, ids)
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


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"--text {file}: {error.strerror}; give a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--text {file} is not UTF-8 at byte {error.start:,}; convert it, or leave it out") from None


def _tokenized(text: str, tokenizer: Any) -> Any:
    """The ids that `data prepare` makes of a document."""
    if not text:
        return np.array([], np.int64)
    ids = np.frombuffer(text.encode(), np.uint8) if is_of_bytes(tokenizer) else tokenizer(text)["input_ids"]
    end = tokenizer.eos_token_id
    return np.array([*ids, *([] if end is None else [end])], np.int64)


def losses(model: Any, ids: Any, *, first: int | None, length: int, batch: int) -> Iterator[tuple[float, int]]:
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
                loss = cross_entropy(logits.flatten(0, 1).float(), rows.to(model.device), reduction="sum")
                yield float(loss), start + len(targets)


def _bytes(tokenizer: Any, ids: Any) -> int:
    """Bytes of the text that these ids stand for; the end of a document is none."""
    if is_of_bytes(tokenizer):
        return int((ids < 256).sum())
    end = tokenizer.eos_token_id
    bounds = [0, *((ids == end).nonzero()[0] + 1), len(ids)] if end is not None else [0, len(ids)]
    documents = (ids[a:b].tolist() for a, b in itertools.pairwise(bounds))
    return sum(len(tokenizer.decode(part, skip_special_tokens=True).encode()) for part in documents)
