"""Removes private names from reports that users attach to issues."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
import sysconfig
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_muon.tools.train.processes import ROOT


def private_names() -> set[str]:
    """Names of this host and its user, which a shared report must not have."""
    host = socket.gethostname()
    home = Path(os.environ.get("HOME", ""))
    names = {host, host.split(".")[0], home.name}
    with contextlib.suppress(KeyError, OSError):  # in a container a user may have no name
        names.add(getpass.getuser())
    return names - {"", "root", "localhost"}


def public(value: Any, names: Collection[str]) -> Any:
    """A value without `names` of hosts and users, addresses and folders; keys of dicts stay.

    Modules are named from their package on.
    """
    if isinstance(value, dict):
        return {key: public(one, names) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [public(one, names) for one in value]
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    folders = [*sysconfig.get_paths().values(), str(ROOT)]
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    text = re.sub(r"(?<![\w.)/])/(?:[^\s'\"/:]+/)+(?=[^\s'\"/:])", ".../", text)
    text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS", text)
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)(?:\.[a-z][\w.-]+)?", "NAME", text)
    return text
