"""`megatron-muon doctor`: checks this environment or a checkpoint, and with `--gpu` the GPU.

Every finding is `ok`, `note` (works, and worth knowing) or `wrong`; the exit status is 1 if
something is wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.run_device import no_transformer_engine, unusable_gpu
from megatron_muon.tools.doctor import gpu_report
from megatron_muon.tools.parser import write_json

EXAMPLES = """\
examples:
  megatron-muon doctor --checkpoint runs/quickstart
  megatron-muon doctor --checkpoint runs/quickstart/checkpoints/iter_0000100 --json report.json

  one GPU:
    megatron-muon doctor --gpu --json report.json
  eight GPUs; on several nodes add torchrun's --nnodes, and set TMPDIR to a shared directory:
    torchrun --nproc-per-node 8 -m megatron_muon.cli doctor --gpu --json report.json
"""

OK, NOTE, WRONG = "ok", "note", "wrong"
_LAYOUT = {
    "world_size": "ranks",
    "data_parallel_sharding_strategy": "strategy",
    "tensor_model_parallel_size": "TP",
    "expert_model_parallel_size": "EP",
    "num_distributed_optimizer_instances": "instances",
}


class Finding(NamedTuple):
    """One line of the report: the subject, its state, and details or the remedy."""

    about: str
    state: str
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon doctor`."""
    parser.description = (
        "Checks this environment; with --checkpoint, that a checkpoint can be loaded; with --gpu,"
        " this package on the GPU."
    )
    parser.epilog = EXAMPLES
    subject = parser.add_mutually_exclusive_group().add_argument
    subject(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="run folder, --save directory or iter_ folder",
    )
    subject(
        "--gpu",
        action="store_true",
        help="check this package on the GPU, or under torchrun on several",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write findings to FILE")
    add = parser.add_argument_group("with --gpu").add_argument
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: try the checks at small sizes (default: cuda)",
    )
    add("--only", nargs="+", metavar="CHECK", help="names of the checks to run (default: all)")
    add(
        "--write-profile",
        type=Path,
        metavar="FILE.yaml",
        help="write measured rates, for plan --hardware FILE.yaml",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if something is wrong."""
    if args.gpu:
        return gpu_report.run(args)
    findings = list(environment())
    if args.checkpoint is not None:
        findings += checkpoint(args.checkpoint)
    for about, state, text in findings:
        print(f"{state:<6} {about:<16} {text}")
    write_json(args.json, [finding._asdict() for finding in findings])
    return int(any(finding.state == WRONG for finding in findings))


def environment() -> Iterator[Finding]:
    """Versions and device."""
    from megatron_muon.megatron.provenance import check_versions

    try:
        warning = check_versions()
    except UserError as error:
        yield Finding("versions", WRONG, str(error))
        return
    core = metadata.version("megatron-core")
    found = f"Python {platform.python_version()}, megatron-core {core}"
    yield Finding("versions", NOTE if warning else OK, warning or found)
    with quiet_imports():
        import torch
    yield _device(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _device(gpus: int) -> Finding:
    if gpus:
        te = no_transformer_engine() or "can be used"
        return Finding("device", OK, f"GPUs: {gpus}, Transformer Engine {te}")
    why = unusable_gpu()
    if why is not None:
        return Finding(
            "device",
            WRONG,
            f"a GPU that torch cannot use: {why}; fix that, or train with --device cpu",
        )
    from megatron_muon.megatron.flags.command_line import cpu_has_bf16

    bf16 = "" if cpu_has_bf16() else "; it lacks bf16 arithmetic, so Newton-Schulz runs in fp32"
    return Finding("device", NOTE, f"no GPU: training runs on the CPU, over gloo{bf16}")


def checkpoint(directory: Path) -> Iterator[Finding]:
    """The state of a checkpoint: complete or which one to use instead, its origin and contents."""
    with quiet_imports():
        from megatron_muon.checkpoint import content, torch_dist
        from megatron_muon.megatron.upstream import core  # noqa: F401  # see its row

    folder = folders.find(directory)
    try:
        threads = min(8, os.cpu_count() or 1)
        if wrong := folders.problems(folder, threads=threads):
            raise UserError("\n".join(wrong))
        entries = content.read_entries(folder)
        is_upstreams = torch_dist.is_torch_dist(folder)
        if is_upstreams:
            stored = torch_dist.read_object(folder, torch_dist.COMMON)
        else:
            stored = content.read(folder, content.objects(entries))
    except Exception as error:  # damaged bytes can raise anything
        hint = folders.resume_hint(folder.parent, but=folders.iteration_of(folder))
        for problem in (*str(error).splitlines(), hint):
            yield Finding("checkpoint", WRONG, problem)
        return
    yield Finding("checkpoint", OK, f"{folder} is complete, iteration {stored.get('iteration')}")
    args = stored.get("args")
    layout = [f"{name} {getattr(args, key)}" for key, name in _LAYOUT.items() if hasattr(args, key)]
    if layout:
        yield Finding("written by", OK, ", ".join(layout))
    else:
        yield Finding("written by", NOTE, "unknown: it holds no arguments")
    if is_upstreams:
        tensors = set(entries).difference(content.objects(entries))
        kinds = Counter(name.startswith("optimizer.") for name in tensors)
        text = f"{kinds[False]} tensors of the model, {kinds[True]} of the optimizer"
        yield Finding("torch_dist", OK, f"{text}; --load continues megatron-core's own Muon")
        return
    if folders.read_checksums(folder) is None:
        yield Finding("checksums", NOTE, folders.without_checksums(folder))
    weights = {content.plain(name.removeprefix("model.")) for name in content.weight_names(entries)}
    yield Finding("weights", OK if weights else WRONG, f"{len(weights)} tensors")
    optimizers = {
        content.plain(name): content.optimizer_of(slots)
        for name, slots in content.optimizer_slots(entries).items()
    }
    counts = sorted(Counter(optimizers.values()).items())
    if counts:
        text = ", ".join(f"{name} has {count}" for name, count in counts)
        yield Finding("optimizer state", OK, f"of these, {text}")
    else:
        yield Finding("optimizer state", NOTE, "none: load it with --no-load-optim")
    known = {content.plain(name) for name in content.optimized(entries)}
    # of a fused projection, whose weights are two halves, a class has one state
    without = {name for name in weights if content.whole_name(name, optimizers) not in optimizers}
    missing = {weight for weight in without if content.whole_name(weight, known) in known}
    if "adam" in optimizers.values():
        # Adam's state without the second moment is that of Lion
        missing |= {name for name, optimizer in optimizers.items() if optimizer == "lion"}
    if missing:
        yield Finding(
            "missing state",
            WRONG,
            f"{len(missing)}: {content.some(missing)}; --muon-allow-missing-state starts it at"
            " zero",
        )
