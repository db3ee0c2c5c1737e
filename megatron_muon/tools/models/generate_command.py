"""`megatron-muon generate`: text from a checkpoint, as it is written."""

from __future__ import annotations

import argparse
import contextlib
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.tools.parser import CommandParser, positive

DESCRIPTION = """\
Has a checkpoint, or a folder that export has written, continue a prompt. The model is that of export, in memory, and
generation is that of transformers; it needs no GPU. These are models that continue text: they have learned no dialogue.
"""

EXAMPLES = """\
examples:
  megatron-muon generate --checkpoint runs/first --prompt 'def main('
  megatron-muon generate --checkpoint runs/first --prompt 'import ' --temperature 0
  megatron-muon generate --checkpoint runs/first --interactive
"""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MOST_BEFORE = 80
"""Tokens that a model with random weights writes: a line tells enough."""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon generate`."""
    from megatron_muon.tools.models.arguments import (
        add_checkpoint_arguments,
        add_model_arguments,
        fraction,
        not_negative,
        seed,
    )

    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_checkpoint_arguments(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="what to continue; '' starts a new document")
    parser.add_argument("--interactive", action="store_true", help="read prompts from the terminal, a line each")
    how = parser.add_argument_group("how")
    how.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="how much to write (128)")
    how.add_argument("--temperature", type=not_negative, default=0.8, metavar="T",
        help="0 takes the likeliest token each time (0.8)")  # fmt: skip
    how.add_argument("--top-p", type=fraction, default=0.95, metavar="P",
        help="sample from the smallest set of tokens whose probability reaches P (0.95)")  # fmt: skip
    how.add_argument("--seed", type=seed, default=0, help="of the draws: the same text again on the same machine (0)")
    how.add_argument("--untrained", action="store_true",
        help="show first what the same model writes with random weights, as before training")  # fmt: skip
    how.add_argument("--wrap", type=positive, metavar="COLUMNS", help="break lines that are longer")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generates."""
    if args.interactive == (args.prompt is not None):
        raise UserError("give --prompt TEXT, or --interactive to be asked for prompts")
    with quiet_imports():
        from megatron_muon.tools.models.in_memory import load, quiet_transformers

        quiet_transformers()
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
    return 0


def _asked(greeting: str) -> Iterator[str]:
    """Prompts as they are typed."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(greeting)
    while True:
        try:
            prompt = input("> " if is_terminal else "")
        except EOFError:
            return
        if not prompt:
            return
        yield prompt


def _write(loaded: Any, prompt: str, args: argparse.Namespace, most: int = sys.maxsize) -> None:
    """Prints the prompt and what follows it, as it comes."""
    import torch
    from transformers import TextStreamer

    show = Shown(args.wrap)

    class Printed(TextStreamer):
        """Prints whole words as they come."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text, end="\n" if stream_end else "")

    tokenizer, model = loaded.tokenizer, loaded.model
    ids = tokenizer(prompt.encode("utf-8", "replace").decode())["input_ids"]
    if not ids:
        ids = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids:
        raise UserError("this tokenizer has no token that starts a document; give a prompt that is not empty")
    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        raise UserError(f"the prompt has {len(ids)} tokens, the model takes {model.config.max_position_embeddings}")
    torch.manual_seed(args.seed)
    draws = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    show(prompt)
    inputs = torch.tensor([ids], device=loaded.device)
    with _not_finite():
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(args.max_new_tokens, room, most),
            streamer=Printed(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **(draws if args.temperature else {"do_sample": False}),
        )


class Shown:
    """Prints text without characters that a terminal would obey; line breaks and tabs stay."""

    def __init__(self, width: int | None) -> None:
        self._width, self._column = width or sys.maxsize, 0

    def __call__(self, text: str, end: str = "") -> None:
        """Prints the text, in lines of at most the width."""
        for letter in text + end:
            if letter == "\n" or self._column >= self._width:
                print()
                self._column = 0
            if letter != "\n":
                print(_REPLACEMENT if _is_control(letter) else letter, end="")
                self._column += 1
        sys.stdout.flush()


def _is_control(letter: str) -> bool:
    """Whether a terminal may obey a character: controls, halves of pairs, and what turns the direction of writing."""
    kind, turns = unicodedata.category(letter), "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return letter != "\t" and (kind in ("Cc", "Cs") or letter in turns)


@contextlib.contextmanager
def _not_finite() -> Iterator[None]:
    """Turns torch's error for probabilities that are no numbers into a line."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise UserError(
            "the model's probabilities are not finite: give a larger --temperature, or other weights"
        ) from None
