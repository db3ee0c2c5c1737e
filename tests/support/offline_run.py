"""Reads the file of an offline run of Weights & Biases: metrics and config, as an upload would send
them.

The file is a log of LevelDB's form after a header of 7 bytes: blocks of 32 KiB with parts of
records, each after a checksum, a length of two bytes and a type: whole (1), the first part of a
record (2), another (3) or the last (4).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _PART = 32768, 7, 7


def records(file: Path) -> Iterator[Any]:
    """The protocol buffers of a file."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = file.read_bytes(), _HEADER, b""
    assert content.startswith(b":W&B")
    while at < len(content):
        if _BLOCK - at % _BLOCK < _PART:  # too short for a part: padding
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + _PART : at + _PART + length]
        at += _PART + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def read(
    folder: Path,
) -> tuple[
    dict[str, Any],
    dict[str, dict[int, float]],
    dict[str, Any],
]:
    """Config, metrics by name and step, and the run itself (id, name, group), of the run in a
    folder.
    """
    config: dict[str, Any] = {}
    metrics: dict[str, dict[int, float]] = {}
    about: dict[str, Any] = {}
    (file,) = folder.glob("*.wandb")
    for record in records(file):
        for item in (*record.config.update, *record.run.config.update):
            config["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        if record.HasField("run"):
            about = {
                "id": record.run.run_id,
                "name": record.run.display_name,
                "group": record.run.run_group,
            }
        for item in record.history.item:
            name = "/".join(item.nested_key) or item.key
            metrics.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    return config, metrics, about
