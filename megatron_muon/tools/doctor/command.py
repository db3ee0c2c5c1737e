"""`megatron-muon doctor`: what of the environment, or of a checkpoint, keeps a run from starting.

Every finding is `ok`, `note` (works, and worth knowing) or `wrong`; the exit status is 1 where
something is wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.run_device import no_transformer_engine, unusable_gpu
from megatron_muon.tools.doctor import gpu
from megatron_muon.tools.parser import positive, write_json

EXAMPLES = """\
examples:
  megatron-muon doctor
  megatron-muon doctor --checkpoint runs/quickstart
  megatron-muon doctor --checkpoint runs/quickstart/checkpoints/iter_0000100 --json report.json

  one GPU, and a report in report.md and report.json:
    megatron-muon doctor --gpu --report report.md
  eight GPUs; on several nodes with torchrun's --nnodes, and TMPDIR a directory that all of them see:
    torchrun --nproc-per-node 8 -m megatron_muon.tools.doctor.gpu --report report.md
  the checks themselves, without a GPU:
    megatron-muon doctor --gpu --device cpu
"""

OK, NOTE, WRONG = "ok", "note", "wrong"
_TORCH = (2, 11)
_LAYOUT = {
    "world_size": "ranks",
    "data_parallel_sharding_strategy": "strategy",
    "tensor_model_parallel_size": "TP",
    "expert_model_parallel_size": "EP",
    "num_distributed_optimizer_instances": "instances",
}


class Finding(NamedTuple):
    """One line of the report: what was looked at, how it is, and the details or the remedy."""

    about: str
    state: str
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-muon doctor`."""
    parser.description = (
        "Check this environment; with --checkpoint, whether a checkpoint can be loaded and by whom;"
        " with --gpu, what this package does on the GPU."
    )
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help=(
            "a run's folder or its --save directory, for the checkpoint that it calls the latest,"
            " or one of the iter_ folders"
        ),
    )
    add("--json", type=Path, metavar="FILE", help="also write the findings to FILE")
    add(
        "--gpu",
        action="store_true",
        help="prove this package on the GPU; under torchrun on several",
    )
    add = parser.add_argument_group("with --gpu").add_argument
    add(
        "--device",
        choices=("cuda", "cpu"),
        help="cpu: small sizes, to try the checks themselves (cuda)",
    )
    add("--only", nargs="+", metavar="CHECK", help="some checks, by name (all)")
    add(
        "--report",
        type=Path,
        metavar="FILE.md",
        help="write all figures to FILE.md, and to FILE.json",
    )
    add(
        "--write-profile",
        type=Path,
        metavar="FILE.yaml",
        help="write measured rates, for plan --hardware FILE.yaml",
    )
    add(
        "--limit",
        type=positive,
        metavar="S",
        help="seconds that a check may take, some several times these (120)",
    )
    add("--verbose", action="store_true", help="keep host names and paths in the report")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 where something is wrong."""
    if args.gpu and (args.checkpoint or args.json):
        raise UserError(
            "--gpu takes neither --checkpoint nor --json; --report FILE.md writes FILE.json, too"
        )
    if args.gpu:
        return gpu.run(args)
    for name in ("device", "only", "report", "write_profile", "limit", "verbose"):
        if getattr(args, name):
            raise UserError(
                f"--{name.replace('_', '-')} goes with --gpu; type megatron-muon doctor --gpu"
            )
    findings = list(environment())
    if args.checkpoint is not None:
        findings += checkpoint(args.checkpoint)
    for about, state, text in findings:
        print(f"{state:<6} {about:<16} {text}")
    write_json(args.json, [finding._asdict() for finding in findings])
    return int(any(finding.state == WRONG for finding in findings))


def environment() -> Iterator[Finding]:
    """Versions, device and collectives."""
    from megatron_muon.megatron.provenance import check_versions

    try:
        check_versions()
    except UserError as error:
        yield Finding("versions", WRONG, str(error))
        return
    core = metadata.version("megatron-core")
    yield Finding("versions", OK, f"Python {platform.python_version()}, megatron-core {core}")
    with quiet_imports():
        import torch
    is_new = Version(torch.__version__).release >= _TORCH
    yield Finding(
        "torch", OK if is_new else WRONG, torch.__version__ + ("" if is_new else "; 2.11 is needed")
    )
    yield _device(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    yield _collectives()


def _device(gpus: int) -> Finding:
    if gpus:
        te = no_transformer_engine()
        return Finding("device", OK, f"GPUs: {gpus}, Transformer Engine {te or 'can be used'}")
    if (why := unusable_gpu()) is not None:
        return Finding(
            "device",
            WRONG,
            f"a GPU that torch cannot use: {why}; mend that, or train with --device cpu",
        )
    from megatron_muon.megatron.flags.command_line import cpu_has_bf16

    bf16 = "" if cpu_has_bf16() else "; it has no bf16 arithmetic, so Newton-Schulz runs in fp32"
    return Finding("device", NOTE, f"no GPU: training runs on the CPU, over gloo{bf16}")


def _collectives() -> Finding:
    import torch
    import torch.distributed as dist

    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
    except (OSError, RuntimeError) as error:
        remedy = "set GLOO_SOCKET_IFNAME to an interface of this machine, as lo"
        return Finding("gloo", WRONG, f"{str(error).splitlines()[0]}; {remedy}")
    return Finding("gloo", OK, "a process group of one works")


def checkpoint(directory: Path) -> Iterator[Finding]:
    """Whether a checkpoint is complete, and else which one to take instead; what wrote it, and what it holds."""
    with quiet_imports():
        import megatron.core  # noqa: F401  # tells torch which of its classes a checkpoint may hold

        from megatron_muon.checkpoint import content

    folder = folders.find(directory)
    try:
        if wrong := folders.problems(folder, threads=min(8, os.cpu_count() or 1)):
            raise UserError("\n".join(wrong))
        entries = content.read_entries(folder)
        stored = content.read(folder, content.objects(entries))
    except Exception as error:  # damaged bytes raise whatever they happen to mean
        hint = folders.resume_hint(folder.parent, but=folders.iteration_of(folder))
        for problem in (*str(error).splitlines(), hint):
            yield Finding("checkpoint", WRONG, problem)
        return
    yield Finding("checkpoint", OK, f"{folder} is complete, iteration {stored.get('iteration')}")
    args = stored.get("args")
    layout = ", ".join(
        f"{name} {getattr(args, key)}" for key, name in _LAYOUT.items() if hasattr(args, key)
    )
    yield Finding("written by", OK if layout else NOTE, layout or "unknown: it holds no arguments")
    if folders.read_checksums(folder) is None:
        yield Finding("checksums", NOTE, folders.without_checksums(folder))
    slots = {content.plain(name): held for name, held in content.optimizer_slots(entries).items()}
    weights = {content.plain(name.removeprefix("model.")) for name in content.weight_names(entries)}
    yield Finding("weights", OK if weights else WRONG, f"{len(weights)} tensors")
    optimizers = Counter(map(content.optimizer_of, slots.values()))
    counts = ", ".join(f"{name} has {count}" for name, count in sorted(optimizers.items()))
    without = "none: load it with --no-load-optim"
    yield Finding(
        "optimizer state", OK if counts else NOTE, f"of these, {counts}" if counts else without
    )
    known = {content.plain(name) for name in content.optimized(entries)}
    missing = {
        weight for weight in weights - slots.keys() if content.whole_name(weight, known) in known
    }
    # Adam's state without the second moment is that of Lion.
    missing |= {
        name
        for name, held in slots.items()
        if content.optimizer_of(held) == "lion" and "adam" in optimizers
    }
    if missing:
        remedy = "--muon-allow-missing-state starts it at zero"
        yield Finding("missing state", WRONG, f"{len(missing)}: {content.some(missing)}; {remedy}")
