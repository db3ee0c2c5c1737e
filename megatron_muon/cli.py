"""The `megatron-muon` command: imports and runs one subcommand, and reports errors in one line.

A subcommand is one entry of `GROUPS` and one module: `configure(parser)` adds arguments,
description and examples, `run(args)` does the work, returns the exit status, and raises `UserError`
for user errors.
"""

import argparse
import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from megatron_muon import shipped
from megatron_muon.errors import (
    ExitStatus,
    RunFailedError,
    UserError,
    missing_extra,
    settling,
    unforeseen,
)
from megatron_muon.tools.parser import CommandParser


class Command(NamedTuple):
    """A subcommand: the module that implements it, and its line in `megatron-muon --help`."""

    module: str
    summary: str


GROUPS = {
    "train and compare": {
        "quickstart": Command("quickstart", "train a small GPT in this folder and generate text"),
        "train": Command("train.train_command", "train from an experiment file"),
        "compare": Command("compare", "compare runs: a table and a plot of their losses"),
    },
    "use a checkpoint": {
        "generate": Command("models.model_commands", "generate text from a checkpoint"),
        "eval": Command("models.model_commands", "measure loss and bits per byte on any text"),
        "export": Command("models.model_commands", "convert a checkpoint to Hugging Face format"),
        "import": Command("models.model_commands", "convert a Hugging Face model to a checkpoint"),
    },
    "plan": {
        "plan": Command("plan.plan_command", "plan a Muon step for any number of ranks"),
    },
    "prepare and check": {
        "data": Command("data", "prepare text for training"),
        "doctor": Command("doctor.doctor_command", "check this environment, a checkpoint or a GPU"),
    },
}
"""The subcommands by name, in groups as `megatron-muon --help` shows them."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

EPILOG = """\
examples:
  megatron-muon quickstart
  megatron-muon train --config configs/quickstart.yaml --nproc 2 --out runs/first
  megatron-muon compare runs/first runs/second --png losses.png
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64
  megatron-muon COMMAND --help

exit status:
  0 success, 1 failure, 2 user error, 130 Ctrl-C, 75 training ended by SIGTERM after saving a
  checkpoint (start it again with --resume); train passes on any other exit status of its run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default `sys.argv[1:]`; returns a status of `EPILOG`."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        with settling("reading the command line"):
            parser, modules = _build_parser(arguments)
            args = parser.parse_args(arguments)
            checkpoint = getattr(args, "checkpoint", None)
            # refused before the command's imports, which take seconds
            if checkpoint is not None and not Path(checkpoint).is_dir():
                from megatron_muon.checkpoint import folders

                folders.find(Path(checkpoint))
        for file in (getattr(args, "config", None), getattr(args, "hf", None)):
            if file is not None and (note := shipped.note(Path(file))):
                _say(note)
        status: int = modules[args.command].run(args)
        return status

    return reported(run)


def reported(run: Callable[[], int]) -> int:
    """Call `run`, print its errors in one line each, and return the exit status."""
    status: int = ExitStatus.USAGE
    try:
        status = run()
        if sys.stdout is not None:  # closed by whoever started it
            sys.stdout.flush()  # a full device is noticed here, not by the interpreter's end
    except SystemExit as end:  # argparse: 0 after --help and --version, 2 after a usage error
        status = end.code if isinstance(end.code, int) else ExitStatus.FAILURE
    except UserError as error:
        _say(*(f"error: {line}" for line in str(error).splitlines()))
    except ModuleNotFoundError as error:
        if not missing_extra(error):
            raise
        _say(f"error: {missing_extra(error)}")
    except RunFailedError as error:
        _say(str(error))
        status = ExitStatus.FAILURE
    except KeyboardInterrupt:
        _say("interrupted")
        status = ExitStatus.INTERRUPTED
    except BrokenPipeError:  # `megatron-muon ... | head`
        _discard_output()
        status = ExitStatus.FAILURE
    # errors of files and devices that no command expects, names that are not text
    except (OSError, UnicodeError) as error:
        _say(f"error: {unforeseen(error)}")
        if isinstance(error, OSError) and error.filename is None:  # a full device
            _discard_output()
    return status


def _say(*lines: str) -> None:
    for line in lines:
        print(f"megatron-muon: {line}", file=sys.stderr)


def _discard_output() -> None:
    """Discard stdout's buffer, which the interpreter would write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ShowVersions(argparse.Action):
    """Prints versions, system and driver for a bug report, without importing the packages."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from megatron_muon.megatron.provenance import versions

        found = {**versions(), "system": platform.platform()}
        with contextlib.suppress(OSError):
            driver = Path("/proc/driver/nvidia/version").read_text("utf-8")
            found["gpu driver"] = driver.splitlines()[0]
        for name, version in found.items():
            print(f"{name:<20} {version}")
        parser.exit(ExitStatus.OK)


def _build_parser(arguments: list[str]) -> tuple[CommandParser, dict[str, ModuleType]]:
    """The parser, and the module of the subcommand in `arguments`, if any."""
    about = "Muon for Megatron-LM under Megatron-FSDP: train, compare, plan, export, check."
    usage = "megatron-muon [-h] [--version] COMMAND ..."
    parser = CommandParser(prog="megatron-muon", usage=usage, description=about, epilog=EPILOG)
    parser.add_argument(
        "--version", action=_ShowVersions, nargs=0, help="show versions for a bug report and exit"
    )
    listed = []
    for group, commands in GROUPS.items():
        listed.append(f"{group}:")
        for name, command in commands.items():
            listed.append(f"  {name:<12}{command.summary}")
    subparsers = parser.add_subparsers(
        prog="megatron-muon",
        title="commands",
        description="\n".join(listed),
        dest="command",
        metavar="COMMAND",
        required=True,
        help=argparse.SUPPRESS,
    )
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    modules: dict[str, ModuleType] = {}
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name)
        if name == wanted:
            modules[name] = importlib.import_module(f"megatron_muon.tools.{command.module}")
            modules[name].configure(subparser)
    return parser, modules


if __name__ == "__main__":
    sys.exit(main())
