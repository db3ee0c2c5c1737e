"""Text from a model in memory, and how well it predicts one."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import TextStreamer

from megatron_muon.errors import RunFailedError, UserError, reason_of
from megatron_muon.megatron.data.vocabulary import read_head
from megatron_muon.tools.models.model import Loaded, is_of_bytes, load
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.screen import progress

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""What a terminal may obey: controls but tabs and new lines, and what turns the direction of writing."""


class Printer(TextStreamer):
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
        ids = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids:
        raise UserError("this tokenizer has no token that starts a document; give a prompt that is not empty")
    left = model.config.max_position_embeddings - len(ids)
    if left < 1:
        raise UserError(f"the prompt has {len(ids)} tokens, the model takes {model.config.max_position_embeddings}")
    how: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        how = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    inputs = torch.tensor([ids], device=model.device)
    how |= {"pad_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    how |= {"max_new_tokens": min(args.max_new_tokens, left), "attention_mask": torch.ones_like(inputs)}
    try:
        torch.manual_seed(args.seed)
        model.generate(inputs, streamer=Printer(tokenizer, skip_special_tokens=True), **how)
    except (ValueError, RuntimeError) as error:  # settings that make no sense, or weights that are not finite
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
            f"{name} holds token id {ids.max()}, the model has {config.vocab_size}; prepare it with its tokenizer"
        )
    if length > config.max_position_embeddings:
        raise UserError(f"--sequence-length {length}: the model takes {config.max_position_embeddings}")
    parts = []
    with progress("evaluating", "tokens") as show:
        for loss, done in losses(loaded.model, ids, first=loaded.tokenizer.eos_token_id, length=length):
            parts.append(loss)
            show(done, ids.size)
    nats = math.fsum(parts)
    loss, size = nats / ids.size, _bytes(loaded.tokenizer, ids)
    if not math.isfinite(loss):
        raise RunFailedError(f"the loss of {loaded.where} is not finite; its weights, or some of them, are not")
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


def losses(model: Any, ids: Any, *, first: int | None, length: int, batch: int = 8) -> Iterator[tuple[float, int]]:
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
    documents = np.split(ids, (ids == tokenizer.eos_token_id).nonzero()[0] + 1)
    return sum(len(tokenizer.decode(part.tolist(), skip_special_tokens=True).encode()) for part in documents)
