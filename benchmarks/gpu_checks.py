"""The checks of `benchmarks.gpu` on the device and its arithmetic; `gpu_steps.py` and `gpu_runs.py` have the others.

Each gives figures and notes what is wrong.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from megatron_muon.core import newton_schulz as ns
from megatron_muon.core.cost import DENSE, GRAM, KERNEL, STANDARD, Iteration
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.slices import BlockKind

Figures = dict[str, Any]


@dataclass
class Context:
    """Where a check runs, and what it found wrong."""

    device: torch.device
    folder: Path
    wrong: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one."""
        return self.device.type == "cuda"

    def hold(self, holds: object, text: str) -> None:
        """Note `text` as wrong unless something holds."""
        if not holds:
            self.wrong.append(text)

    def keep(self, figures: Figures) -> None:
        """Leave what was found so far, for the case that the check does not end."""
        (self.folder / "figures.json").write_text(json.dumps({**figures, "wrong": self.wrong}, default=str), "utf-8")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], repeat: int = 5) -> float:
        """The median time of a call, the device's work included, after one call that does not count."""
        times = []
        for _ in range(repeat + 1):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


class Check(NamedTuple):
    """A check, and whether it makes no sense without a GPU."""

    run: Callable[[Context], Figures]
    needs_gpu: bool = False


def machine(context: Context) -> Figures:
    """What the device is, and the rates that it reaches on large products and copies."""
    found: Figures = {"torch": torch.__version__, "device": "cpu"}
    size = 256
    if context.on_gpu:
        import triton

        size = 8192
        query = (
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit",
            "--format=csv,noheader",
        )
        found |= {
            "device": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
            "triton": triton.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        }
    found["products"] = {str(d): "kernel" if ns.products_on(context.device, d) is KERNEL else "other"
                         for d in (torch.bfloat16, torch.float32)}  # fmt: skip
    precisions = {
        "bf16": (torch.bfloat16, "highest"),
        "tf32": (torch.float32, "high"),
        "fp32": (torch.float32, "highest"),
    }
    for name, (dtype, precision) in precisions.items():
        torch.set_float32_matmul_precision(precision)
        a, b = torch.randn(2, size, size, device=context.device).to(dtype).unbind()
        out = torch.empty_like(a)
        seconds = context.seconds(functools.partial(torch.mm, a, b, out=out))
        found[f"{name}_tflops"] = 2 * size**3 / seconds / 1e12
    torch.set_float32_matmul_precision("highest")
    source = torch.empty(size * size * 16, device=context.device)
    target = torch.empty_like(source)
    found["copy_gb_per_s"] = 2 * source.nbytes / context.seconds(lambda: target.copy_(source)) / 1e9
    one = torch.zeros(1, device=context.device)
    found["launch_us"] = context.seconds(lambda: [one.add_(1.0) for _ in range(2000)]) / 2000 * 1e6
    return found


ALWAYS = replace(KERNEL, from_rows=0)
"""The symmetric kernel for blocks of any size."""
SETS = {"simple": 5, "quintic": 5, "polar_express": 8, "deepseekv4": 10}
LARGE = ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
"""Blocks that the symmetric kernel takes, of the shipped models' projections."""
BLOCKS = (((256, 512), 64), ((512, 2048), 32), ((1024, 4096), 8), ((2048, 4096), 4), ((3072, 3072), 2),
          ((3072, 8192), 2), *((shape, 1) for shape in LARGE))  # fmt: skip
ODD = ((333, 777), (2056, 2600), (2048, 2052))


def arithmetic(context: Context) -> Figures:
    """Every set of coefficients by both iterations and both kinds of products, against the same polynomials in fp64."""
    figures: Figures = {"errors": {}, "speed": {}}
    shapes = ((2048, 4096), *ODD) if context.on_gpu else ((64, 96), (33, 77))
    for shape, (name, steps) in itertools.product(shapes, SETS.items()):
        if name == "quintic" or shape in shapes[:2]:
            figures["errors"] |= _errors(context, shape, name, steps)
    for shape, count in BLOCKS if context.on_gpu else (((64, 96), 2),):
        figures["speed"] |= _speeds(context, shape, count)
    return figures


def _errors(context: Context, shape: tuple[int, int], name: str, steps: int) -> Figures:
    """Largest singular value and distance from fp64 of a random block, and of one in which a direction dominates."""
    found: Figures = {}
    coefficients = ns.coefficients(name, steps)
    generator = torch.Generator(context.device).manual_seed(0)
    x = torch.randn(2, *shape, device=context.device, generator=generator)
    x[1] += 100.0 * torch.outer(x[0, :, 0], x[0, 0])
    x /= x.abs().amax(dim=(1, 2), keepdim=True)
    exact = x.double() / x.double().norm(dim=(1, 2), keepdim=True)
    for a, b, c in coefficients:
        square = exact @ exact.mT
        exact = a * exact + (b * square + c * square @ square) @ exact
    for precision, products in (("medium", ALWAYS), ("medium", DENSE), ("high", DENSE)):
        if products is ALWAYS and (not context.on_gpu or shape[0] % 8):
            continue
        iteration = Iteration(name, steps, precision)
        for method in (STANDARD, GRAM) if iteration.gram_is_proven else (STANDARD,):
            made = _orthogonalize(context, x.clone(), replace(iteration, method=method), products)
            again = _orthogonalize(context, x.clone(), replace(iteration, method=method), products)
            label = f"{name} {shape[0]}x{shape[1]} {precision} {method} {'kernel' if products is ALWAYS else 'dense'}"
            largest = torch.linalg.eigvalsh(made.double() @ made.double().mT)[:, -1].sqrt().max().item()
            error = ((made.double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).tolist()
            found[label] = [round(largest, 4), *(float(f"{one:.3g}") for one in error)]
            context.hold(largest <= 1.3, f"{label}: largest singular value {largest:.3f}")
            context.hold(torch.equal(made, again), f"{label}: other bits the second time")
            context.hold(error[0] < (0.05 if precision == "medium" else 0.02), f"{label}: errors {error}")
    return found


def _orthogonalize(context: Context, x: torch.Tensor, iteration: Iteration, products: Any) -> torch.Tensor:
    """What a step makes of a stack, unscaled."""
    of = Orthogonalizer(replace(iteration), scale_mode="unit_rms_norm", device=context.device)
    kind = BlockKind(x.shape[1], x.shape[2], 1.0, 0, (), x.shape[2])
    stack = x.to(of.dtype)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ns, "products_on", return_value=products))
        if products is ALWAYS:
            patches.enter_context(mock.patch.object(ns, "KERNEL", ALWAYS))
        of.iteration = replace(of.iteration, products=products)
        of.orthogonalize_stack(stack, kind, work=None)
    return stack


def _speeds(context: Context, shape: tuple[int, int], count: int) -> Figures:
    """Milliseconds, and TFLOP/s by the operations counted, of the iteration on a stack of so many blocks."""
    found: Figures = {}
    base = torch.randn(count, *shape, device=context.device)
    takes_kernel = context.on_gpu and min(shape) >= 1024
    for precision, products in (("medium", ALWAYS), ("medium", DENSE), ("high", DENSE)):
        if products is not DENSE and not takes_kernel:
            continue
        for method in (STANDARD, GRAM):
            iteration = Iteration("quintic", 5, precision, method, products)
            x = base.to(torch.bfloat16 if precision == "medium" else torch.float32)

            def several(x: torch.Tensor = x, iteration: Iteration = iteration, products: Any = products) -> None:
                for _ in range(4):  # one after the other, as in a step: the host is ahead
                    _orthogonalize(context, x, iteration, products)

            seconds = context.seconds(several, 3) / 4
            flops = count * iteration.flops(*shape)
            chosen = replace(iteration, method="auto").method_for(*shape) == method
            kind = "dense" if products is DENSE else "kernel"
            label = f"{count} x {shape[0]}x{shape[1]} {precision} {method} {kind}"
            figures = [float(f"{one:.4g}") for one in (seconds * 1e3, flops / seconds / 1e12)]
            found[label] = [*figures, "chosen" * chosen]
    return found


TILES = [
    ns.Tiles(rows, cols, 64, 8, warps, stages)
    for rows, cols in ((64, 128), (128, 128), (128, 256))
    for warps in (4, 8)
    for stages in (3, 4)
]


def kernel(context: Context) -> Figures:
    """Microseconds of X X^T by the symmetric kernel in several configurations, and by a dense product."""
    found: Figures = {}
    for shape in ((2048, 4096), (3072, 8192), *LARGE):
        a = torch.randn(shape, device=context.device).to(torch.bfloat16)
        out = torch.empty(shape[0], shape[0], dtype=torch.bfloat16, device=context.device)
        calls: dict[str, Callable[[], object]] = {"dense": functools.partial(torch.mm, a, a.mT, out=out)}
        for tiles in TILES:
            calls[str(tuple(tiles))] = functools.partial(_with_tiles, tiles, a, out)
        for name, call in calls.items():

            def several(call: Callable[[], object] = call) -> None:
                for _ in range(10):
                    call()

            found[f"{shape[0]}x{shape[1]} {name}"] = round(context.seconds(several, 3) / 10 * 1e6, 1)
        context.keep(found)
    return found


def _with_tiles(tiles: ns.Tiles, a: torch.Tensor, out: torch.Tensor) -> None:
    with mock.patch.multiple(ns, SQUARE=tiles, WIDE=tiles):
        ns.symmetric_kernel(a, None, out)
