"""The checks of `benchmarks.gpu` on steps in one process: variants, delayed streams, and what a step costs.

References are a step in fp64 that is written out here, and the package's own step on a processor, which the tests hold
to independent optimizers.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_checks import Context, Figures
from megatron_muon.core import newton_schulz as ns
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.fsdp.muon import Muon
from megatron_muon.offload.codecs import Codec, Int8
from megatron_muon.offload.store import RecordStore

SHAPES = (*itertools.repeat((256, 512), 8), (512, 256), (333, 777), (64, 64), (1, 100), (1024, 256))


def parameters(
    shapes: Sequence[tuple[int, int]], device: torch.device, seed: int = 0, *, on_device: bool = False
) -> list[tuple[str, torch.nn.Parameter]]:
    """Named matrices, the same values on every device unless they are made `on_device`."""
    generator = torch.Generator(device if on_device else "cpu").manual_seed(seed)
    made = (torch.randn(shape, generator=generator, device=generator.device) * 0.02 for shape in shapes)
    return [(f"layers.{i}.weight", torch.nn.Parameter(one.to(device))) for i, one in enumerate(made)]


def give_gradients(named: Sequence[tuple[str, torch.nn.Parameter]], step: int) -> None:
    """Fill in the gradients of a step, in the tensors that were there."""
    generator = torch.Generator().manual_seed(1000 + step)
    for _, one in named:
        value = torch.randn(one.shape, generator=generator) * 1e-3
        if one.grad is None:
            one.grad = torch.empty_like(one)
        one.grad.copy_(value)


def trained(device: torch.device, steps: int = 10, *, shapes: Any = SHAPES, **settings: Any) -> list[torch.Tensor]:
    """Weights and momentum after some steps of Muon, on the processor."""
    named = parameters(shapes, device)
    optimizer = Muon(named, **{"lr": 0.02, "fp32_matmul_prec": "highest", "ns_coefficients": "quintic", **settings})
    for step in range(steps):
        give_gradients(named, step)
        optimizer.step()
    momentum = optimizer.momentum_state()
    found = [*(one for _, one in named), *(momentum[one] for _, one in named)]
    result = [one.detach().cpu().clone() for one in found]
    optimizer.close()
    return result


VARIANTS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "gram": {"ns": "gram"},
    "normuon": {"moment2_method": "normuon"},
    "adamuon": {"moment2_method": "adamuon"},
    "hyperball": {"hyperball": True, "weight_decay": 0.0},
    "cautious": {"cautious_weight_decay": True},
    "free buffers": {"free_buffers": True},
    "split, other steps": {"split": {"layers.0.*": (64, 192)}, "ns_steps_for": {"layers.1.*": 3}},
    "offload cpu": {"offload": "cpu"},
    "offload half": {"offload": "cpu", "offload_fraction": 0.5},
    "offload nvme": {"offload": "nvme"},
    "bf16 momentum": {"momentum_dtype": "bf16"},
    "int8 momentum": {"momentum_dtype": "int8"},
    "offload nvme, int8": {"offload": "nvme", "momentum_dtype": "int8", "offload_buffer_mb": 1.0},
    "graph": {"cuda_graph": True, "adamw_weight_decay": 0.0},
    "graph, normuon": {"cuda_graph": True, "moment2_method": "normuon"},
    "graph, hyperball": {"cuda_graph": True, "hyperball": True, "weight_decay": 0.0},
    "graph, cautious": {"cuda_graph": True, "cautious_weight_decay": True},
}
ROUNDED = {"adamuon": 1e-2, "bf16 momentum": 1e-2, "int8 momentum": 0.1, "offload nvme, int8": 0.1}
"""Where a last bit may change how momentum is rounded for storage, or be divided by the root of a small number."""


def variants(context: Context) -> Figures:
    """Ten steps of each variant in fp32 beside a processor's, twice with the same bits; plain Muon beside fp64."""
    figures: Figures = {}
    first = [one.detach().clone() for _, one in parameters(SHAPES, torch.device("cpu"))]
    for name, given in VARIANTS.items():
        settings = given | ({"offload_dir": str(context.folder)} if given.get("offload") == "nvme" else {})
        if "graph" in name and not context.on_gpu:
            continue
        try:
            made, again = (trained(context.device, **settings) for _ in range(2))
        except Exception as failure:
            context.hold(False, f"{name}: {type(failure).__name__}: {failure}")
            continue
        expected = trained(torch.device("cpu"), **{k: v for k, v in settings.items() if k != "cuda_graph"})
        moved = zip(made, expected, first * 2, strict=True)
        error = max(((one - two).norm() / (two - start).norm()).item() for one, two, start in moved)
        figures[name] = float(f"{error:.3g}")
        context.hold(all(map(torch.equal, made, again)), f"{name}: other bits the second time")
        context.hold(error < ROUNDED.get(name, 1e-4), f"{name}: {error:.3g} from a processor's weights and momentum")
    made, expected = trained(context.device), fp64(10)
    moved = zip(made, expected, first, strict=False)
    figures["plain beside fp64"] = max(((one - two).norm() / (two - start).norm()).item() for one, two, start in moved)
    context.hold(figures["plain beside fp64"] < 1e-4, f"plain: {figures['plain beside fp64']:.3g} from fp64")
    return figures


def fp64(steps: int) -> list[torch.Tensor]:
    """Weights of plain Muon after some steps, by whole matrices in fp64: its page, written out."""
    named = parameters(SHAPES, torch.device("cpu"))
    weights = [one.detach().double() for _, one in named]
    momentum = [torch.zeros_like(one) for one in weights]
    for step in range(steps):
        give_gradients(named, step)
        for weight, average, (_, parameter) in zip(weights, momentum, named, strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            average.lerp_(gradient, 0.05)
            ahead = gradient.lerp(average, 0.95)
            x = ahead if ahead.shape[0] <= ahead.shape[1] else ahead.mT
            x = x / x.norm()
            for a, b, c in ns.coefficients("quintic", 5):
                square = x @ x.mT
                x = a * x + (b * square + c * square @ square) @ x
            update = x if ahead.shape[0] <= ahead.shape[1] else x.mT
            scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
            weight -= 0.02 * (0.1 * weight + scale * update)
    return [one.float() for one in weights]


@contextmanager
def disturbed(seed: int) -> Iterator[None]:
    """Every stream of a step sleeps at random times, and memory that it frees is overwritten with NaN at once."""
    chance = random.Random(seed)

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def disturb(*args: Any, **options: Any) -> Any:
            torch.cuda._sleep(chance.choice((0, 0, 10_000, 200_000, 1_000_000)))
            for power in chance.sample(range(9, 24), 4):
                torch.full((2**power,), torch.nan, device="cuda")
            return call(*args, **options)

        return disturb

    def copying(method: Callable[..., Any], stream: int) -> Callable[..., Any]:
        def disturb(store: RecordStore, *args: Any) -> Any:
            with torch.cuda.stream(store._streams[stream]):
                torch.cuda._sleep(chance.choice((0, 10_000, 1_000_000)))
            return method(store, *args)

        return disturb

    with ExitStack() as patches:
        for owner, name in ((ShardedMuon, "prepare"), (ShardedMuon, "apply"), (ShardedMuon, "_agree_on_gradients"),
                            (Orthogonalizer, "orthogonalize_stack"), (Codec, "decode"), (Int8, "encode")):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, before(getattr(owner, name))))
        for name, stream in (("_bring", 0), ("_return", 1)):
            patches.enter_context(mock.patch.object(RecordStore, name, copying(getattr(RecordStore, name), stream)))
        yield


DISTURBED = ("plain", "normuon", "offload cpu", "offload half", "offload nvme", "offload nvme, int8", "int8 momentum")


def streams(context: Context) -> Figures:
    """Steps under random delays of every stream have the bits of undisturbed ones."""
    figures: Figures = {}
    for name in (
        "plain",
        "normuon",
        "offload cpu",
        "offload half",
        "offload nvme",
        "offload nvme, int8",
        "int8 momentum",
    ):
        settings = VARIANTS[name] | ({"offload_dir": str(context.folder)} if "nvme" in name else {})
        settings = {"offload_buffer_mb": 1.0, "exchange_buffer_mb": 8.0, **settings, "fp32_matmul_prec": "medium"}
        shapes = [(256, 512), (512, 256)] * 8
        expected = trained(context.device, 5, shapes=shapes, **settings)
        differ = 0
        for round_ in range(15):
            with disturbed(round_):
                found = trained(context.device, 5, shapes=shapes, **settings)
            differ += not all(map(torch.equal, found, expected))
        figures[name] = f"{differ} of 15 differ"
        context.hold(not differ, f"{name}: {differ} of 15 disturbed rounds have other bits")
    return figures


LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
"""The matrices of a layer of llama3-8b."""


def cost(context: Context) -> Figures:
    """A step of Muon beside torch's optimizers on the same matrices: time, the host's time, launches, memory."""
    figures: Figures = {}
    models = (
        {"llama3-8b, 4 layers": LLAMA * 4, "64 of 256x512": [(256, 512)] * 64}
        if context.on_gpu
        else {"small": [(64, 96)] * 4}
    )
    for name, shapes in models.items():
        named = parameters(shapes, context.device, on_device=True)
        for _, one in named:
            one.grad = torch.randn_like(one) * 1e-3
        for label, make in _optimizers(named, context.on_gpu).items():
            try:
                figures[f"{name}: {label}"] = _cost_of(context, make)
            except Exception as failure:
                context.hold(False, f"{name}: {label}: {type(failure).__name__}: {failure}")
        plain, adam = (figures[f"{name}: {label}"]["step_ms"] for label in ("muon", "torch.optim.AdamW"))
        figures[f"{name}: muon / AdamW"] = plain / adam
        figures[f"{name}: torch.optim.Muon / muon"] = figures[f"{name}: torch.optim.Muon"]["step_ms"] / plain
        del named
    return figures


def _optimizers(named: Any, on_gpu: bool) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """Makers, on the same parameters."""
    weights = [one for _, one in named]
    made: dict[str, dict[str, Any]] = {
        "muon": {},
        "muon, gram": {"ns": "gram"},
        "muon, normuon": {"moment2_method": "normuon"},
        "muon, tf32": {"fp32_matmul_prec": "high"},
        "muon, offload cpu": {"offload": "cpu"},
        "muon, offload cpu bf16": {"offload": "cpu", "momentum_dtype": "bf16"},
        "muon, int8 momentum": {"momentum_dtype": "int8"},
    }
    if on_gpu:
        made["muon, graph"] = {"cuda_graph": True}
    return {
        **{name: functools.partial(Muon, named, lr=1e-3, **given) for name, given in made.items()},
        "torch.optim.Muon": lambda: torch.optim.Muon(weights, lr=1e-3),
        "torch.optim.AdamW": lambda: torch.optim.AdamW(weights, lr=1e-3, fused=on_gpu),
    }


def _cost_of(context: Context, make: Callable[[], Any]) -> Figures:
    """Of one optimizer."""
    context.synchronize()
    start, before = time.perf_counter(), torch.cuda.memory_allocated() if context.on_gpu else 0
    optimizer = make()
    optimizer.step()
    context.synchronize()
    figures: Figures = {"first_s": time.perf_counter() - start}
    for _ in range(2):
        optimizer.step()
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    hosts = []

    def step() -> None:
        begun = time.perf_counter()
        optimizer.step()
        hosts.append(time.perf_counter() - begun)

    figures["step_ms"] = context.seconds(step, 5) * 1e3
    figures["host_ms"] = statistics.median(hosts[1:]) * 1e3
    if context.on_gpu:
        figures["state_mb"] = (torch.cuda.memory_allocated() - before) / 2**20
        figures["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        kernels = [one for one in profile.events() if one.device_type.name == "CUDA"]
        figures["launches"] = len(kernels)
        figures["kernels_ms"] = sum(one.device_time for one in kernels) / 1e3
        of = Counter[str]()
        for one in kernels:
            of[one.name[:110]] += one.device_time
        figures["longest_ms"] = {name: round(us / 1e3, 2) for name, us in of.most_common(14)}
    if hasattr(optimizer, "close"):
        optimizer.close()
    return figures
