"""The argument parser of `megatron-muon`: no abbreviations, suggestions for misspelled flags.

Commands that start trainings also take any flag of pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.flags.flag_names import did_you_mean, nearest


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found {text!r}")
    return int(text)


def write_json(file: Path | None, content: Any) -> None:
    """Write figures to the FILE of --json, if given, with null for numbers that are not finite.

    Raises:
        UserError: the file cannot be written.
    """
    if file is None:
        return
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(content, enc_hook=float), indent=2)
    try:
        file.write_bytes(text + b"\n")
    except OSError as error:
        raise UserError(f"cannot write {str(file)!r}: {error.strerror}") from None


class CommandParser(argparse.ArgumentParser):
    """A parser that can collect flags of pretrain_gpt.py in `flags`, see `take_megatron_flags`.

    Nothing may be abbreviated: the first letters of a flag may be a flag of Megatron's.
    """

    _passes_on = False

    def __init__(self, **kwargs: Any) -> None:
        # keeps the lines of descriptions and examples
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **kwargs)

    def take_megatron_flags(self, words: str) -> None:
        """Accept flags of pretrain_gpt.py among the command's own, and everything after `--`."""
        self._passes_on = True
        self.add_argument_group("flags of pretrain_gpt.py", words)

    def parse_known_args(  # type: ignore[override]  # of argparse's overloads the last alone
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; an unknown flag is an error that suggests the nearest one."""
        own = list(sys.argv[1:] if args is None else args)
        passed: list[str] = []
        if self._passes_on and "--" in own:
            end = own.index("--")
            own, passed = own[:end], own[end + 1 :]
        self._refuse_misspelled(own)
        parsed, rest = super().parse_known_args(own, namespace)
        if self._passes_on:
            parsed.flags, rest = [*rest, *passed], []
        return parsed, rest

    def _refuse_misspelled(self, argv: Sequence[str]) -> None:
        """Reject flags of neither the command nor, where these are accepted, pretrain_gpt.py."""
        options = self._option_string_actions
        for token in argv:
            flag = token.partition("=")[0]
            if token == "--" or (self._subparsers is not None and not token.startswith("-")):
                return  # a subcommand has a parser of its own
            if not flag.startswith("--") or flag in options or " " in flag:
                continue
            if self._passes_on and nearest(flag, options) is None:
                continue
            known = _megatron_flags() if self._passes_on else frozenset()
            if flag not in known:
                self.error(f"unknown flag {flag}{did_you_mean(flag, [*options, *known])}")


def _megatron_flags() -> frozenset[str]:
    """All flags of pretrain_gpt.py."""
    from megatron_muon.megatron.flags import flag_names as names
    from megatron_muon.megatron.flags.config_file import UNSET_FLAG

    known = names.kept()
    if not known:
        with quiet_imports():
            from megatron_muon.megatron.flags.command_line import build_parser

            known = frozenset(build_parser()._option_string_actions)
    return known | {UNSET_FLAG}
