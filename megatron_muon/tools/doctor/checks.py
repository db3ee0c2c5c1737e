"""What the checks of `megatron-muon doctor --gpu` share, and those of the machine, its arithmetic and of training."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Where a check runs, and what it found, the figures by what they are of. On the CPU sizes are small."""

    device: torch.device
    folder: Path  # the same on all ranks
    rank: int = 0
    ranks: int = 1  # processes that run the check together
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)  # what, by why
    wrong: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one."""
        return self.device.type == "cuda"

    def skip(self, *what: str, why: str = "no GPU") -> None:
        """Note what is not done here."""
        for one in what:
            self.skipped.setdefault(why, []).append(one)

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
        found = {"figures": self.figures, "skipped": self.skipped, "wrong": self.wrong, "now": now}
        file = self.folder / f"figures.{self.rank}.json"
        file.with_suffix(".new").write_text(json.dumps(found, default=str), "utf-8")
        file.with_suffix(".new").replace(file)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.get_device_module(self.device).synchronize()

    def seconds(self, call: Callable[[], object], number: int = 5) -> float:
        """The mean time of so many calls, one after the other, with the device's work; two before do not count."""
        return (
            Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            .timeit(number)
            .mean
        )


class Check(NamedTuple):
    """A check; the docstring of `run` stands in the report and explains the figures."""

    run: Callable[[Context], None]
    proves: str
    remedy: str  # where it fails
    limit: int = 1  # how many times as long as usual it may take


_QUERY = "name,driver_version,memory.total,memory.free,clocks.sm,clocks.max.sm,power.limit"
_PRECISIONS = {
    "bf16": (torch.bfloat16, "highest"),
    "tf32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}


def machine(context: Context) -> None:
    """What the device is, what of it this package uses, and the rates that it reaches on large products and copies.

    A copy's rate counts what it reads and what it writes.
    """
    why = no_transformer_engine()
    found = context.figures
    layers = f"local ones, as Transformer Engine {why}" if why else "Transformer Engine's"
    found |= {"ranks": context.ranks, "CUDA": torch.version.cuda, "layers": layers}
    size = 8192 if context.on_gpu else 512
    if not context.on_gpu:
        context.skip("driver, NCCL, topology")
    else:
        kernel = ns.products_on(context.device, torch.bfloat16) is KERNEL
        least = "it wants compute capability 9 or 10, Triton 3.4 and bf16"
        found |= {
            "GPU": torch.cuda.get_device_name(),
            _QUERY: (
                subprocess.getoutput(
                    f"nvidia-smi --query-gpu={_QUERY} --format=csv,noheader"
                ).splitlines()
            ),
            "topology": (
                re.sub(
                    r"\x1b\[[0-9;]*m", "", subprocess.getoutput("nvidia-smi topo -m")
                ).splitlines()
            ),
            "memory_gb": torch.cuda.mem_get_info()[1] / 1e9,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "symmetric products": (
                f"by a kernel, from {KERNEL.from_rows} rows" if kernel else f"dense, as {least}"
            ),
        }
    for name, (dtype, precision) in _PRECISIONS.items():
        torch.set_float32_matmul_precision(precision)
        a, b = torch.randn(2, size, size, device=context.device).to(dtype).unbind()
        seconds = context.seconds(functools.partial(torch.mm, a, b, out=torch.empty_like(a)))
        found[f"{name}_tflops"] = 2 * size**3 / seconds / 1e12
    torch.set_float32_matmul_precision("highest")
    source, target = torch.empty(2, size * size * 16, device=context.device).unbind()
    found["memory_gb_per_s"] = (
        2 * source.nbytes / context.seconds(lambda: target.copy_(source)) / 1e9
    )
    peak = bf16_tflops(found["GPU"]) if context.on_gpu else None
    reached, copied = found["bf16_tflops"], found["memory_gb_per_s"]
    context.hold(
        reached > 0.4 * (peak or 0.0),
        f"products reach {reached:.3g} TFLOP/s in bf16, the data sheet {peak}",
    )
    context.hold(
        copied > (100.0 if context.on_gpu else 0.5),
        f"copies reach {copied:.3g} GB/s: is the device busy?",
    )
    one = torch.zeros(1, device=context.device)
    found["launch_us"] = context.seconds(lambda: one.add_(1.0), 10_000) * 1e6
    if context.ranks > 1:
        part = source.numel() // context.ranks * context.ranks
        seconds = context.seconds(lambda: dist.all_to_all_single(target[:part], source[:part]))
        found["all_to_all_gb_per_s"] = (
            source[:part].nbytes * (1 - 1 / context.ranks) / seconds / 1e9
        )
        found["nodes"] = len(set(of_all_ranks(os.environ.get("GROUP_RANK", "0"))))


ALWAYS = replace(KERNEL, from_rows=0)  # the symmetric kernel for blocks of any size
CHECKED = (((2048, 4096), 4), ((333, 777), 4))
# Blocks of small models, of llama3-8b's projections and of llama3-70b's, and how many of them in a
# stack.
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
    """Newton-Schulz by every set of coefficients, as a step runs it, compared with the same polynomials in fp64.

    Precision "highest" is true fp32, "high" TF32 (fp32 on a CPU), "medium" bf16; "standard" and
    "gram" are two ways to the same polynomial. The error is |result - fp64| / |fp64|: of a random
    block less than 1e-4 in "highest", 0.005 in "high", 0.03 in "medium". Where one direction
    dominates, rounding loses what is small beside it, and 0.1 to 0.3 is usual in bf16. No singular
    value may exceed 1.3. Only "quintic" is timed, in ms for a stack; TFLOP/s counts the operations
    of dense products, and the first two calls include compilation.
    """
    checked, timed = (CHECKED, TIMED) if context.on_gpu else ((((64, 96), 2), ((33, 77), 2)), ())
    if ns.products_on(context.device, torch.bfloat16) is not KERNEL:
        context.skip("symmetric kernel", why="not for this GPU" if context.on_gpu else "no GPU")
    for (shape, count), name in (
        *itertools.product(checked, PROVEN_STEPS),
        *((one, "quintic") for one in timed),
    ):
        what = f"{count} of {shape[0]} x {shape[1]}, {name}"
        with context.trying(what):
            _blocks(context, what, count, shape, name)


def _blocks(context: Context, what: str, count: int, shape: tuple[int, int], name: str) -> None:
    """Largest singular value, distance from fp64, time and rate of a stack of random blocks."""
    has_kernel = (
        ns.products_on(context.device, torch.bfloat16) is KERNEL
        and not shape[0] % KERNEL.multiple_of
    )
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
        proven = iteration.gram_is_proven or method == STANDARD
        # fp32 is slow
        proven &= shape[0] <= 2048 if precision == "highest" else name not in FULL_PRECISION_SETS
        if not (proven and (products is DENSE or (has_kernel and iteration.half))):
            continue
        given = x.to(torch.bfloat16 if iteration.half else torch.float32)
        call = functools.partial(orthogonalized, given, iteration)
        begun = time.perf_counter()
        made, again = call(), call()
        context.synchronize()
        first_s = time.perf_counter() - begun
        label = f"{what}, {precision}, {method}, {'kernel' if products is ALWAYS else 'dense'}"
        gram = made.double() @ made.double().mT  # LAPACK takes seconds for each matrix
        direction = torch.linalg.matrix_power(gram, 64).sum(dim=2, keepdim=True)
        largest = float(((gram @ direction).norm(dim=1) / direction.norm(dim=1)).max().sqrt())
        *errors, dominated = (
            (made.double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
        ).tolist()
        found = {
            "largest singular value": largest,
            "error": max(errors),
            "error, one direction dominates": dominated,
        }
        if name == "quintic":
            seconds = context.seconds(call)
            rate = count * iteration.flops(*shape) / seconds / 1e12
            found |= {"first two, ms": first_s * 1e3, "ms": seconds * 1e3, "TFLOP/s": rate}
        context.hold(largest <= MOST, f"{label}: largest singular value {largest:.3f}")
        context.hold(torch.equal(made, again), f"{label}: other bits the second time")
        context.near(label, max(errors), ERROR[precision])
        context.figures[label] = found


def orthogonalized(x: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    """What a step makes of a stack `(blocks, rows, cols)`, unscaled, with the products that `iteration` has."""
    with (
        mock.patch.object(ns, "products_on", return_value=iteration.products),
        mock.patch.object(ns, "KERNEL", ALWAYS),
    ):
        of = Orthogonalizer(iteration, scale_mode="unit_rms_norm", device=x.device)
        stack = x.clone()
        of.orthogonalize_stack(stack, BlockKind(x.shape[1], x.shape[2], 1.0, 0, (), x.shape[2]))
        return stack


LINE = (
    "--split",
    "100,0,0",
    "--num-layers",
    "2",
    "--train-iters",
    "20",
    "--lr-decay-iters",
    "20",
    "--eval-iters",
    "0",
    "--eval-interval",
    "1000",
    "--log-interval",
    "1",
    "--muon-fp32-matmul-prec",
    "highest",
    "--tensorboard-dir",
    "tensorboard",
    "--data-path",
    "../data",
)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
QK_CLIP = ("--qk-clip", "--qk-clip-threshold", "0.1")
TRAININGS: Mapping[str, Sequence[str]] = {
    "optim_grads_params": (),
    "no_shard": ("--data-parallel-sharding-strategy", "no_shard"),
    "optim": ("--data-parallel-sharding-strategy", "optim"),
    "optim_grads": ("--data-parallel-sharding-strategy", "optim_grads"),
    "bf16": ("--bf16", *OVERLAP, "--muon-fp32-matmul-prec", "medium"),
    "momentum on the host": ("--muon-offload", "cpu"),
    "all state on the host": ("--muon-offload", "cpu", "--muon-offload-state", "all", *OVERLAP),
    "files, int8": (
        "--muon-offload",
        "nvme",
        "--muon-offload-dir",
        ".",
        "--muon-momentum-dtype",
        "int8",
    ),
    "NorMuon": ("--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", "normuon"),
    "hyperball": ("--muon-hyperball", "--weight-decay", "0"),
    "QK-clip": QK_CLIP,
    "Adam": ("--optimizer", "adam"),
    "local layers": ("--transformer-impl", "local"),
    "local layers, QK-clip": ("--transformer-impl", "local", *QK_CLIP),
}
ON_CPU = ("optim_grads_params", "optim", "QK-clip", "Adam")
# Those whose state or losses are others than plain Muon's: each beside one rank's run of the same,
# from its start.
OWN_REFERENCE = ("NorMuon", "hyperball", "QK-clip", "Adam", "local layers", "local layers, QK-clip")
RESUMED = ("optim_grads_params", "bf16", "all state on the host")


def training(context: Context) -> None:
    """20 steps of the quickstart's model in Megatron's loop, compared with the same run on one rank.

    Plain Muon's runs begin at one rank's checkpoint of step 10. The largest difference of a loss is
    less than 0.005, in bf16 and with int8 momentum 0.05; a run that is resumed has the same losses.
    Losses are no measure of quality. With one rank in all, a run is compared with itself.
    """
    if context.rank == 0:
        words = (
            "data",
            "prepare",
            "--suffix",
            ".py",
            "--input",
            str(Path(__file__).parents[2]),
            "--output",
            "data",
        )
        command = [sys.executable, "-m", "megatron_muon.cli", *words]
        done = subprocess.run(command, cwd=context.folder, capture_output=True, text=True)
        context.hold(done.returncode == 0, f"preparing data: {done.stderr}")
    has_te = context.on_gpu and not no_transformer_engine()
    names = (
        [name for name in TRAININGS if has_te or "local" not in name] if context.on_gpu else ON_CPU
    )
    why = "no Transformer Engine" if context.on_gpu else "no GPU"
    context.skip(*(name for name in TRAININGS if name not in names), why=why)
    plain, _ = _train(context, "reference", "--save", ".", "--save-interval", "10", alone=True)
    with ThreadPoolExecutor(4 if context.on_gpu and context.ranks == 1 else 1) as threads:
        for name, figures in zip(
            names, threads.map(functools.partial(_beside, context, plain), names), strict=True
        ):
            context.figures[name] = figures
            context.keep(now=f"after {name}")
    step_s = [
        _train(context, f"{name}, alone", *TRAININGS[name])[1]
        for name in ("optim_grads_params", "Adam")
    ]
    if all(step_s):
        context.figures["time of a training step, Muon / Adam"] = step_s[0] / step_s[1]


def _beside(context: Context, plain: dict[int, float], name: str) -> dict[str, Any]:
    """A training beside one rank's of the same, or beside the `plain` one, whose checkpoint of step 10 it loads."""
    flags, expected = [*TRAININGS[name], "--save", ".", "--save-interval", "15"], plain
    if name in OWN_REFERENCE:
        expected, _ = _train(context, f"{name}, one rank", *TRAININGS[name], alone=True)
    else:
        flags += ["--load", "../reference", "--ckpt-step", "10"]
    losses, _ = _train(context, name, *flags)
    if not losses or not expected:
        return {}
    error = float(
        torch.tensor([value - expected[step] for step, value in losses.items()]).abs().max()
    )
    close = 0.05 if any(word in name for word in ("bf16", "int8")) else 5e-3
    context.near(f"{name}: losses beside one rank's", error, close)
    found: dict[str, Any] = {"last loss": losses[max(losses)], "largest difference": error}
    if name in RESUMED:
        again, _ = _train(
            context,
            f"{name}, resumed",
            *TRAININGS[name],
            "--load",
            f"../{name}",
            "--ckpt-step",
            "15",
        )
        same = bool(again) and all(losses[step] == value for step, value in again.items())
        context.hold(same, f"{name}: resumed {again}, at once {losses}")
        found["resumed"] = "the same losses" if same else "other losses"
    return found


def _train(
    context: Context, name: str, *flags: str, alone: bool = False
) -> tuple[dict[int, float], float]:
    """Losses of a run by step, none where it failed, and median seconds of a step; `alone`, those of one rank."""
    folder, ranks = context.folder / name, 1 if alone else context.ranks
    folder.mkdir(exist_ok=True)
    port = of_all_ranks(get_free_port())[0]
    micro = max(1, 8 // context.ranks)
    batch = ("--micro-batch-size", str(micro), "--global-batch-size", str(micro * context.ranks))
    unsaved = () if "--save" in flags else ("--unset", "--save", "--unset", "--save-interval")
    command = [
        sys.executable,
        *pretrain_program(),
        "--config",
        str(QUICKSTART),
        "--device",
        context.device.type,
    ]
    command += [*LINE, *batch, *unsaved, *flags]
    env = {"LOCAL_RANK": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"} | environment(
        ranks, port=port
    )
    env |= {"WORLD_SIZE": str(ranks), "RANK": str(context.rank)}
    status = 0
    if not alone or context.rank == 0:
        with (folder / f"log.{context.rank}").open("w+") as log:
            status = subprocess.run(
                command, cwd=folder, env=env, stdout=log, stderr=log, check=False
            ).returncode
            log.seek(0)
            context.hold(status == 0, f"{name}: status {status}\n{''.join(log.readlines()[-30:])}")
    if any(of_all_ranks(status)):
        return {}, 0.0
    events = read_events(folder / "tensorboard")
    times = [point.value for point in events.points("iteration-time")][3:]
    return {point.step: point.value for point in events.points("lm loss")}, statistics.median(
        times or [0.0]
    )
