"""What the checks of `megatron-muon doctor --gpu` share, and those of the machine and of its arithmetic."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch.utils.benchmark import Timer

from megatron_muon.core import newton_schulz as ns
from megatron_muon.core.cost import DENSE, FULL_PRECISION_SETS, GRAM, KERNEL, MOST, PROVEN_STEPS, STANDARD, Iteration
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.ranks import of_all_ranks
from megatron_muon.core.slices import BlockKind
from megatron_muon.megatron.gpu import bf16_tflops, no_transformer_engine
from megatron_muon.tools.doctor import SKIPPED


@dataclass
class Context:
    """Where a check runs, and what it found, the figures by what they are of. On the CPU sizes are small."""

    device: torch.device
    folder: Path  # the same on all ranks
    rank: int = 0
    ranks: int = 1  # processes that run the check together
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one."""
        return self.device.type == "cuda"

    def hold(self, holds: object, text: str) -> None:
        """Note `text` as wrong unless something holds."""
        if not holds:
            self.wrong.append(text)

    def near(self, what: str, error: float, limit: float) -> None:
        """Note as wrong an error that is not below its limit, such as NaN."""
        self.hold(error < limit, f"{what}: error {error:.3g}; less than {limit:g} is usual")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Around a part of a check that may fail without the others, unless other ranks are left waiting in it."""
        self.keep(now=what)
        try:
            yield
        except Exception as failure:
            self.wrong.append(f"{what}: {type(failure).__name__}: {failure}")
            if self.ranks > 1:
                raise

    def keep(self, now: str = "") -> None:
        """Leave what was found so far, for the case that the check does not end, and what is being done."""
        content = json.dumps({"figures": self.figures, "wrong": self.wrong, "now": now}, default=str)
        file = self.folder / f"figures.{self.rank}.json"
        file.with_suffix(".new").write_text(content, "utf-8")
        file.with_suffix(".new").replace(file)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.get_device_module(self.device).synchronize()

    def seconds(self, call: Callable[[], object], number: int = 5) -> float:
        """The mean time of so many calls, one after the other, with the device's work; two before do not count."""
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return timer.timeit(number).mean


class Check(NamedTuple):
    """A check, what it proves, what to do where it fails, and how many times as long as usual it may take.

    What is said of its figures in a report is the first paragraph of its docstring.
    """

    run: Callable[[Context], None]
    proves: str
    remedy: str
    limit: int = 1


def _output(command: str) -> list[str]:
    """The lines that a command prints, without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", subprocess.getoutput(command)).splitlines()


_QUERY = "name,driver_version,memory.total,memory.free,clocks.sm,clocks.max.sm,power.limit"
_PRECISIONS = {"bf16": (torch.bfloat16, "highest"), "tf32": (torch.float32, "high"), "fp32": (torch.float32, "highest")}


def machine(context: Context) -> None:
    """What the device is, what of it this package uses, and the rates that it reaches on large products and copies.

    A copy's rate counts what it reads and what it writes.
    """
    why = no_transformer_engine()
    found = context.figures
    found |= {
        "ranks": context.ranks,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "layers": f"local ones, as Transformer Engine {why}" if why else "Transformer Engine's",
        "processor cores": os.cpu_count(),
    }
    size = 512
    if not context.on_gpu:
        found["driver, NCCL, Triton, topology"] = SKIPPED
    else:
        size = 8192
        kernel = ns.products_on(context.device, torch.bfloat16) is KERNEL
        least = "it wants compute capability 9 or 10, Triton 3.4 and bf16"
        found |= {
            "GPU": torch.cuda.get_device_name(),
            f"GPUs: {_QUERY}": _output(f"nvidia-smi --query-gpu={_QUERY} --format=csv,noheader"),
            "topology": _output("nvidia-smi topo -m"),
            "memory_gb": torch.cuda.mem_get_info()[1] / 1e9,
            "Triton": metadata.version("triton") if importlib.util.find_spec("triton") else "none",
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "symmetric products": f"by a kernel, from {KERNEL.from_rows} rows" if kernel else f"dense, as {least}",
        }
    for name, (dtype, precision) in _PRECISIONS.items():
        torch.set_float32_matmul_precision(precision)
        a, b = torch.randn(2, size, size, device=context.device).to(dtype).unbind()
        seconds = context.seconds(functools.partial(torch.mm, a, b, out=torch.empty_like(a)))
        found[f"{name}_tflops"] = 2 * size**3 / seconds / 1e12
    torch.set_float32_matmul_precision("highest")
    source = torch.empty(size * size * 16, device=context.device)
    target = torch.empty_like(source)
    found["memory_gb_per_s"] = 2 * source.nbytes / context.seconds(lambda: target.copy_(source)) / 1e9
    peak = bf16_tflops(found["GPU"]) if context.on_gpu else None
    reached, copied = found["bf16_tflops"], found["memory_gb_per_s"]
    context.hold(reached > 0.4 * (peak or 0.0), f"products reach {reached:.3g} TFLOP/s in bf16, the data sheet {peak}")
    context.hold(copied > (100.0 if context.on_gpu else 0.5), f"copies reach {copied:.3g} GB/s: is the device busy?")
    one = torch.zeros(1, device=context.device)
    found["launch_us"] = context.seconds(lambda: one.add_(1.0), 10_000) * 1e6
    if context.ranks > 1:
        part = source.numel() // context.ranks * context.ranks
        seconds = context.seconds(lambda: dist.all_to_all_single(target[:part], source[:part]))
        found["all_to_all_gb_per_s"] = source[:part].nbytes * (1 - 1 / context.ranks) / seconds / 1e9
        found["nodes"] = len(set(of_all_ranks(os.environ.get("GROUP_RANK", "0"))))


ALWAYS = replace(KERNEL, from_rows=0)  # the symmetric kernel for blocks of any size
CHECKED = (((2048, 4096), 4), ((333, 777), 4))
TIMED = (((256, 512), 64), ((1024, 4096), 8), ((4096, 4096), 2), ((4096, 14336), 2), ((8192, 28672), 2))
"""Blocks of small models, of llama3-8b's projections and of llama3-70b's, and how many of them in a stack."""
ERROR = {"medium": 0.03, "high": 5e-3, "highest": 1e-4}  # of a random block, by the precision of products


def arithmetic(context: Context) -> None:
    """Newton-Schulz by every set of coefficients, as a step runs it, compared with the same polynomials in fp64.

    Precision "highest" is true fp32, "high" TF32 (fp32 on a CPU), "medium" bf16; "standard" and "gram" are two ways to
    the same polynomial. The error is |result - fp64| / |fp64|: of a random block less than 1e-4 in "highest", 0.005 in
    "high", 0.03 in "medium". Where one direction dominates, rounding loses what is small beside it, and 0.1 to 0.3 is
    usual in bf16. No singular value may exceed 1.3. Only "quintic" is timed, in ms for a stack; TFLOP/s counts the
    operations of dense products, and the first two calls include compilation.
    """
    checked, timed = (CHECKED, TIMED) if context.on_gpu else ((((64, 96), 2), ((33, 77), 2)), ())
    if ns.products_on(context.device, torch.bfloat16) is not KERNEL:
        context.figures["symmetric kernel"] = SKIPPED if not context.on_gpu else "skipped: not for this GPU"
    quintic = itertools.product(timed, ("quintic",))
    for (shape, count), name in itertools.chain(itertools.product(checked, PROVEN_STEPS), quintic):
        with context.trying(f"{count} of {shape[0]} x {shape[1]}, {name}"):
            _blocks(context, count, shape, name)


def _blocks(context: Context, count: int, shape: tuple[int, int], name: str) -> None:
    """Largest singular value, distance from fp64, time and rate of a stack of random blocks."""
    has_kernel = ns.products_on(context.device, torch.bfloat16) is KERNEL and not shape[0] % KERNEL.multiple_of
    steps = max(5, len(muon_utils._COEFFICIENT_SETS[name]))
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0)).to(context.device)
    x[-1] += 100.0 * torch.outer(x[0, :, 0], x[0, 0])
    x /= x.abs().amax(dim=(1, 2), keepdim=True)
    exact = x.double() / x.double().norm(dim=(1, 2), keepdim=True)
    for a, b, c in ns.coefficients(name, steps):
        square = exact @ exact.mT
        exact = a * exact + (b * square + c * square @ square) @ exact
    for precision, products, method in itertools.product(ERROR, (DENSE, ALWAYS), (STANDARD, GRAM)):
        iteration = Iteration(name, steps, precision, method, products)
        proven = iteration.gram_is_proven if method == GRAM else True
        proven &= precision == "highest" or name not in FULL_PRECISION_SETS
        is_short = precision != "highest" or shape[0] <= 2048
        if not (proven and is_short and (products is DENSE or (has_kernel and iteration.half))):
            continue
        given = x.to(torch.bfloat16 if iteration.half else torch.float32)
        call = functools.partial(orthogonalized, given, iteration)
        begun = time.perf_counter()
        made, again = call(), call()
        context.synchronize()
        first_s = time.perf_counter() - begun
        label = f"{count} of {shape[0]} x {shape[1]}, {name}, {precision}, {method}"
        label += ", kernel" if products is ALWAYS else ", dense"
        largest = _largest(made.double())
        *errors, dominated = ((made.double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).tolist()
        found = {"largest singular value": largest, "error": max(errors), "error, one direction dominates": dominated}
        if name == "quintic":
            seconds = context.seconds(call)
            rate = count * iteration.flops(*shape) / seconds / 1e12
            found |= {"first two, ms": first_s * 1e3, "ms": seconds * 1e3, "TFLOP/s": rate}
        context.hold(largest <= MOST, f"{label}: largest singular value {largest:.3f}")
        context.hold(torch.equal(made, again), f"{label}: other bits the second time")
        context.near(label, max(errors), ERROR[precision])
        context.figures[label] = found


def _largest(x: torch.Tensor) -> float:
    """The largest singular value of matrices, from below, by powers of X X^T: LAPACK takes seconds for each."""
    gram = x @ x.mT
    direction = torch.ones(*gram.shape[:-1], 1, dtype=gram.dtype, device=gram.device)
    for _ in range(60):
        direction = gram @ direction
        direction /= direction.norm(dim=1, keepdim=True)
    return float((gram @ direction).norm(dim=1).max().sqrt())


def orthogonalized(x: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    """What a step makes of a stack `(blocks, rows, cols)`, unscaled, with the products that `iteration` has."""
    kernel = iteration.products if iteration.products is ALWAYS else KERNEL
    with mock.patch.object(ns, "products_on", return_value=iteration.products), mock.patch.object(ns, "KERNEL", kernel):
        of = Orthogonalizer(iteration, scale_mode="unit_rms_norm", device=x.device)
        stack = x.clone()
        of.orthogonalize_stack(stack, BlockKind(x.shape[1], x.shape[2], 1.0, 0, (), x.shape[2]))
        return stack
