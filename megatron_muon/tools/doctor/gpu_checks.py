"""Checks of `megatron-muon doctor --gpu`: the machine, the arithmetic, and training.

`Context` is what all checks share; `step_checks.py` has the checks of optimizer steps and the list
of all checks.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.utils.benchmark import Timer

from megatron_muon.checkpoint.folders import written_at_once
from megatron_muon.core.cost import GRAM, KERNEL, STANDARD, Iteration
from megatron_muon.core.methods import newton_schulz as ns
from megatron_muon.core.methods import symmetric
from megatron_muon.core.methods.method import Work
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.passes import largest_magnitude, unit_factor
from megatron_muon.core.slices import BlockKind
from megatron_muon.megatron.run_device import bf16_tflops
from megatron_muon.proven import FULL_PRECISION_SETS, MOST, PROVEN_STEPS
from megatron_muon.ranks import of_all_ranks
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
    skipped: list[str] = field(default_factory=list)  # with the reason
    wrong: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

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
        print(part, flush=True)  # the log of a check that hangs ends with its part
        try:
            yield
        except Exception as failure:
            self.wrong.append(f"{part}: {type(failure).__name__}: {failure}")
            if self.ranks > 1:
                raise
        self.write_findings()

    def write_findings(self) -> None:
        """Write the findings so far, in case the check does not end."""
        found = {"figures": self.figures, "skipped": self.skipped, "wrong": self.wrong}
        with written_at_once(self.folder / f"figures.{self.rank}.json") as file:
            json.dump(found, file)

    def seconds(self, call: Callable[[], object]) -> float:
        """The mean time of successive calls, including the device's work, after a warm-up."""
        threads = torch.get_num_threads()
        timer = Timer("call()", globals={"call": call}, num_threads=threads)
        return timer.timeit(5).mean


PRECISIONS = {
    "bf16": (torch.bfloat16, "highest"),
    "tf32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}


def machine(context: Context) -> None:
    """The device, and its rates of large products and copies.

    A copy's rate counts the bytes that it reads and writes.
    """
    figures = context.figures
    figures["ranks"] = context.ranks
    peak = 0.0
    size = 512
    least_gb_per_s = 0.5
    if context.on_gpu:
        figures["GPU"] = torch.cuda.get_device_name()
        figures["memory_gb"] = torch.cuda.mem_get_info()[1] / 1e9
        figures["CUDA, NCCL"] = [torch.version.cuda, torch.cuda.nccl.version()]
        for command in ("nvidia-smi", "nvidia-smi topo -m"):
            figures[command] = subprocess.getoutput(command).splitlines()
        peak = bf16_tflops(figures["GPU"]) or 0.0
        size = 8192
        least_gb_per_s = 100.0
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
    busy = f"copies reach {copied:.3g} GB/s: is the device busy?"
    context.hold(copied > least_gb_per_s, busy)
    if context.ranks > 1:
        length = source.numel() // context.ranks * context.ranks
        sent, received = source[:length], target[:length]
        seconds = context.seconds(lambda: dist.all_to_all_single(received, sent))
        from_others = sent.nbytes * (1 - 1 / context.ranks)
        figures["all_to_all_gb_per_s"] = from_others / seconds / 1e9
        figures["nodes"] = len(set(of_all_ranks(os.environ.get("GROUP_RANK", "0"))))


# Blocks, rows, columns; the large ones are for the symmetric kernel.
CHECKED = [(4, 2048, 4096), (4, 333, 777)]
CHECKED_ON_CPU = [(2, 64, 96), (2, 33, 77)]
LARGE = [(2, 4096, 4096), (2, 8192, 8192)]
# of a random block, by the precision of products
ERROR = {"medium": 0.03, "high": 5e-3, "highest": 1e-4}


def arithmetic(context: Context) -> None:
    """Newton-Schulz with every set of coefficients, compared with the same polynomials in fp64.

    Precision "highest" is true fp32, "high" TF32 (fp32 on a CPU), "medium" bf16; "standard" and
    "gram" evaluate the same polynomial. The error is |result - fp64| / |fp64|: of a random block
    less than 1e-4 in "highest", 0.005 in "high", 0.03 in "medium". No singular value may exceed
    1.3, also if one direction dominates.
    """
    checked = CHECKED if context.on_gpu else CHECKED_ON_CPU
    if symmetric.products_on(context.device, torch.bfloat16) is KERNEL:
        checked = [*checked, *LARGE]
    else:
        context.skipped.append("symmetric kernel: not for this device")
    for shape, coefficients in itertools.product(checked, PROVEN_STEPS):
        label = "{} of {} x {}, ".format(*shape) + coefficients
        with context.trying(label):
            _check_blocks(context, label, shape, coefficients)


def _check_blocks(
    context: Context, label: str, shape: tuple[int, int, int], coefficients: str
) -> None:
    """Check a stack of random blocks; in the last one, one direction dominates."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(context.device)
    row, col = x[0, 0], x[0, :, 0]
    x[-1] += 100.0 * torch.outer(col, row)
    x /= x.abs().amax(dim=(1, 2), keepdim=True)
    steps = max(5, len(muon_utils._COEFFICIENT_SETS[coefficients]))
    exact = x.double()
    exact /= exact.norm(dim=(1, 2), keepdim=True)
    for a, b, c in ns.coefficients(coefficients, steps):
        square = exact @ exact.mT
        exact = a * exact + (b * square + c * square @ square) @ exact
    for precision, method in itertools.product(ERROR, (STANDARD, GRAM)):
        iteration = Iteration(coefficients, steps, precision, method)
        if method == GRAM and not iteration.gram_is_proven:
            continue
        if precision != "highest" and coefficients in FULL_PRECISION_SETS:
            continue
        case = f"{label}, {precision}, {method}"
        _check_iteration(context, case, x, exact, iteration)


def _check_iteration(
    context: Context, case: str, x: torch.Tensor, exact: torch.Tensor, iteration: Iteration
) -> None:
    """Largest singular value and distance from fp64 of one way to iterate a stack."""
    given = x.to(torch.bfloat16 if iteration.half else torch.float32)
    made = orthogonalized(given, iteration)
    again = orthogonalized(given, iteration)
    gram = made.double() @ made.double().mT  # LAPACK takes seconds for each matrix
    direction = torch.linalg.matrix_power(gram, 64).sum(dim=2, keepdim=True)
    squared = (gram @ direction).norm(dim=1) / direction.norm(dim=1)
    largest = float(squared.max().sqrt())
    distances = (made.double() - exact).norm(dim=(1, 2))
    errors = distances / exact.norm(dim=(1, 2))
    error = float(errors[:-1].max())
    context.figures[case] = {"largest singular value": largest, "error": error}
    context.hold(largest <= MOST, f"{case}: largest singular value {largest:.3f}")
    context.hold(torch.equal(made, again), f"{case}: other bits the second time")
    context.near(case, error, ERROR[iteration.precision])


def orthogonalized(x: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    """A step's unscaled result for a stack `(blocks, rows, cols)`."""
    method = NewtonSchulz(iteration, device=x.device)
    stack = x.clone()
    count, rows, cols = x.shape
    kind = BlockKind(rows, cols, 1.0, 0, (), cols)
    work = Work.allocated(method.work_bytes(kind, count, x.itemsize), x.device)
    for part in stack.split(min(method.together(kind), count)):
        with method.arithmetic():
            factors = unit_factor(largest_magnitude(part))
            part.mul_(factors.to(part.dtype))
            updates = method.run(part, kind, factors, work)
            if updates is not part:
                part.copy_(updates)
    return stack


LINE = (
    "--split 100,0,0 --data-path ../data --num-layers 2 --train-iters 20 --lr-decay-iters 20"
    " --eval-iters 0 --eval-interval 1000 --log-interval 1 --tensorboard-dir tensorboard"
    " --muon-fp32-matmul-prec highest --save . --save-interval 5"
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
QK_CLIP = "QK-clip"
TRAININGS = {
    "optim_grads_params": "",
    "no_shard": "--data-parallel-sharding-strategy no_shard",
    "optim": "--data-parallel-sharding-strategy optim",
    "optim_grads": "--data-parallel-sharding-strategy optim_grads",
    "bf16": f"--bf16 {OVERLAP} --muon-fp32-matmul-prec medium",
    "all state on the host": f"--muon-offload cpu --muon-offload-state all {OVERLAP}",
    "files, int8": "--muon-offload nvme --muon-offload-dir . --muon-momentum-dtype int8",
    QK_CLIP: "--qk-clip --qk-clip-threshold 0.1",
}
"""Flags by name."""
ON_CPU = ("optim_grads_params", QK_CLIP)
START = "--load ../reference --ckpt-step 10"


def training(context: Context) -> None:
    """Compares losses of the quickstart's model in Megatron's loop with those of one rank.

    The reference takes 20 steps on one rank; the others take the last ten, from its checkpoint. The
    largest difference of a loss is less than 0.005, in bf16 and with int8 momentum 0.05; a resumed
    run has the same losses. On a single rank, a run with QK-clip is its own reference.
    """
    if context.rank == 0:
        source = str(Path(__file__).parents[2])  # this package is the text
        words = ("data", "prepare", "--input", source, "--output", "data")
        command = [sys.executable, "-m", "megatron_muon.cli", *words]
        subprocess.run(command, cwd=context.folder, check=True)
    reference = _train(context, "reference", flags="", alone=True)  # others wait for it
    names = list(TRAININGS if context.on_gpu else ON_CPU)
    # ranks start trainings in the same order
    at_once = 4 if context.on_gpu and context.ranks == 1 else 1
    with ThreadPoolExecutor(at_once) as threads:
        for _ in threads.map(functools.partial(_compare, context, reference), names):
            context.write_findings()


def _compare(context: Context, plain: dict[int, float], name: str) -> None:
    """Compare a training with one rank's, and with itself after resuming."""
    own = TRAININGS[name]
    flags = f"{own} {START}"
    expected = plain
    if name == QK_CLIP:  # changes losses
        expected = _train(context, f"{name}, one rank", flags, alone=True)
    losses = _train(context, name, flags)
    if not losses or not expected:
        return  # a failed run is noted
    differences = [abs(loss - expected[step]) for step, loss in losses.items()]
    error = float(torch.tensor(differences).max())  # NaN stays
    context.figures[name] = {"last loss": losses[20], "largest difference": error}
    limit = 0.05 if name in ("bf16", "files, int8") else 5e-3
    context.near(f"{name}: losses beside one rank's", error, limit)
    if name in ("optim_grads_params", "bf16", "all state on the host"):
        load = f"{own} --load '../{name}' --ckpt-step 15"
        again = _train(context, f"{name}, resumed", load)
        is_same = bool(again) and again.items() <= losses.items()
        context.hold(is_same, f"{name}: resumed {again}, without interruption {losses}")


def _train(context: Context, name: str, flags: str, *, alone: bool = False) -> dict[int, float]:
    """Losses by step, none if the run failed; `alone` on one rank."""
    folder = context.folder / name
    folder.mkdir(exist_ok=True)
    ranks = 1 if alone else context.ranks
    micro = max(1, 8 // context.ranks)
    line = f"--config {shlex.quote(str(QUICKSTART))} --device {context.device.type} {LINE}"
    line += f" --micro-batch-size {micro} --global-batch-size {micro * context.ranks} {flags}"
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
        return {}
    events = read_events(folder / "tensorboard")
    return {point.step: point.value for point in events.points("lm loss")}
