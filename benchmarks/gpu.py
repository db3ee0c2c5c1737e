"""What a GPU has to say about the kernels: right, the same twice, and how fast.

    python -m benchmarks.gpu --json report.json
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu     interpreted, small: a rehearsal

1. Ten steps of each variant, odd shapes, by kernels and by torch operations: largest difference of
   weights, as a share of how far they moved. 2. The same steps again while other streams keep the
   GPU busy: any other bit is an error. 3. Milliseconds of a step, and the host's part of them:
   matrices of four layers of llama3-8b, 64 of 256 x 512, 16 experts of 256 x 512, beside
   torch.optim.Muon and fused AdamW.

Exit status 1 if 1 or 2 find something.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import megatron_muon
from benchmarks import command
from megatron_muon.core import launches
from megatron_muon.errors import ExitStatus
from megatron_muon.metrics import synchronize
from megatron_muon.tools.parser import CommandParser

if TYPE_CHECKING:
    from rich.table import Table

type Shapes = Sequence[tuple[int, ...]]

ODD: Shapes = [(33, 70), (70, 20), (130, 33), (257, 513), (1024, 384), (64, 64), (5, 40, 96)]
LAYER: Shapes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
TIMED: dict[str, Shapes] = {
    "4 layers of llama3-8b": [*LAYER] * 4,
    "64 of 256 x 512": [(256, 512)] * 64,
    "16 experts of 256 x 512": [(16, 256, 512)],
}
SMALL: dict[str, Shapes] = {"4 of 32 x 64": [(32, 64)] * 4, "3 experts of 16 x 64": [(3, 16, 64)]}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 iteration": {"fp32_matmul_prec": "medium"},
    "no look-ahead": {"nesterov": False},
    "cautious": {"cautious_weight_decay": True},
    "AdaMuon": {"moment2_method": "adamuon"},
    "NorMuon": {"moment2_method": "normuon"},
    "hyperball": {"hyperball": True, "weight_decay": 0.0},
    "bf16 momentum": {"momentum_dtype": "bf16"},
    "int8 momentum": {"momentum_dtype": "int8"},
}
LIMITS = {
    "bf16 iteration": 0.03,
    "cautious": 5e-3,
    "AdaMuon": 5e-3,
    "bf16 momentum": 0.05,
    "int8 momentum": 0.1,
}
USUAL_LIMIT = 1e-4

TIMED_VARIANTS: dict[str, dict[str, Any]] = {
    "Muon": {},
    "torch operations": {},
    "cuda_graph=True": {"cuda_graph": True},
    "NorMuon": {"moment2_method": "normuon"},
    "AdaMuon": {"moment2_method": "adamuon"},
    "int8 momentum": {"momentum_dtype": "int8"},
}


def parameters(
    shapes: Shapes, device: torch.device, dtype: torch.dtype
) -> list[torch.nn.Parameter]:
    """Parameters of these shapes, the same each time."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator) for shape in shapes)
    return [torch.nn.Parameter(one.to(device, dtype)) for one in made]


def muon(given: Sequence[torch.nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    """Our optimizer of all of these, 3D ones stacks of matrices."""
    named = [(f"w{number}", p) for number, p in enumerate(given)]
    stacks = [name for name, p in named if p.ndim == 3]
    return megatron_muon.Muon(named, matrices=["*"], stacks=stacks, **({"lr": 0.02} | settings))


@contextlib.contextmanager
def kernels(on: bool) -> Iterator[None]:
    """With kernels, or torch operations in their place."""
    with mock.patch.object(launches, "has_kernels", return_value=on):
        yield


def stepped(
    settings: Mapping[str, Any], device: torch.device, *, fused: bool, busy: bool = False
) -> list[torch.Tensor]:
    """How far weights moved in ten steps; with `busy` while other streams work."""
    given = parameters(ODD, device, torch.float32)
    before = [p.detach().clone() for p in given]
    noise = torch.Generator().manual_seed(1)
    with kernels(fused):
        optimizer = muon(given, **{"fp32_matmul_prec": "highest", **settings})
        for step in range(10 if device.type == "cuda" else 2):
            for p in given:
                p.grad = torch.randn(p.shape, generator=noise).to(device)
            if busy:
                keep_busy(device, step)
            optimizer.step()
    return [(p.detach() - old).cpu() for p, old in zip(given, before, strict=True)]


def keep_busy(device: torch.device, seed: int) -> None:
    """Start work of other lengths on two other streams."""
    if device.type != "cuda":
        return
    for number in range(2):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            side = 512 * (1 + (seed + number) % 4)
            product = torch.randn(side, side, device=device)
            for _ in range(8):
                product = product @ product


def compare(device: torch.device) -> dict[str, dict[str, Any]]:
    """Differences of each variant, and what is wrong."""
    found = {}
    for name, settings in VARIANTS.items():
        expected = stepped(settings, device, fused=False)
        moved = stepped(settings, device, fused=True)
        again = stepped(settings, device, fused=True, busy=True)
        pairs = list(zip(moved, expected, strict=True))
        share = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        same = all(torch.equal(a, b) for a, b in zip(moved, again, strict=True))
        limit = LIMITS.get(name, USUAL_LIMIT)
        found[name] = {"difference": share, "limit": limit, "same bits": same}
        print(f"{name}: {share:.2g} (limit {limit:g}), same bits twice: {same}", flush=True)
    return found


def contenders(shapes: Shapes, device: torch.device) -> dict[str, Callable[..., Any]]:
    """Makers of optimizers to time, by name."""
    made: dict[str, Callable[..., Any]] = {}
    for name, settings in TIMED_VARIANTS.items():
        if not settings.get("cuda_graph") or device.type == "cuda":
            made[name] = lambda given, settings=settings: muon(given, **settings)
    if all(len(shape) == 2 for shape in shapes):
        made["torch.optim.Muon"] = lambda given: torch.optim.Muon(given, lr=0.02)
    is_fused = device.type == "cuda"
    made["torch.optim.AdamW"] = lambda given: torch.optim.AdamW(given, lr=1e-3, fused=is_fused)
    return made


def timed(name: str, make: Any, shapes: Shapes, device: torch.device, repeat: int) -> list[float]:
    """Median milliseconds of a step, and of the host's part."""
    given = parameters(shapes, device, torch.float32)
    for p in given:
        p.grad = torch.randn_like(p)
    whole, host = [], []
    with kernels(name != "torch operations"):
        optimizer = make(given)
        for number in range(repeat + 3):
            synchronize(device)
            start = time.perf_counter()
            optimizer.step()
            enqueued = time.perf_counter()
            synchronize(device)
            if number >= 3:
                whole.append(1e3 * (time.perf_counter() - start))
                host.append(1e3 * (enqueued - start))
    return [statistics.median(whole), statistics.median(host)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All findings."""
    device = torch.device(args.device)
    results: dict[str, Any] = {"torch": torch.__version__, "device": args.device}
    if device.type == "cuda":
        results["device"] = torch.cuda.get_device_name()
    results["variants"] = compare(device)
    times: dict[str, dict[str, list[float]]] = {}
    for size, shapes in (TIMED if device.type == "cuda" else SMALL).items():
        for name, make in contenders(shapes, device).items():
            found = timed(name, make, shapes, device, args.repeat)
            times.setdefault(name, {})[size] = found
            print(f"{size}, {name}: {found[0]:.2f} ms, host {found[1]:.2f}", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    results["times"] = times
    return results


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Times by optimizer."""
    sizes = list(results["times"]["Muon"])
    rows = []
    for name, found in results["times"].items():
        cells = [f"{found[s][0]:.2f} ({found[s][1]:.2f})" if s in found else "" for s in sizes]
        rows.append([name, *cells])
    title = f"ms a step, in brackets the host's, {results['device']}, torch {results['torch']}"
    yield command.table(title, ["optimizer", *sizes], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and returns the exit status."""
    wrong: list[str] = []

    def configure(parser: CommandParser) -> None:
        parser.description = __doc__
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        parser.add_argument("--repeat", type=int, default=20)

    def measured(args: argparse.Namespace) -> dict[str, Any]:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if args.device == "cpu" and not interpreted:
            print("without TRITON_INTERPRET=1 a CPU has no kernels", file=sys.stderr)
        results = measure(args)
        for name, found in results["variants"].items():
            if not (found["difference"] < found["limit"] and found["same bits"]):
                wrong.append(name)
        return results

    status = command.main("gpu", configure, measured, tables, argv)
    for name in wrong:
        print(f"wrong: {name}", file=sys.stderr)
    return ExitStatus.FAILURE if wrong else status


if __name__ == "__main__":
    sys.exit(main())
