"""The formats of the files in a run's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_muon.checkpoint import folders
from megatron_muon.megatron.flags.config_file import Flag

_PLAIN = re.compile(r"[A-Za-z0-9/_.][A-Za-z0-9/_.,+=@%-]*\Z")
"""Needs no quotes in an experiment file."""

_WORDS = ("null", "true", "false")
"""Need quotes there, as they have a meaning of their own."""


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    with folders.written_at_once(file) as stream:
        stream.write(json_text(content))


def json_text(content: Any) -> str:
    """Indented JSON, with null for numbers that are not finite."""
    text = msgspec.json.format(msgspec.json.encode(content, enc_hook=float), indent=2)
    return text.decode() + "\n"


def config_text(flags: Iterable[Flag], env: Mapping[str, str], *, heading: str) -> str:
    """An experiment file that `load_config` reads back as exactly these flags and variables."""
    lines = [f"# {line}" for line in heading.splitlines()]
    if env:
        lines.append("ENV_VARS:")
        lines += [f"  {name}: {_quoted(value)}" for name, value in env.items()]
    lines.append("MODEL_ARGS:")
    lines += [f"  {flag}: {_yaml(values)}" for flag, values in flags]
    return "\n".join(lines) + "\n"


def _yaml(values: tuple[str, ...]) -> str:
    if not values:
        return "true"
    items = [_quoted(value) for value in values]
    is_switch = values[0].lower() in ("true", "false")
    if len(values) == 1 and not is_switch and not values[0].startswith("["):
        return items[0]
    return f"[{', '.join(items)}]"


def _quoted(text: str) -> str:
    if _PLAIN.match(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)
