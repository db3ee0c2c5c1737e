"""`megatron-muon generate` and `eval`, with the models of transformers."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_muon.errors import RunFailedError, UserError, reason_of
from megatron_muon.tools.models.hf_model import counterpart
from megatron_muon.tools.models.weights import Weights

_TOP_P = 0.95
"""Sampling is from the smallest set of tokens with this probability."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal may obey: controls but tab and newline, and changes of direction."""


def load(args: argparse.Namespace) -> tuple[Any, Any, int]:
    """Load the model of --checkpoint, on CUDA if available, its tokenizer, and its --seq-length.

    Raises:
        UserError: as `Weights` and `counterpart` raise it, and where no tokenizer is found.
    """
    # its warnings are about settings that nobody here has chosen
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    checkpoint = Weights(args.checkpoint, verify=not args.no_verify_checkpoint)
    if torch.cuda.is_available():
        device, dtype = "cuda", checkpoint.trained_in
    else:
        device, dtype = "cpu", torch.float32  # many CPUs multiply bf16 slowly
    source = counterpart(checkpoint, args.tokenizer, dtype)
    if getattr(source.tokenizer, "eos_token_id", None) is None:
        raise UserError(
            "text needs a tokenizer with an end of documents; give one by --tokenizer DIR"
        )
    config = transformers.AutoConfig.for_model(**source.config)
    kind = getattr(transformers, source.config["architectures"][0])
    model = kind.from_pretrained(None, config=config, state_dict=source.tensors)
    return model.to(device).eval(), source.tokenizer, checkpoint.args.seq_length


def generate(args: argparse.Namespace) -> None:
    """Run `megatron-muon generate`."""
    model, tokenizer, _ = load(args)
    ids = tokenizer(args.prompt.encode("utf-8", "replace").decode())["input_ids"]
    ids = ids or [tokenizer.eos_token_id]  # the end of a document starts the next one
    limit = model.config.max_position_embeddings
    if len(ids) >= limit:
        raise UserError(f"the prompt has {len(ids)} tokens, the model takes {limit}")
    options: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        options = {"do_sample": True, "temperature": args.temperature, "top_p": _TOP_P, "top_k": 0}
    inputs = torch.tensor([ids], device=model.device)
    try:
        (written,) = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(args.max_new_tokens, limit - len(ids)),
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **options,
        )
    # invalid settings, or weights that are not finite
    except (ValueError, RuntimeError) as error:
        raise UserError(f"no token can be sampled: {reason_of(error)}") from error
    text = tokenizer.decode(written, skip_special_tokens=True)
    print(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text))


def evaluate(args: argparse.Namespace) -> None:
    """Run `megatron-muon eval`."""
    try:
        text = args.text.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {args.text} cannot be read as UTF-8 ({error})") from None
    if not text:
        raise UserError(f"--text {args.text} is empty")
    model, tokenizer, length = load(args)
    end = tokenizer.eos_token_id
    document = tokenizer(text)["input_ids"]
    ids = torch.tensor([end, *document, end])
    tokens = len(ids) - 1
    nats = math.fsum(losses(model, ids, length=length))
    loss = nats / tokens
    if not math.isfinite(loss):
        raise RunFailedError(f"the loss of {args.checkpoint} is not finite; check its weights")
    size = len(text.encode())
    bits_per_byte = nats / math.log(2) / size
    print(f"{args.checkpoint} on {args.text}: {tokens:,} tokens, {size:,} bytes")
    print(f"loss {loss:.4f}, perplexity {math.exp(loss):.3f}, bits per byte {bits_per_byte:.4f}")


def losses(model: Any, ids: Tensor, *, length: int) -> Iterator[float]:
    """Predict every token after the first once, in samples of `length`; sums of losses in nats."""
    inputs = ids[:-1].split(length)
    targets = ids[1:].split(length)
    for sample, following in zip(inputs, targets, strict=True):
        with torch.inference_mode():
            (logits,) = model(sample[None].to(model.device)).logits
        wanted = following.to(model.device)
        yield float(cross_entropy(logits.float(), wanted, reduction="sum"))
