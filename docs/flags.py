"""Write the tables of docs/flags.md from the parser: name, choices, help and default of each flag.

    python docs/flags.py

The text around the tables is the page's own and stays.
"""

import argparse
import re
from pathlib import Path

from megatron_muon.megatron.flags.command_line import add_muon_arguments, add_run_arguments

PAGE = Path(__file__).with_suffix(".md")
HEAD = "| flag | meaning | default |\n| --- | --- | --- |\n"
STATE = r"--muon-(offload|ns-device|momentum-dtype)"
EXCHANGE = r"--muon-(exchange|free-buffers|team-size|share-replicated)"
RUNNING = r"--(config|resume|device|no-verify|muon-(log|metrics|audit|allow))"
SECTIONS = {"Running": RUNNING, "The exchange": EXCHANGE, "State": STATE, "The update": "--"}
"""Headings and the flags below them; a flag belongs to the first pattern that matches its name."""


def flags() -> list[argparse.Action]:
    """Return this package's flags of pretrain_gpt.py."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--muon-fp32-matmul-prec", choices=["medium", "high"], default="medium")
    add_muon_arguments(add_run_arguments(parser))
    return [flag for flag in parser._actions if flag.dest != "muon_fp32_matmul_prec"]


def row(flag: argparse.Action) -> str:
    """Return the table row of a flag."""
    name = flag.option_strings[0]
    default = "" if flag.default in (None, []) else str(flag.default)
    if flag.nargs == 0:
        usage, default = name, "off"
    elif flag.choices:
        usage = f"{name} {{{','.join(map(str, flag.choices))}}}"
    else:
        usage = f"{name} {flag.metavar or flag.dest.rpartition('_')[2].upper()}"
    if flag.nargs in ("*", "+"):
        usage += "..."
    text = " ".join((flag.help or "").split()).replace("|", "\\|")
    text = re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", text)
    return f"| `{usage}` | {text} | {default} |\n"


def page(text: str) -> str:
    """Return the page with the tables of today's flags."""
    rows = dict.fromkeys(SECTIONS, "")
    for flag in flags():
        name = flag.option_strings[0]
        heading = next(heading for heading, names in SECTIONS.items() if re.match(names, name))
        rows[heading] += row(flag)
    for heading, table in rows.items():
        before = f"## {heading}\n\n{HEAD}"
        start, found, rest = text.partition(before)
        assert found, f"{PAGE} has no table under {heading!r}"
        text = start + before + table + re.sub(r"\A(\|.*\n)*", "", rest)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
