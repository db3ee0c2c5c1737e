"""The `megatron-muon` command: finds the subcommand, imports it, runs it, turns errors into one line.

A subcommand is one entry of `COMMANDS` and one module: `configure(parser)` adds arguments, description and examples,
`run(args)` does the work, returns the exit status, and raises `UserError` for what the user got wrong. Only the module
that is asked for is imported, so that help and usage errors never wait for torch.
"""

import argparse
import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from megatron_muon import shipped
from megatron_muon.errors import ExitStatus, RunFailedError, UserError, missing_extra, settling, unforeseen
from megatron_muon.tools.parser import CommandParser
from megatron_muon.version import __version__

EXPERIMENTS, USE, MEASURE, PREPARE = (
    "train and compare",
    "use what was trained",
    "plan and measure",
    "prepare and check",
)
"""Groups of subcommands, in the order of `megatron-muon --help`."""


@dataclass(frozen=True)
class Command:
    """A subcommand: the module that implements it, its line in `megatron-muon --help`, and the group it stands in."""

    module: str
    summary: str
    group: str = EXPERIMENTS


COMMANDS = {
    "quickstart": Command("quickstart", "train a small GPT in this folder, and show what it writes"),
    "train": Command("train.command", "train what an experiment file says"),
    "sweep": Command("sweep.command", "train at many settings and seeds, and compare"),
    "report": Command("report.command", "write a page with plots on one run or many"),
    "submit": Command("submit.command", "put a training into SLURM's queue"),
    "summary": Command("train.summary", "sum up a finished run"),
    "generate": Command("models.command", "write text with a checkpoint", USE),
    "eval": Command("models.command", "loss and bits per byte of a checkpoint on any text", USE),
    "export": Command("models.command", "checkpoint to Hugging Face or torch_dist", USE),
    "import": Command("models.command", "Hugging Face model to a checkpoint, to go on with", USE),
    "plan": Command("plan.command", "plan a Muon step on paper, for any number of ranks", MEASURE),
    "rehearse": Command("rehearse.command", "run every rank's real step without a GPU, and compare", MEASURE),
    "data": Command("data", "prepare text for training", PREPARE),
    "doctor": Command("doctor.command", "check this environment, and a checkpoint", PREPARE),
}

EPILOG = """\
examples:
  megatron-muon quickstart
  megatron-muon data prepare --stdlib --output data/stdlib
  megatron-muon train --config configs/quickstart.yaml --nproc 2 --out runs/first
  megatron-muon summary runs/first
  megatron-muon sweep --config configs/quickstart.yaml --nproc 2 --grid lr=4e-3,8e-3,1.6e-2 --seeds 3
  megatron-muon report runs/quickstart-sweep --out runs/report
  megatron-muon submit --config configs/quickstart.yaml --nodes 2 --dry-run
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64
  megatron-muon rehearse --config configs/llama3-8b.yaml --world-size 64
  megatron-muon doctor --checkpoint runs/first/checkpoints
  megatron-muon COMMAND --help

exit status:
  0 all is well, 1 it failed, 2 a mistake of the user, 75 a training that SIGTERM ended after a checkpoint (start it
  again with --resume), 130 Ctrl-C; train hands on any other status of its run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default `sys.argv[1:]`, and returns the exit status, as `EPILOG` has them."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        with settling("reading the command line"):
            parser, modules = _build_parser(arguments)
            args = parser.parse_args(arguments)
            _require_checkpoint(args)
        for file in (getattr(args, "config", None), getattr(args, "hf", None)):
            if file is not None and (note := shipped.note(Path(file))):
                print(f"megatron-muon: {note}", file=sys.stderr)
        status: int = modules[args.command].run(args)
        return status

    return reported(run)


def _require_checkpoint(args: argparse.Namespace) -> None:
    """Refuses a checkpoint that is not there, before the command imports what takes seconds."""
    if (checkpoint := getattr(args, "checkpoint", None)) is not None and not Path(checkpoint).is_dir():
        from megatron_muon.checkpoint import files

        files.find(Path(checkpoint))


def reported(run: Callable[[], int]) -> int:
    """Calls `run`, prints what it raises in one line, and returns the exit status."""
    try:
        status = run()
        if sys.stdout is not None:  # closed by whoever started it
            sys.stdout.flush()  # a full device is noticed here, not by the interpreter's end
        return status
    except SystemExit as end:  # argparse: 0 after --help and --version, 2 after a usage error
        return end.code if isinstance(end.code, int) else ExitStatus.FAILURE
    except UserError as error:
        for line in str(error).splitlines():
            print(f"megatron-muon: error: {line}", file=sys.stderr)
        return ExitStatus.USAGE
    except ModuleNotFoundError as error:
        if not missing_extra(error):
            raise
        print(f"megatron-muon: error: {missing_extra(error)}", file=sys.stderr)
        return ExitStatus.USAGE
    except RunFailedError as error:
        print(f"megatron-muon: {error}", file=sys.stderr)
        return ExitStatus.FAILURE
    except KeyboardInterrupt:
        print("megatron-muon: interrupted", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:  # `megatron-muon ... | head`: whoever read has read enough
        _discard_output()
        return ExitStatus.FAILURE
    except (OSError, UnicodeError) as error:  # a file or a device that commands do not know, a name that is not text
        print(f"megatron-muon: error: {unforeseen(error)}", file=sys.stderr)
        if isinstance(error, OSError) and error.filename is None:  # a full device
            _discard_output()
        return ExitStatus.USAGE


def _discard_output() -> None:
    """Let what is left in stdout's buffer go nowhere, as the interpreter writes it out at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ShowVersions(argparse.Action):
    """Shows what matters in a bug report, one a line: versions, system, driver. Imports none of the packages."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        found = {"megatron-muon": __version__}
        for package in ("megatron-core", "torch", "emerging-optimizers", "transformer-engine"):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                if package != "transformer-engine":  # optional: its absence is nothing to report
                    found[package] = "not installed"
        found |= {"python": platform.python_version(), "system": platform.platform()}
        with contextlib.suppress(OSError):
            driver = Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0]
            found["gpu driver"] = driver.removeprefix("NVRM version:").strip()
        for name, version in found.items():
            print(f"{name:<20} {version}")
        parser.exit(ExitStatus.OK)


def _build_parser(arguments: list[str]) -> tuple[CommandParser, dict[str, ModuleType]]:
    """Returns the parser, and the module of the subcommand that `arguments` names, if any."""
    parser = CommandParser(
        prog="megatron-muon",
        usage="megatron-muon [-h] [--version] COMMAND ...",
        description="Muon for Megatron-LM under Megatron-FSDP: tools around training.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action=_ShowVersions, nargs=0, help="show the versions that matter and exit")
    groups, width = [], max(map(len, COMMANDS)) + 2
    for group in (EXPERIMENTS, USE, MEASURE, PREPARE):
        groups += [
            f"{group}:",
            *(f"  {name:<{width}}{of.summary}" for name, of in COMMANDS.items() if of.group == group),
        ]
    subparsers = parser.add_subparsers(
        prog="megatron-muon",
        title="commands",
        description="\n".join(groups),
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
