"""Checks of `megatron-muon doctor --gpu`: the machine, the arithmetic, and training.

`Context` is what all checks share; `step_checks.py` has the checks of optimizer steps and the list
of all checks.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.utils.benchmark import Timer

from megatron_muon.core import newton_schulz as ns
from megatron_muon.core.cost import (
    DENSE,
    FULL_PRECISION_SETS,
    GRAM,
    KERNEL,
    MOST,
    PROVEN_STEPS,
    STANDARD,
    Iteration,
)
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.ranks import of_all_ranks
from megatron_muon.core.slices import BlockKind
from megatron_muon.megatron.run_device import bf16_tflops, no_transformer_engine
from megatron_muon.shipped import QUICKSTART
from megatron_muon.tools.train.processes import environment, pretrain_program
from megatron_muon.tools.train.records import read_events


@dataclass
class Context:
    """The device of a check and its findings; figures by name. On the CPU sizes are small."""

    device: torch.device
    folder: Path  # the same on all ranks
    rank: int = 0
    ranks: int = 1  # processes that run the check together
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)  # names by reason
    wrong: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    def skip(self, *names: str, why: str = "no GPU") -> None:
        """Note parts that cannot run here."""
        if names:
            self.skipped.setdefault(why, []).extend(names)

    def hold(self, holds: object, text: str) -> None:
        """Note `text` as wrong unless `holds`."""
        if not holds:
            self.wrong.append(text)

    def near(self, name: str, error: float, limit: float) -> None:
        """Note as wrong an error that is not below its limit, such as NaN."""
        self.hold(error < limit, f"{name}: error {error:.3g}; less than {limit:g} is usual")

    @contextmanager
    def trying(self, part: str) -> Iterator[None]:
        """Around a part that may fail without the others, unless other ranks wait in it."""
        self.keep(now=part)
        try:
            yield
        except Exception as failure:
            self.wrong.append(f"{part}: {type(failure).__name__}: {failure}")
            if self.ranks > 1:
                raise

    def keep(self, now: str = "") -> None:
        """Write the findings so far and the current part, in case the check does not end."""
        found = {"figures": self.figures, "skipped": self.skipped, "wrong": self.wrong, "now": now}
        file = self.folder / f"figures.{self.rank}.json"
        new = file.with_suffix(".new")
        new.write_text(json.dumps(found, default=str), "utf-8")
        new.replace(file)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.get_device_module(self.device).synchronize()

    def seconds(self, call: Callable[[], object], number: int = 5) -> float:
        """The mean time of successive calls, including the device's work, after a warm-up."""
        threads = torch.get_num_threads()
        timer = Timer("call()", globals={"call": call}, num_threads=threads)
        return timer.timeit(number).mean


class Check(NamedTuple):
    """A check; the docstring of `run` explains the figures in the report."""

    run: Callable[[Context], None]
    remedy: str  # if it fails
    limit: int = 1  # multiple of the usual time limit


QUERY = "name,driver_version,memory.total,memory.free,clocks.sm,clocks.max.sm,power.limit"
PRECISIONS = {
    "bf16": (torch.bfloat16, "highest"),
    "tf32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}


def machine(context: Context) -> None:
    """The device, the features of it in use, and its rates of large products and copies.

    A copy's rate counts the bytes that it reads and writes.
    """
    figures = context.figures
    te = no_transformer_engine()
    layers = f"local ones, as Transformer Engine {te}" if te else "Transformer Engine's"
    figures |= {"ranks": context.ranks, "CUDA": torch.version.cuda, "layers": layers}
    peak = 0.0
    size = 512
    if context.on_gpu:
        _describe_gpu(context)
        peak = bf16_tflops(figures["GPU"]) or 0.0
        size = 8192
    else:
        context.skip("driver, NCCL, topology")
    for name, (dtype, precision) in PRECISIONS.items():
        torch.set_float32_matmul_precision(precision)
        a, b = torch.randn(2, size, size, device=context.device).to(dtype)
        product = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
        figures[f"{name}_tflops"] = 2 * size**3 / context.seconds(product) / 1e12
    torch.set_float32_matmul_precision("highest")
    source, target = torch.empty(2, size * size * 16, device=context.device)
    seconds = context.seconds(lambda: target.copy_(source))
    copied = figures["memory_gb_per_s"] = 2 * source.nbytes / seconds / 1e9
    reached = figures["bf16_tflops"]
    text = f"products reach {reached:.3g} TFLOP/s in bf16, the data sheet {peak}"
    context.hold(reached > 0.4 * peak, text)
    least = 100.0 if context.on_gpu else 0.5
    context.hold(copied > least, f"copies reach {copied:.3g} GB/s: is the device busy?")
    one = torch.zeros(1, device=context.device)
    figures["launch_us"] = context.seconds(lambda: one.add_(1.0), 10_000) * 1e6
    if context.ranks > 1:
        length = source.numel() // context.ranks * context.ranks
        sent, received = source[:length], target[:length]
        seconds = context.seconds(lambda: dist.all_to_all_single(received, sent))
        from_others = sent.nbytes * (1 - 1 / context.ranks)
        figures["all_to_all_gb_per_s"] = from_others / seconds / 1e9
        figures["nodes"] = len(set(of_all_ranks(os.environ.get("GROUP_RANK", "0"))))


def _describe_gpu(context: Context) -> None:
    query = subprocess.getoutput(f"nvidia-smi --query-gpu={QUERY} --format=csv,noheader")
    topology = subprocess.getoutput("nvidia-smi topo -m")
    kernel = f"by a kernel, from {KERNEL.from_rows} rows"
    dense = "dense: the kernel needs compute capability 9 or 10, Triton 3.4 and bf16"
    context.figures |= {
        "GPU": torch.cuda.get_device_name(),
        QUERY: query.splitlines(),
        "topology": re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines(),
        "memory_gb": torch.cuda.mem_get_info()[1] / 1e9,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "symmetric products": kernel if has_kernel(context) else dense,
    }


def has_kernel(context: Context) -> bool:
    """True if the device has the kernel for symmetric products."""
    return ns.products_on(context.device, torch.bfloat16) is KERNEL


ALWAYS = replace(KERNEL, from_rows=0)  # the symmetric kernel for blocks of any size
# Shape of a block and number of blocks: checked ones, those checked on a CPU, and timed ones (of
# small models, of llama3-8b's projections, of llama3-70b's).
CHECKED = (((2048, 4096), 4), ((333, 777), 4))
CHECKED_ON_CPU = (((64, 96), 2), ((33, 77), 2))
TIMED = (
    ((256, 512), 64),
    ((1024, 4096), 8),
    ((4096, 4096), 2),
    ((4096, 14336), 2),
    ((8192, 28672), 2),
)
# of a random block, by the precision of products
ERROR = {"medium": 0.03, "high": 5e-3, "highest": 1e-4}


def arithmetic(context: Context) -> None:
    """Newton-Schulz with every set of coefficients, compared with the same polynomials in fp64.

    Precision "highest" is true fp32, "high" TF32 (fp32 on a CPU), "medium" bf16; "standard" and
    "gram" evaluate the same polynomial. The error is |result - fp64| / |fp64|: of a random block
    less than 1e-4 in "highest", 0.005 in "high", 0.03 in "medium". If one direction dominates,
    rounding loses small components, and 0.1 to 0.3 is usual in bf16. No singular value may exceed
    1.3. Only "quintic" is timed, in ms for a stack; TFLOP/s counts operations of dense products,
    and the first two calls include compilation.
    """
    if not has_kernel(context):
        why = "not for this GPU" if context.on_gpu else "no GPU"
        context.skip("symmetric kernel", why=why)
    checked = CHECKED if context.on_gpu else CHECKED_ON_CPU
    cases = list(itertools.product(checked, PROVEN_STEPS))
    if context.on_gpu:
        cases += [(blocks, "quintic") for blocks in TIMED]
    for (shape, count), coefficients in cases:
        label = f"{count} of {shape[0]} x {shape[1]}, {coefficients}"
        with context.trying(label):
            _check_blocks(context, label, count, shape, coefficients)


def _check_blocks(
    context: Context, label: str, count: int, shape: tuple[int, int], coefficients: str
) -> None:
    """Check a stack of random blocks; in the last one, one direction dominates."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, *shape, generator=generator).to(context.device)
    x[-1] += 100.0 * torch.outer(x[0, :, 0], x[0, 0])
    x /= x.abs().amax(dim=(1, 2), keepdim=True)
    steps = max(5, len(muon_utils._COEFFICIENT_SETS[coefficients]))
    exact = x.double() / x.double().norm(dim=(1, 2), keepdim=True)
    for a, b, c in ns.coefficients(coefficients, steps):
        square = exact @ exact.mT
        exact = a * exact + (b * square + c * square @ square) @ exact
    fits_kernel = has_kernel(context) and shape[0] % KERNEL.multiple_of == 0
    for precision, products, method in itertools.product(ERROR, (DENSE, ALWAYS), (STANDARD, GRAM)):
        iteration = Iteration(coefficients, steps, precision, method, products)
        if method == GRAM and not iteration.gram_is_proven:
            continue
        if precision == "highest" and shape[0] > 2048:
            continue  # fp32 is slow
        if precision != "highest" and coefficients in FULL_PRECISION_SETS:
            continue
        if products is ALWAYS and not (fits_kernel and iteration.half):
            continue
        name = "kernel" if products is ALWAYS else "dense"
        case = f"{label}, {precision}, {method}, {name}"
        _check_iteration(context, case, x, exact, iteration)


def _check_iteration(
    context: Context, case: str, x: torch.Tensor, exact: torch.Tensor, iteration: Iteration
) -> None:
    """Largest singular value, distance from fp64, time and rate of one way to iterate a stack."""
    given = x.to(torch.bfloat16 if iteration.half else torch.float32)
    call = functools.partial(orthogonalized, given, iteration)
    begun = time.perf_counter()
    made, again = call(), call()
    context.synchronize()
    first_s = time.perf_counter() - begun
    gram = made.double() @ made.double().mT  # LAPACK takes seconds for each matrix
    direction = torch.linalg.matrix_power(gram, 64).sum(dim=2, keepdim=True)
    squared = (gram @ direction).norm(dim=1) / direction.norm(dim=1)
    largest = float(squared.max().sqrt())
    distances = (made.double() - exact).norm(dim=(1, 2))
    *errors, dominated = (distances / exact.norm(dim=(1, 2))).tolist()
    figures = {
        "largest singular value": largest,
        "error": max(errors),
        "error, one direction dominates": dominated,
    }
    if iteration.coefficient_type == "quintic":
        seconds = context.seconds(call)
        flops = len(x) * iteration.flops(x.shape[1], x.shape[2])
        figures |= {
            "first two, ms": first_s * 1e3,
            "ms": seconds * 1e3,
            "TFLOP/s": flops / seconds / 1e12,
        }
    context.hold(largest <= MOST, f"{case}: largest singular value {largest:.3f}")
    context.hold(torch.equal(made, again), f"{case}: other bits the second time")
    context.near(case, max(errors), ERROR[iteration.precision])
    context.figures[case] = figures


def orthogonalized(x: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    """A step's unscaled result for a stack `(blocks, rows, cols)`, with `iteration.products`."""
    with (
        mock.patch.object(ns, "products_on", return_value=iteration.products),
        mock.patch.object(ns, "KERNEL", ALWAYS),
    ):
        made = Orthogonalizer(iteration, scale_mode="unit_rms_norm", device=x.device)
        stack = x.clone()
        rows, cols = x.shape[1:]
        made.orthogonalize_stack(stack, BlockKind(rows, cols, 1.0, 0, (), cols))
        return stack


LINE = (
    "--split 100,0,0 --data-path ../data --num-layers 2 --train-iters 20 --lr-decay-iters 20"
    " --eval-iters 0 --eval-interval 1000 --log-interval 1 --tensorboard-dir tensorboard"
    " --muon-fp32-matmul-prec highest"
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
QK_CLIP = "--qk-clip --qk-clip-threshold 0.1"
TRAININGS = {
    "optim_grads_params": "",
    "no_shard": "--data-parallel-sharding-strategy no_shard",
    "optim": "--data-parallel-sharding-strategy optim",
    "optim_grads": "--data-parallel-sharding-strategy optim_grads",
    "bf16": f"--bf16 {OVERLAP} --muon-fp32-matmul-prec medium",
    "momentum on the host": "--muon-offload cpu",
    "all state on the host": f"--muon-offload cpu --muon-offload-state all {OVERLAP}",
    "files, int8": "--muon-offload nvme --muon-offload-dir . --muon-momentum-dtype int8",
    "NorMuon": "--optimizer adaptive_muon --adaptive-muon-moment2-method normuon",
    "hyperball": "--muon-hyperball --weight-decay 0",
    "QK-clip": QK_CLIP,
    "Adam": "--optimizer adam",
    "local layers": "--transformer-impl local",
    "local layers, QK-clip": f"--transformer-impl local {QK_CLIP}",
}
"""Flags by name."""
ON_CPU = ("optim_grads_params", "QK-clip")
# Compared with one rank's run of the same from its start: state or losses differ from plain Muon's.
OWN_REFERENCE = ("NorMuon", "hyperball", "QK-clip", "Adam", "local layers", "local layers, QK-clip")
RESUMED = ("optim_grads_params", "bf16", "all state on the host")


def training(context: Context) -> None:
    """20 steps of the quickstart's model in Megatron's loop, compared with a run on one rank.

    Plain Muon's runs begin at one rank's checkpoint of step 10. The largest difference of a loss is
    less than 0.005, in bf16 and with int8 momentum 0.05; a resumed run has the same losses. Losses
    are no measure of quality. On a single rank, a run is compared with itself.
    """
    if context.rank == 0:
        _prepare_data(context)
    names = list(TRAININGS)
    if not context.on_gpu:
        names = list(ON_CPU)
    elif no_transformer_engine():  # all layers are local
        names = [name for name in TRAININGS if "local" not in name]
    why = "no Transformer Engine" if context.on_gpu else "no GPU"
    context.skip(*(name for name in TRAININGS if name not in names), why=why)
    plain, _ = _train(context, "reference", "--save . --save-interval 10", alone=True)
    with ThreadPoolExecutor(4 if context.on_gpu and context.ranks == 1 else 1) as threads:
        compared = threads.map(functools.partial(_compare, context, plain), names)
        for name, figures in zip(names, compared, strict=True):
            context.figures[name] = figures
            context.keep(now=f"after {name}")
    if context.on_gpu:
        _, muon_s = _train(context, "Muon, alone", "")
        _, adam_s = _train(context, "Adam, alone", TRAININGS["Adam"])
        if muon_s and adam_s:
            context.figures["time of a training step, Muon / Adam"] = muon_s / adam_s


def _prepare_data(context: Context) -> None:
    source = str(Path(__file__).parents[2])
    words = ("data", "prepare", "--input", source, "--output", "data")
    command = [sys.executable, "-m", "megatron_muon.cli", *words]
    done = subprocess.run(command, cwd=context.folder, capture_output=True, text=True)
    context.hold(done.returncode == 0, f"preparing data: {done.stderr}")


def _compare(context: Context, plain: dict[int, float], name: str) -> dict[str, Any]:
    """Compare a training with one rank's: the `plain` one, from step 10, or one of its own."""
    own = TRAININGS[name]
    flags = f"{own} --save . --save-interval 15"
    expected = plain
    if name in OWN_REFERENCE:
        expected, _ = _train(context, f"{name}, one rank", own, alone=True)
    else:
        flags += " --load ../reference --ckpt-step 10"
    losses, _ = _train(context, name, flags)
    if not losses or not expected:
        return {}
    differences = torch.tensor([loss - expected[step] for step, loss in losses.items()])
    error = float(differences.abs().max())  # NaN stays
    limit = 0.05 if "bf16" in name or "int8" in name else 5e-3
    context.near(f"{name}: losses beside one rank's", error, limit)
    found: dict[str, Any] = {"last loss": losses[max(losses)], "largest difference": error}
    if name in RESUMED:
        load = f"--load '../{name}' --ckpt-step 15"
        again, _ = _train(context, f"{name}, resumed", f"{own} {load}")
        same = bool(again) and again.items() <= losses.items()
        context.hold(same, f"{name}: resumed {again}, without interruption {losses}")
        found["resumed"] = "the same losses" if same else "other losses"
    return found


def _train(
    context: Context, name: str, flags: str, *, alone: bool = False
) -> tuple[dict[int, float], float]:
    """Losses by step, none if the run failed, and median seconds of a step; `alone` on one rank."""
    folder = context.folder / name
    folder.mkdir(exist_ok=True)
    ranks = 1 if alone else context.ranks
    micro = max(1, 8 // context.ranks)
    line = f"--config {shlex.quote(str(QUICKSTART))} --device {context.device.type} {LINE}"
    line += f" --micro-batch-size {micro} --global-batch-size {micro * context.ranks} {flags}"
    if "--save" not in flags:
        line += " --unset --save --unset --save-interval"
    command = [sys.executable, *pretrain_program(), *shlex.split(line)]
    env = {"LOCAL_RANK": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    env |= environment(ranks, port=of_all_ranks(get_free_port())[0])
    env |= {"WORLD_SIZE": str(ranks), "RANK": str(context.rank)}
    status = 0
    if not alone or context.rank == 0:
        log = folder / f"log.{context.rank}"
        with log.open("w") as output:
            done = subprocess.run(command, cwd=folder, env=env, stdout=output, stderr=output)
        status = done.returncode
        tail = "\n".join(log.read_text("utf-8").splitlines()[-30:])
        context.hold(status == 0, f"{name}: status {status}\n{tail}")
    if any(of_all_ranks(status)):
        return {}, 0.0
    events = read_events(folder / "tensorboard")
    times = [point.value for point in events.points("iteration-time")][3:] or [0.0]
    losses = {point.step: point.value for point in events.points("lm loss")}
    return losses, statistics.median(times)
