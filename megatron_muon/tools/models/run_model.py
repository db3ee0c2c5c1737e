"""`megatron-muon generate` and `eval`, with the models of transformers."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_muon.errors import RunFailedError, UserError, reason_of
from megatron_muon.megatron.data.corpus import read_head
from megatron_muon.tools.models.hf_model import (
    check_tokens,
    counterpart,
    from_folder,
    is_byte_level,
)
from megatron_muon.tools.models.weights import Weights
from megatron_muon.tools.parser import write_json

_MAX_SAMPLE = 2048
"""Most tokens of a sample for an exported folder, which does not record training's length."""

_TOP_P = 0.95
"""Sampling is from the smallest set of tokens with this probability."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal may obey: controls but tab and newline, and changes of direction."""


@dataclass(frozen=True)
class Loaded:
    """A model of transformers; `sequence_length` is that of a sample."""

    model: Any
    tokenizer: Any
    where: Path
    sequence_length: int


def load(args: argparse.Namespace, *, untrained: bool = False) -> Loaded:
    """Load the model of --checkpoint, on CUDA if available; `untrained` keeps random weights.

    Raises:
        UserError: as `Weights` and `counterpart` raise it, and where no tokenizer is found.
    """
    # its warnings are about settings that nobody here has chosen
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)  # for an untrained model
    is_export = (args.checkpoint / "config.json").is_file()
    return (_load_export if is_export else _load_checkpoint)(args, untrained)


def _load_export(args: argparse.Namespace, untrained: bool) -> Loaded:
    folder: Path = args.checkpoint
    config = from_folder(transformers.AutoConfig, folder)
    tokenizer = from_folder(transformers.AutoTokenizer, args.tokenizer or folder)
    check_tokens(tokenizer, config.vocab_size)
    dtype = _dtype(config.dtype or torch.float32)
    if untrained:
        model = _untrained(config, dtype)
    else:
        model = from_folder(transformers.AutoModelForCausalLM, folder, dtype=dtype)
    length = min(config.max_position_embeddings, _MAX_SAMPLE)
    return Loaded(_on_device(model), tokenizer, folder, length)


def _load_checkpoint(args: argparse.Namespace, untrained: bool) -> Loaded:
    weights = Weights(args.checkpoint, verify=not args.no_verify_checkpoint)
    source = counterpart(weights, args.tokenizer)
    if source.tokenizer is None:
        raise UserError(
            f"text needs a tokenizer, and {weights.folder} has none; give one by --tokenizer DIR"
        )
    config = transformers.AutoConfig.for_model(**source.config)
    dtype = _dtype(weights.trained_in)
    if untrained:
        model = _untrained(config, dtype)
    else:
        state: dict[str, Tensor] = {}
        for row in source.table:
            state.update(row.tensors(source.read(row), dtype))
        kind = getattr(transformers, source.config["architectures"][0])
        model = kind.from_pretrained(None, config=config, state_dict=state)
    return Loaded(_on_device(model), source.tokenizer, weights.folder, weights.args.seq_length)


def _dtype(trained_in: torch.dtype) -> torch.dtype:
    """The dtype of the run; fp32 on a CPU, as many multiply bf16 slowly."""
    return trained_in if torch.cuda.is_available() else torch.float32


def _untrained(config: Any, dtype: torch.dtype) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_config(config, trust_remote_code=False).to(dtype)


def _on_device(model: Any) -> Any:
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


class SafeStreamer(transformers.TextStreamer):
    """Prints whole words as they come, without characters that a terminal would obey."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a part of the text."""
        super().on_finalized_text(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text), stream_end)


def generate(args: argparse.Namespace) -> None:
    """Run `megatron-muon generate`."""
    if args.untrained:
        print("before training:")
        _write(load(args, untrained=True), args)
        print("\nafter training:")
    _write(load(args), args)


def _write(loaded: Loaded, args: argparse.Namespace) -> None:
    """Print the prompt and its continuation, as it comes."""
    tokenizer, model = loaded.tokenizer, loaded.model
    ids = tokenizer(args.prompt.encode("utf-8", "replace").decode())["input_ids"]
    starts = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    ids = ids or [token for token in starts if token is not None][:1]
    if not ids:
        raise UserError("this tokenizer has no token that starts a document; give a prompt")
    limit = model.config.max_position_embeddings
    if len(ids) >= limit:
        raise UserError(f"the prompt has {len(ids)} tokens, the model takes {limit}")
    options: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        options = {
            "do_sample": True,
            "temperature": args.temperature,
            "top_p": _TOP_P,
            "top_k": 0,
        }
    inputs = torch.tensor([ids], device=model.device)
    try:
        torch.manual_seed(args.seed)
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=SafeStreamer(tokenizer, skip_special_tokens=True),
            max_new_tokens=min(args.max_new_tokens, limit - len(ids)),
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **options,
        )
    # invalid settings, or weights that are not finite
    except (ValueError, RuntimeError) as error:
        raise UserError(f"no token can be sampled: {reason_of(error)}") from error


def evaluate(args: argparse.Namespace) -> None:
    """Run `megatron-muon eval`."""
    loaded = load(args)
    name = args.data or str(args.text)
    ids = _ids(args, loaded.tokenizer)[: args.max_tokens]
    config = loaded.model.config
    length = args.sequence_length or loaded.sequence_length
    if not ids.size:
        raise UserError(f"{name} has no tokens")
    if ids.max() >= config.vocab_size:
        raise UserError(
            f"{name} has token id {ids.max()}, the model has {config.vocab_size} tokens; prepare"
            " it with the model's tokenizer"
        )
    if length > config.max_position_embeddings:
        raise UserError(
            f"--sequence-length {length}: the model takes {config.max_position_embeddings}"
        )
    sums = []
    first = loaded.tokenizer.eos_token_id
    for loss, _ in losses(loaded.model, ids, first=first, length=length):
        sums.append(loss)
    nats = math.fsum(sums)
    loss = nats / ids.size
    if not math.isfinite(loss):
        raise RunFailedError(f"the loss of {loaded.where} is not finite; check its weights")
    size = _text_bytes(loaded.tokenizer, ids)
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
    print(f"{loaded.where} on {name}:", end=" ")
    print(f"{ids.size:,} tokens in samples of {length}, {size:,} bytes")
    print(f"loss {loss:.4f}, perplexity {figures['perplexity']:.3f}", end="")
    print(f", bits per byte {figures['bits_per_byte']:.4f}" if size else "")


def _ids(args: argparse.Namespace, tokenizer: Any) -> Any:
    """The ids of --data, or those that `data prepare` would write for --text."""
    if args.text is None:
        return np.memmap(args.data + ".bin", read_head(args.data)[0], "r")
    try:
        text = args.text.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {args.text} is not a text file in UTF-8 ({error})") from None
    ids = tokenizer(text)["input_ids"]
    if text and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return np.array(ids, np.int64)


def losses(
    model: Any, ids: Any, *, first: int | None, length: int, batch: int = 8
) -> Iterator[tuple[float, int]]:
    """Predict every token once, in batches of samples of `length` tokens.

    Yields sums of losses in nats, with the number of tokens done. `first`, the end of a document,
    precedes the first token.
    """
    before = int(ids[0]) if first is None else first
    for start in range(0, ids.size, batch * length):
        targets = torch.from_numpy(ids[start : start + batch * length].astype(np.int64))
        inputs = torch.cat([torch.tensor([before]), targets[:-1]])
        before = int(targets[-1])
        done = start + len(targets)
        whole = len(targets) // length * length  # tokens of whole samples
        if whole:
            yield _loss(model, inputs[:whole], targets[:whole], length), done
        if whole < len(targets):
            yield _loss(model, inputs[whole:], targets[whole:], len(targets) - whole), done


def _loss(model: Any, inputs: Tensor, targets: Tensor, length: int) -> float:
    with torch.inference_mode():
        logits = model(inputs.view(-1, length).to(model.device)).logits
    logits = logits.flatten(0, 1).float()
    return float(cross_entropy(logits, targets.to(model.device), reduction="sum"))


def _text_bytes(tokenizer: Any, ids: Any) -> int:
    """Bytes of the text that these ids stand for; the end of a document has none."""
    if is_byte_level(tokenizer):
        return int((ids < 256).sum())
    ends = (ids == tokenizer.eos_token_id).nonzero()[0]
    total = 0
    for document in np.split(ids, ends + 1):
        text = tokenizer.decode(document.tolist(), skip_special_tokens=True)
        total += len(text.encode())
    return total
