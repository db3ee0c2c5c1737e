"""A checkpoint, or an exported folder, as a model of `transformers` in this process, with its tokenizer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_muon.errors import UserError, reason_of
from megatron_muon.tools.models.source import Source, check_tokens, counterpart, dtype_of, open_weights, tokenizer_of


@dataclass(frozen=True)
class Loaded:
    """What generates and is evaluated.

    Attributes:
        where: the checkpoint's folder.
        sequence_length: tokens of a sample in training; of an exported folder, the most that it takes.
    """

    model: Any
    tokenizer: Any
    where: Path
    sequence_length: int

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device


def quiet_transformers() -> None:
    """Has transformers show no progress bars, and warn of nothing that its user has not chosen."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load(args: argparse.Namespace, *, untrained: bool = False) -> Loaded:
    """Loads what a command's arguments name; `untrained`, with weights drawn at random instead.

    Raises:
        UserError: as `source.open_weights` and `source.counterpart`; or there is no tokenizer or no such device.
    """
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if args.tokenizer == "none":
        raise UserError("--tokenizer none: text needs one; give a folder that transformers loads")
    directory: Path = args.checkpoint
    if (directory / "config.json").is_file():
        loaded = _exported(args, device, untrained=untrained)
        check_tokens(loaded.tokenizer, loaded.model.config.vocab_size)
        return loaded
    source = counterpart(open_weights(directory, verify=not args.no_verify_checkpoint))
    tokenizer = tokenizer_of(source, args.tokenizer)
    dtype = _dtype(args.dtype, source.weights.trained_in, device)
    model = _model(source, tokenizer, dtype, untrained=untrained)
    return Loaded(model.to(device).eval(), tokenizer, source.weights.folder, source.weights.args.seq_length)


def _model(source: Source, tokenizer: Any, dtype: torch.dtype, *, untrained: bool) -> Any:
    import transformers

    content = source.config(dtype, tokenizer)
    kind = getattr(transformers, content.pop("architectures")[0])
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    if untrained:
        torch.manual_seed(0)
        return kind(config).to(dtype)
    return kind.from_pretrained(None, config=config, state_dict=source.state_dict(dtype))


def _exported(args: argparse.Namespace, device: str, *, untrained: bool) -> Loaded:
    """A folder of Hugging Face."""
    import transformers

    directory = args.checkpoint
    try:
        config = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
        dtype = _dtype(args.dtype, getattr(config, "dtype", None) or torch.float32, device)
        if untrained:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(directory), dtype=dtype, trust_remote_code=False
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            args.tokenizer or str(directory), trust_remote_code=False
        )
    except Exception as error:  # whatever a damaged folder leads to
        raise UserError(
            f"{directory} cannot be loaded by transformers {transformers.__version__}: {reason_of(error)}"
        ) from error
    return Loaded(model.to(device).eval(), tokenizer, directory, min(config.max_position_embeddings, 2048))


def _dtype(asked: str, trained_in: torch.dtype, device: str) -> torch.dtype:
    """On a CPU float32 unless asked otherwise: many multiply bfloat16 slowly."""
    return dtype_of(asked, torch.float32 if device == "cpu" else trained_in)
