"""`megatron-muon eval`: how well a checkpoint predicts a text."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_muon.errors import RunFailedError, UserError, quiet_imports
from megatron_muon.tools.parser import CommandParser, positive, write_json
from megatron_muon.tools.progress import progress

DESCRIPTION = """\
Loss, perplexity and bits per byte of a checkpoint, or of a folder that export has written, on a text file, or on what
megatron-muon data prepare has made into tokens. Documents are taken one after the other and cut into samples as in
training; every token is predicted once. Bits per byte compare models with different tokenizers.
"""

EXAMPLES = """\
examples:
  megatron-muon eval --checkpoint runs/first --text README.md
  megatron-muon data prepare --input docs --output data/docs
  megatron-muon eval --checkpoint runs/first --data data/docs
  megatron-muon eval --checkpoint exported/first --data data/docs --max-tokens 100000 --json docs.json
"""

_LARGEST = 700.0
"""Whose exponential a float holds."""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon eval`."""
    from megatron_muon.tools.models.arguments import add_checkpoint_arguments, add_model_arguments

    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_checkpoint_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="PREFIX", help="PREFIX.bin and PREFIX.idx")
    what.add_argument("--text", type=Path, metavar="FILE", help="a text file, as one document")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="stop after so many tokens (all)")
    parser.add_argument("--sequence-length", type=positive, metavar="N", help="tokens of a sample (as in training)")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="samples at a time (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluates."""
    with quiet_imports():
        import numpy as np

        from megatron_muon.megatron.data.vocabulary import read_head, require_files
        from megatron_muon.tools.models.in_memory import load, quiet_transformers

        quiet_transformers()
        if args.text is None:
            require_files(args.data, "--data")
            dtype = read_head(args.data)[0]
        text = "" if args.text is None else _read(args.text)
        loaded = load(args)
    name = args.data or str(args.text)
    ids = np.memmap(args.data + ".bin", dtype, "r") if args.text is None else _tokenized(text, loaded.tokenizer)
    ids = ids[: args.max_tokens]
    if not ids.size:
        raise UserError(f"{name} holds no token")
    rows = loaded.model.config.vocab_size
    if ids.max() >= rows:
        raise UserError(f"{name} holds token id {ids.max()}, the model has {rows}; prepare it with its tokenizer")
    length = args.sequence_length or loaded.sequence_length
    if length > loaded.model.config.max_position_embeddings:
        raise UserError(f"--sequence-length {length}: the model takes {loaded.model.config.max_position_embeddings}")
    with progress("evaluating", "tokens") as show:
        nats = sum(_losses(loaded, ids, length=length, batch=args.batch_size, show=show))
    if not math.isfinite(nats):
        raise RunFailedError(f"the loss of {loaded.where} is not finite; its weights, or some of them, are not")
    loss = nats / ids.size
    figures = {
        "checkpoint": str(loaded.where),
        "data": name,
        "tokens": int(ids.size),
        "bytes": (size := _bytes(loaded.tokenizer, ids)),
        "sequence_length": length,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < _LARGEST else math.inf,
        "bits_per_byte": nats / math.log(2) / size if size else None,
    }
    write_json(args.json, figures)
    print(f"{loaded.where} on {name}: {figures['tokens']:,} tokens in samples of {length}, {size:,} bytes")
    print(f"loss {figures['loss']:.4f}, perplexity {figures['perplexity']:.3f}", end="")
    print(f", bits per byte {figures['bits_per_byte']:.4f}" if size else "")
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"--text {file}: {error.strerror}; give a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--text {file} is not UTF-8 at byte {error.start:,}; convert it, or leave it out") from None


def _tokenized(text: str, tokenizer: Any) -> Any:
    """The ids that `data prepare` makes of a document."""
    import numpy as np

    from megatron_muon.tools.models.tokenizer import is_of_bytes

    if not text:
        return np.array([], np.int64)
    ids = np.frombuffer(text.encode(), np.uint8) if is_of_bytes(tokenizer) else tokenizer(text)["input_ids"]
    end = tokenizer.eos_token_id
    return np.array([*ids, *([] if end is None else [end])], np.int64)


def _losses(
    loaded: Any, ids: Any, *, length: int, batch: int, show: Callable[[float, float], None] = lambda done, total: None
) -> Iterator[float]:
    """Sums of the losses of all tokens, in nats, batch by batch; the end of a document stands before the first."""
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    first = loaded.tokenizer.eos_token_id
    for start in range(0, ids.size, batch * length):
        targets = torch.from_numpy(ids[start : start + batch * length].astype(np.int64))
        before = ids[start - 1 : start] if start else [ids.dtype.type(ids[0] if first is None else first)]
        inputs = torch.cat([torch.tensor([int(before[0])]), targets[:-1]])
        whole = len(targets) // length * length
        for part, shape in ((slice(0, whole), (-1, length)), (slice(whole, None), (1, -1))):
            if (rows := targets[part]).numel():
                with torch.inference_mode():
                    logits = loaded.model(inputs[part].view(shape).to(loaded.device)).logits
                yield float(cross_entropy(logits.flatten(0, 1).float(), rows.to(loaded.device), reduction="sum"))
        show(min(start + batch * length, ids.size), ids.size)


def _bytes(tokenizer: Any, ids: Any) -> int:
    """Bytes of the text that these ids stand for; the end of a document is none."""
    from megatron_muon.tools.models.tokenizer import is_of_bytes

    if is_of_bytes(tokenizer):
        return int((ids < 256).sum())
    end = tokenizer.eos_token_id
    bounds = [0, *((ids == end).nonzero()[0] + 1), len(ids)] if end is not None else [0, len(ids)]
    documents = (ids[a:b].tolist() for a, b in itertools.pairwise(bounds))
    return sum(len(tokenizer.decode(part, skip_special_tokens=True).encode()) for part in documents)
