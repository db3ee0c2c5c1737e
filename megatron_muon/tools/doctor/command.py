"""`megatron-muon doctor`: what of the environment, a checkpoint keeps a run from starting.

Every finding is `ok`, `note` (works, and worth knowing) or `wrong`; the exit status is 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.gpu import unusable_gpu
from megatron_muon.tools.doctor import NOTE, OK, WRONG, Finding
from megatron_muon.tools.parser import write_json

EXAMPLES = """\
examples:
  megatron-muon doctor
  megatron-muon doctor --checkpoint runs/quickstart
  megatron-muon doctor --checkpoint runs/quickstart/checkpoints/iter_0000100 --json report.json
"""

_COLOURS = {OK: "green", NOTE: "yellow", WRONG: "red"}
_TORCH = (2, 11)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon doctor`."""
    parser.description = "Check this environment; with --checkpoint, whether a checkpoint can be loaded and by whom."
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR",
        help="a run's folder or its --save directory, for the checkpoint that it calls the latest, or one of the iter_ "
        "folders")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the findings to FILE")


def run(args: argparse.Namespace) -> int:
    """Prints what was found; 1 where something is wrong."""
    findings = list(environment())
    if args.checkpoint is not None:
        from megatron_muon.tools.doctor.checkpoint import checkpoint

        findings += checkpoint(args.checkpoint)
    _show(findings)
    write_json(args.json, [dataclasses.asdict(finding) for finding in findings])
    return int(any(finding.state == WRONG for finding in findings))


def environment() -> Iterator[Finding]:
    """Versions, packages, devices, collectives and variables."""
    from megatron_muon.megatron.version import check_versions

    try:
        check_versions()
        core = metadata.version("megatron-core")
        yield Finding("versions", OK, f"Python {platform.python_version()}, megatron-core {core}")
    except UserError as error:
        yield Finding("versions", WRONG, str(error))
        return
    for package, why in (("emerging_optimizers", "Muon's coefficients"), ("einops", "Megatron-FSDP needs it")):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            yield Finding(name, WRONG, f"not installed ({why}); type: pip install {name}")
    with quiet_imports():
        import torch
    is_new = Version(torch.__version__).release >= _TORCH
    yield Finding("torch", OK if is_new else WRONG, torch.__version__ + ("" if is_new else "; 2.11 is needed"))
    yield _device(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield Finding(
            "CUDA_DEVICE_MAX_CONNECTIONS", WRONG, "1 keeps Megatron-FSDP from overlapping; type: unset it in this shell"
        )
    yield _collectives()


def _device(gpus: int) -> Finding:
    if gpus:
        te = importlib.util.find_spec("transformer_engine") is not None
        text = f"{gpus} GPU{'s' * (gpus != 1)}, Transformer Engine {'installed' if te else 'not installed'}"
        return Finding("device", OK, text)
    if (why := unusable_gpu()) is not None:
        return Finding("device", WRONG, f"a GPU that torch cannot use: {why}; mend that, or train with --device cpu")
    from megatron_muon.megatron.flags.arguments import cpu_has_bf16

    bf16 = "" if cpu_has_bf16() else "; it has no bf16 arithmetic, so Newton-Schulz runs in fp32"
    return Finding("device", NOTE, f"no GPU: training runs on the CPU, over gloo{bf16}")


def _collectives() -> Finding:
    """Whether this machine lets processes of a group find each other."""
    import torch
    import torch.distributed as dist

    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
    except (OSError, RuntimeError) as error:
        remedy = "set GLOO_SOCKET_IFNAME to an interface of this machine, as lo"
        return Finding("gloo", WRONG, f"{str(error).splitlines()[0]}; {remedy}")
    return Finding("gloo", OK, "a process group of one works")


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold")
    table = Table(*columns, box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(Text(finding.state, style=_COLOURS[finding.state]), finding.about, Text(finding.text))
    Console().print(table)
