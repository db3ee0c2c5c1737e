"""Checks of `doctor --gpu`: steps on real or simulated ranks, delays, offload, cost; all checks.

The reference is the package's own step on whole matrices on the CPU, which the tests compare with
independent optimizers.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.fsdp.muon import Muon
from megatron_muon.offload.codecs import Codec, Int8
from megatron_muon.offload.store import DISK, HOST, RecordStore
from megatron_muon.tools.doctor.gpu_checks import Check, Context, arithmetic, machine, training
from megatron_muon.tools.plan.estimate import measured
from megatron_muon.tools.plan.planned_shards import step_ms

# The matrices of a layer of llama3-8b.
LLAMA = [
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),
    *((14336, 4096), (14336, 4096), (4096, 14336)),
]
# A sixteenth of them, odd ones, and a stack of experts.
SHAPES: list[tuple[int, ...]] = [
    *((rows // 16, cols // 16) for rows, cols in LLAMA),
    *((256, 512), (333, 777), (64, 64)),
    *((1, 100), (100, 3), (6, 40, 24)),
]
SIMULATED = 4  # ranks that one process simulates
TEN = range(10)
type Given = dict[str, Any]
type Mesh = DeviceMesh | None
type Weights = list[torch.Tensor]


@functools.cache
def values(seed: int) -> Weights:
    """Random tensors of `SHAPES`: weights for seed 0, gradients for others."""
    generator = torch.Generator().manual_seed(seed)
    scale = 1.0 if seed else 0.02
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def on_mesh(tensor: torch.Tensor, mesh: Mesh, dim: int = 0) -> torch.Tensor:
    """A tensor that all ranks of a mesh have, cut along a dimension; whole without a mesh."""
    if mesh is None:
        return tensor
    return distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)


def trained(
    device: torch.device,
    settings: Given,
    mesh: Mesh = None,
    *,
    steps: range = TEN,
    cut: int = 0,
    saved: str = "",
) -> Weights:
    """Whole weights, on the CPU, after `steps` of Muon in true fp32 on matrices cut over a mesh.

    The checkpoint `saved` is written at the end, or read if steps do not begin at 0.
    """
    if "share_replicated" in settings:
        mesh = None  # shared matrices are whole
    named = {}
    for at, start in enumerate(values(0)):
        module = "experts." if start.dim() == 3 else ""
        shard = on_mesh(start.to(device), mesh, cut)
        named[f"layers.{at}.{module}weight"] = nn.Parameter(shard.clone())
    weights = list(named.values())
    base: Given = {"lr": 0.02, "fp32_matmul_prec": "highest", "exchange_buffer_mb": 8.0}
    optimizer = Muon(named.items(), **(base | settings))
    if steps.start:
        state = {"weights": named, "optimizer": optimizer.state_dict()}
        load(state, checkpoint_id=saved)
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        for one, gradient in zip(weights, values(1 + step), strict=True):
            if one.grad is None:
                one.grad = torch.empty_like(one)
            # in place, as a graph reads the addresses that it captured
            one.grad.copy_(on_mesh(gradient.to(device), mesh, cut))
        optimizer.step()
    if saved and not steps.start:
        save({"weights": named, "optimizer": optimizer.state_dict()}, checkpoint_id=saved)
    kept = sum(store.bytes[HOST] + store.bytes[DISK] for store in optimizer.stores)
    if not kept and settings.get("offload", "none") != "none":
        raise RuntimeError("nothing was offloaded")
    optimizer.close()
    whole = (one.full_tensor() if isinstance(one, DTensor) else one for one in weights)
    return [one.detach().cpu().clone() for one in whole]


def on_ranks(context: Context, settings: Given, **options: Any) -> Weights:
    """The result of `trained` on this rank; of a single rank, those of all simulated ranks."""

    def call() -> Weights:
        mesh = init_device_mesh(context.device.type, (dist.get_world_size(),))
        return trained(context.device, settings, mesh, **options)

    return call() if context.ranks > 1 else _simulated(context, call)


def _simulated(context: Context, call: Callable[[], Weights]) -> Weights:
    """The results of `call` on `SIMULATED` ranks, each a thread of this process.

    Collectives are those with which torch tests DTensor; on a GPU each waits for all streams.
    """
    from torch._C._distributed_c10d import HashStore, _set_thread_isolation_mode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    # torchrun's counts processes; threads are ranks of one node
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    store, join = HashStore(), threaded.Collective.join

    def waiting(*args: Any) -> Any:
        context.synchronize()
        work = join(*args)  # type: ignore[no-untyped-call]
        context.synchronize()
        return work

    def work(rank: int) -> Weights:
        dist.init_process_group("threaded", rank=rank, world_size=SIMULATED, store=store)
        try:
            return call()
        except BaseException as failure:
            threaded.ProcessLocalGroup.exception_handle(failure)  # ends the others by SystemExit
            raise
        finally:
            dist.destroy_process_group()

    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    waits = mock.patch.object(threaded.Collective, "join", waiting)
    try:
        with waits, ThreadPoolExecutor(SIMULATED) as threads:
            made = [threads.submit(work, rank) for rank in range(SIMULATED)]
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        _set_thread_isolation_mode(False)
    for one in made:
        if isinstance(one.exception(), Exception):  # the cause of the others' SystemExit
            one.result()
    return [weight for one in made for weight in one.result()]


def distance(found: Weights, expected: Weights) -> float:
    """The largest |found - expected| / |expected - start| of a weight; NaN if one is NaN."""
    errors = []
    each = zip(found, itertools.cycle(expected), itertools.cycle(values(0)), strict=False)
    for one, goal, start in each:
        errors.append((one - goal).norm() / (goal - start).norm())
    return float(torch.stack(errors).max())


def same(found: Weights, expected: Weights) -> bool:
    """True if two lists have the same bits."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


VARIANTS: dict[str, Given] = {
    "owner": {},
    "teams": {"team_size": "2"},
    "all-gather": {"exchange": "allgather"},
    "shared": {"share_replicated": True},
    "NorMuon": {"moment2_method": "normuon"},
    "hyperball": {"hyperball": True, "weight_decay": 0.0},
    "CUDA graph": {"cuda_graph": True},
    "AdaMuon": {"moment2_method": "adamuon"},
    "cautious": {"cautious_weight_decay": True},
    "split, other steps": {"split": {"layers.0.*": (64, 192)}, "ns_steps_for": {"layers.4.*": 3}},
    "int8 momentum": {"momentum_dtype": "int8"},
    "bf16 iteration": {"fp32_matmul_prec": "medium"},
}
# settings without effect on the reference
ALONE = ("team_size", "exchange", "share_replicated", "cuda_graph")
# A last bit may change how momentum is rounded, or be divided by the root of a small number.
ROUNDED = {"AdaMuon": 1e-2, "int8 momentum": 0.1, "bf16 iteration": 0.1}


def exchange(context: Context) -> None:
    """Ten steps of each exchange and variant of Muon, compared with a CPU's on whole matrices.

    The figure is the largest error of a weight over the distance that it has moved: less than 1e-4,
    AdaMuon 0.01, int8 momentum and the iteration in bf16 0.1. A second run must have the same bits.
    One process simulates four ranks.
    """
    for name, settings in VARIANTS.items():
        is_graph = "cuda_graph" in settings
        if is_graph and not context.on_gpu:
            context.skip(name)
            continue
        call = functools.partial(on_ranks, context)
        if is_graph:  # threads cannot capture at the same time
            call = functools.partial(trained, context.device)
        alone = {key: value for key, value in settings.items() if key not in ALONE}
        with context.trying(name):
            expected = trained(torch.device("cpu"), alone)
            made, again = call(settings), call(settings)
            error = distance(made, expected)
            context.figures[name] = error
            context.hold(same(made, again), f"{name}: other bits the second time")
            context.near(f"{name}, from whole matrices", error, ROUNDED.get(name, 1e-4))


# Methods of a step that start late, and the store's stream of their work.
DELAYED: list[tuple[type, str, int | None]] = [
    (ShardedMuon, "prepare", None),
    (ShardedMuon, "apply", None),
    (ShardedMuon, "_agree_on_gradients", None),
    (Orthogonalizer, "orthogonalize_stack", None),
    (Codec, "decode", None),
    (Int8, "encode", None),
    (RecordStore, "_bring", 0),
    (RecordStore, "_return", 1),
]
SLEEP_CYCLES = (0, 0, 10_000, 200_000, 1_000_000)


@contextmanager
def disturbed(context: Context, seed: int) -> Iterator[None]:
    """Every stream of a step sleeps at random times, and freed memory is overwritten with NaN."""
    chance = random.Random(seed)

    def sleep() -> None:
        cycles = chance.choice(SLEEP_CYCLES)
        if context.on_gpu:
            torch.cuda._sleep(cycles)
        else:
            time.sleep(cycles * 3e-9)

    def late(method: Callable[..., Any], stream: int | None) -> Callable[..., Any]:
        def disturb(one: Any, *args: Any, **options: Any) -> Any:
            on_stream = stream is not None and context.on_gpu
            with torch.cuda.stream(one._streams[stream]) if on_stream else nullcontext():
                sleep()
            if stream is None:
                for power in chance.sample(range(9, 22), 4):
                    torch.full((2**power,), torch.nan, device=context.device)
            return method(one, *args, **options)

        return disturb

    with ExitStack() as patches:
        for owner, name, stream in DELAYED:
            method = late(getattr(owner, name), stream)
            patches.enter_context(mock.patch.object(owner, name, method))
        yield


def _rounds(
    context: Context, name: str, count: int, make: Callable[[], Weights], expected: Weights
) -> str:
    """The number of disturbed rounds with other bits than `expected`; any is wrong."""
    differ = 0
    for number in range(count):
        with disturbed(context, 1000 * context.rank + number):
            if not same(make(), expected):
                differ += 1
    context.hold(not differ, f"{name}: {differ} of {count} disturbed rounds have other bits")
    return f"{differ} of {count} disturbed rounds differ"


def stress(context: Context) -> None:
    """Steps under random delays, with freed memory overwritten, have undisturbed bits."""
    for name, rounds in (("owner", 200), ("teams", 50), ("NorMuon", 50)):
        call = functools.partial(on_ranks, context, VARIANTS[name], steps=TEN[:3])
        count = rounds if context.on_gpu else 3
        with context.trying(name):
            context.figures[name] = _rounds(context, name, count, call, call())


OFFLOADED: dict[str, Given] = {
    "host": {"offload": "cpu"},
    "half on the host": {"offload": "cpu", "offload_fraction": 0.5},
    "host, bf16": {"offload": "cpu", "momentum_dtype": "bf16"},
    "files": {"offload": "nvme"},
    "files, int8, small buffers": {
        "offload": "nvme",
        "momentum_dtype": "int8",
        "offload_buffer_mb": 1.0,
    },
}


def offload(context: Context) -> None:
    """Offloaded momentum, under delays, changes no bit; nor does a checkpoint, saved and resumed.

    The checkpoint is then resumed with matrices cut along columns and momentum in the other memory.
    Its figure is the largest error of a weight over the distance that it has moved: less than 1e-4.
    """
    for name, settings in OFFLOADED.items():
        stored = {"momentum_dtype": settings.get("momentum_dtype", "fp32")}
        if settings["offload"] == "nvme":
            settings = settings | {"offload_dir": str(context.folder)}
        call = functools.partial(trained, context.device, settings)
        count = 20 if context.on_gpu else 2
        with context.trying(name):
            expected = trained(context.device, stored)
            text = f"momentum in {name}"
            context.figures[name] = _rounds(context, text, count, call, expected)
    for name, other in (("none", "cpu"), ("cpu", "none")):
        with context.trying(f"checkpoint, offload {name}"):
            _check_checkpoint(context, name, other)


def _check_checkpoint(context: Context, name: str, other: str) -> None:
    """Resume a checkpoint of a run with `offload=name`, also with the other offload and columns."""
    saved = str(context.folder / f"checkpoint-{name}")
    run = functools.partial(on_ranks, context, {"offload": name})
    run(steps=TEN[:5], saved=saved)
    expected, resumed = run(), run(steps=TEN[5:], saved=saved)
    context.hold(same(resumed, expected), f"checkpoint, offload {name}: other bits")
    moved = on_ranks(context, {"offload": other}, steps=TEN[5:], saved=saved, cut=1)
    error = distance(moved, expected)
    label = f"saved with offload {name}, resumed with {other} and columns"
    context.figures[label] = error
    context.near(label, error, 1e-4)


def cost(context: Context) -> None:
    """Milliseconds of an optimizer's step on layers of llama3-8b (on a GPU) and on small matrices.

    "owner" is Muon by default; host_ms is the time until the step has been launched, peak_mb the
    memory in addition to weights and gradients. "owner / momentum on the host" is the remaining
    speed of a step with offload. Ratios and the planner's estimate are for information; memory may
    not grow.
    """
    models = {"small matrices": [(256, 512)] * 64 if context.on_gpu else [(64, 128)] * 4}
    if context.on_gpu:
        of_layer = 24 * sum(map(math.prod, LLAMA)) / context.ranks
        layers = min(32, int(0.6 * torch.cuda.mem_get_info()[0] / of_layer))
        models[f"llama3-8b, {layers} layers"] = LLAMA * layers
    else:
        context.skip("llama3-8b", "CUDA graph", "launches", "memory")
    now = replace(context, figures={}, skipped={}, wrong=[])
    machine(now)
    figures = context.figures
    for model, shapes in models.items():
        times: dict[str, float] = {}
        for label, make in _optimizers(context, shapes).items():
            case = f"{model}: {label}"
            with context.trying(case):
                found = _cost_of(context, make)
                figures[case] = found
                times[label] = found["step_ms"]
                grown = found.pop("grown_mb")
                context.hold(grown < 0.1, f"{case}: five steps left {grown:.1f} MiB behind")
        owner_ms = times.pop("owner", math.nan)
        for other, other_ms in times.items():
            figures[f"{model}: owner / {other}"] = owner_ms / other_ms
        planned_ms = step_ms(shapes, context.ranks, measured(now.figures))
        figures[f"{model}: planner's estimate, ms"] = planned_ms
        figures[f"{model}: error of the estimate, %"] = 100 * (planned_ms / owner_ms - 1)


COSTED: dict[str, Given] = {
    "owner": {},
    "all-gather": {"exchange": "allgather"},
    "NorMuon": {"moment2_method": "normuon"},
    "int8 momentum": {"momentum_dtype": "int8"},
    "CUDA graph": {"cuda_graph": True},
    "momentum on the host": {"offload": "cpu"},
}


def _optimizers(
    context: Context, shapes: Sequence[tuple[int, int]]
) -> dict[str, Callable[[], Any]]:
    """Makers of optimizers on the same weights with gradients, whose rows several ranks share."""
    mesh = init_device_mesh(context.device.type, (context.ranks,)) if context.ranks > 1 else None
    weights = []
    for shape in shapes:
        whole = torch.randn(shape, device=context.device)
        weight = nn.Parameter(on_mesh(whole, mesh).clone())
        weight.grad = weight.detach().clone()
        weights.append(weight)
    named = [(f"layers.{number}.weight", one) for number, one in enumerate(weights)]
    made: dict[str, Callable[[], Any]] = {}
    for name, given in COSTED.items():
        if context.on_gpu or "cuda_graph" not in given:
            made[name] = functools.partial(Muon, named, lr=1e-3, **given)
    if context.ranks == 1:
        made["torch.optim.Muon"] = functools.partial(torch.optim.Muon, weights, lr=1e-3)
    fused = context.on_gpu
    made["AdamW"] = functools.partial(torch.optim.AdamW, weights, lr=1e-3, fused=fused)
    return made


def _cost_of(context: Context, make: Callable[[], Any]) -> dict[str, float]:
    """Times of a step and of the host's part of it, memory left behind, and a GPU's figures."""
    gc.collect()
    before = torch.cuda.memory_allocated() if context.on_gpu else 0
    optimizer = make()
    hosts = list[float]()

    def step() -> None:
        begun = time.perf_counter()
        optimizer.step()
        hosts.append(time.perf_counter() - begun)

    for _ in range(4):  # a graph is captured in the third
        step()
    context.synchronize()
    state = _allocated(context)
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    figures = {"step_ms": 1e3 * context.seconds(step)}
    figures["host_ms"] = 1e3 * statistics.mean(hosts[-5:])
    figures["grown_mb"] = (_allocated(context) - state) / 2**20
    if context.on_gpu:
        peak = torch.cuda.max_memory_allocated()
        figures |= {"state_mb": (state - before) / 2**20, "peak_mb": (peak - before) / 2**20}
        figures["launches"] = _launches(optimizer)
    if hasattr(optimizer, "close"):
        optimizer.close()
    return figures


def _launches(optimizer: torch.optim.Optimizer) -> int:
    """The number of kernels of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        optimizer.step()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    return sum(not event.is_user_annotation for event in on_gpu)


def _allocated(context: Context) -> int:
    """Bytes of live tensors, on a CPU those of their storages."""
    if context.on_gpu:
        return torch.cuda.memory_allocated()
    ranges = set()
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, nn.Parameter):
            storage = one.untyped_storage()
            start = storage.data_ptr()
            ranges.add((start, start + storage.nbytes()))
    total = covered = 0
    for start, end in sorted(ranges):  # a storage may be a part of another's memory
        total += max(end - max(start, covered), 0)
        covered = max(covered, end)
    return total


_REPORT = "train without what fails here, and send the report"
CHECKS = {
    "machine": Check(machine, "see whether nvidia-smi and torch agree on the driver"),
    "arithmetic": Check(arithmetic, f"--muon-fp32-matmul-prec highest, or {_REPORT}", limit=3),
    "exchange": Check(exchange, f"another --muon-exchange, or {_REPORT}", limit=3),
    "stress": Check(stress, _REPORT, limit=4),
    "offload": Check(offload, f"--muon-offload none, or {_REPORT}", limit=2),
    "training": Check(training, _REPORT, limit=12),
    "cost": Check(cost, "send the report, as memory may grow", limit=2),
}
