"""The checks of steps on ranks, real or simulated ones: results, delays, offload, cost; and the list of all checks.

The reference is the package's own step on whole matrices on the processor, which the tests hold to
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
from contextlib import ExitStack, contextmanager
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
from megatron_muon.tools.doctor.checks import Check, Context, arithmetic, machine, training
from megatron_muon.tools.plan import planned_shards as plan
from megatron_muon.tools.plan.estimate import measured

# The matrices of a layer of llama3-8b, in small with odd ones and a stack of experts.
LLAMA = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
]
SHAPES: list[tuple[int, ...]] = [(rows // 16, cols // 16) for rows, cols in LLAMA]
SHAPES += [(256, 512), (333, 777), (64, 64), (1, 100), (100, 3), (6, 40, 24)]
SIMULATED = 4  # ranks that one process stands for
TEN = range(10)
Given = dict[str, Any]
Mesh = DeviceMesh | None


@functools.cache
def values(seed: int) -> list[torch.Tensor]:
    """Random numbers of `SHAPES`: of 0 the weights, of others gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) * (0.02 if not seed else 1.0) for shape in SHAPES
    ]


def on_mesh(tensor: torch.Tensor, mesh: Mesh, dim: int = 0) -> torch.Tensor:
    """A tensor cut along a dimension over the ranks of a mesh that all have it; whole without one."""
    return (
        tensor
        if mesh is None
        else distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
    )


def trained(
    device: torch.device,
    settings: Given,
    mesh: Mesh = None,
    *,
    steps: range = TEN,
    cut: int = 0,
    saved: str = "",
) -> list[torch.Tensor]:
    """Whole weights, on the processor, after `steps` of Muon in true fp32 on matrices that are cut over a mesh.

    The checkpoint `saved` is written at the end, or read where steps begin later.
    """
    mesh = None if "share_replicated" in settings else mesh  # what is to be shared is whole
    weights = [nn.Parameter(on_mesh(one.to(device), mesh, cut).clone()) for one in values(0)]
    named = {
        f"layers.{at}.{'experts.' * (one.dim() == 3)}weight": one for at, one in enumerate(weights)
    }
    base: Given = {"lr": 0.02, "fp32_matmul_prec": "highest", "exchange_buffer_mb": 8.0}
    optimizer = Muon(named.items(), **(base | settings))
    state = {"weights": named, "optimizer": optimizer.state_dict()}
    if steps.start:
        load(state, checkpoint_id=saved)
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        for one, value in zip(weights, values(1 + step), strict=True):
            # a graph reads where it was captured
            one.grad = torch.empty_like(one) if one.grad is None else one.grad
            one.grad.copy_(on_mesh(value.to(device), mesh, cut))
        optimizer.step()
    if saved and not steps.start:
        save(state | {"optimizer": optimizer.state_dict()}, checkpoint_id=saved)
    kept = sum(store.bytes[HOST] + store.bytes[DISK] for store in optimizer.stores)
    if not kept and settings.get("offload", "none") != "none":
        raise RuntimeError("nothing was offloaded")
    optimizer.close()
    return [
        (one.full_tensor() if isinstance(one, DTensor) else one).detach().cpu().clone()
        for one in weights
    ]


def on_ranks(context: Context, settings: Given, **options: Any) -> list[torch.Tensor]:
    """What `trained` returns on this rank of several.

    In a process alone, threads are `SIMULATED` ranks, and all their weights follow each other.
    Their collectives are those that torch tests DTensor with; on a GPU each waits for all streams.
    """

    def call() -> list[torch.Tensor]:
        mesh = init_device_mesh(context.device.type, (dist.get_world_size(),))
        return trained(context.device, settings, mesh, **options)

    if context.ranks > 1:
        return call()
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

    def work(rank: int) -> list[torch.Tensor]:
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
    try:
        with (
            mock.patch.object(threaded.Collective, "join", waiting),
            ThreadPoolExecutor(SIMULATED) as threads,
        ):
            made = [threads.submit(work, rank) for rank in range(SIMULATED)]
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        _set_thread_isolation_mode(False)
    for one in sorted(made, key=lambda one: not isinstance(one.exception(), Exception)):
        one.result()
    return [weight for one in made for weight in one.result()]


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest distance of weights from those expected over how far these have moved; NaN where one is NaN."""
    moved = zip(found, itertools.cycle(expected), itertools.cycle(values(0)), strict=False)
    return float(
        torch.stack([(one - two).norm() / (two - start).norm() for one, two, start in moved]).max()
    )


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether two lists have the same bits."""
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
# settings that the reference goes without
ALONE = ("team_size", "exchange", "share_replicated", "cuda_graph")
# Where a last bit may change how momentum is rounded for storage, or be divided by the root of a
# small number.
ROUNDED = {"AdaMuon": 1e-2, "int8 momentum": 0.1, "bf16 iteration": 0.1}


def exchange(context: Context) -> None:
    """Ten steps of each exchange and each variant of Muon on ranks, compared with a CPU's on whole matrices.

    The figure is the largest error of a weight over how far it has moved: less than 1e-4, AdaMuon
    0.01, int8 momentum and the iteration in bf16 0.1. A second run must have the same bits. One
    process simulates four ranks.
    """
    for name, settings in VARIANTS.items():
        if "cuda_graph" in settings and not context.on_gpu:
            context.skip(name)
            continue
        alone = {key: value for key, value in settings.items() if key not in ALONE}
        is_graph = "cuda_graph" in settings  # threads cannot capture beside each other
        call = (
            functools.partial(trained, context.device)
            if is_graph
            else functools.partial(on_ranks, context)
        )
        with context.trying(name):
            expected = trained(torch.device("cpu"), alone)
            made, again = call(settings), call(settings)
            error = context.figures[name] = distance(made, expected)
            context.hold(same(made, again), f"{name}: other bits the second time")
            context.near(f"{name}, from whole matrices", error, ROUNDED.get(name, 1e-4))


@contextmanager
def disturbed(context: Context, seed: int) -> Iterator[None]:
    """Every stream of a step sleeps at random times, and memory that it frees is overwritten with NaN at once."""
    chance = random.Random(seed)
    sleep = torch.cuda._sleep if context.on_gpu else lambda cycles: time.sleep(cycles * 3e-9)

    def late(owner: type, name: str, stream: int | None = None) -> Any:
        method = getattr(owner, name)

        def disturb(one: Any, *args: Any, **options: Any) -> Any:
            there = stream is not None and context.on_gpu
            with torch.cuda.stream(one._streams[stream]) if there else ExitStack():
                sleep(chance.choice((0, 0, 10_000, 200_000, 1_000_000)))
            for power in chance.sample(range(9, 22), 4) if stream is None else ():
                torch.full((2**power,), torch.nan, device=context.device)
            return method(one, *args, **options)

        return mock.patch.object(owner, name, disturb)

    with ExitStack() as patches:
        places: list[tuple[Any, ...]] = [
            (ShardedMuon, name) for name in ("prepare", "apply", "_agree_on_gradients")
        ]
        places += [(Orthogonalizer, "orthogonalize_stack"), (Codec, "decode"), (Int8, "encode")]
        for place in (*places, (RecordStore, "_bring", 0), (RecordStore, "_return", 1)):
            patches.enter_context(late(*place))
        yield


def _rounds(context: Context, what: str, count: int, make: Callable[[], Any], expected: Any) -> str:
    """How many of so many disturbed rounds have other bits than `expected`; none may."""
    differ = 0
    for number in range(count):
        with disturbed(context, 1000 * context.rank + number):
            differ += not same(make(), expected)
    context.hold(not differ, f"{what}: {differ} of {count} disturbed rounds have other bits")
    return f"{differ} of {count} disturbed rounds differ"


def stress(context: Context) -> None:
    """Steps under random delays (on a GPU of all streams), with freed memory overwritten, have undisturbed bits."""
    for name, rounds in (("owner", 200), ("teams", 50), ("NorMuon", 50)):
        call = functools.partial(on_ranks, context, VARIANTS[name], steps=TEN[:3])
        with context.trying(name):
            context.figures[name] = _rounds(
                context, name, rounds if context.on_gpu else 3, call, call()
            )


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
    """Momentum on the host or in files, under delays, changes no bit; nor does a checkpoint that is saved and resumed.

    The checkpoint is then resumed with matrices cut along columns and momentum in the other memory.
    Its figure is the largest error of a weight over how far it has moved: less than 1e-4.
    """
    figures = context.figures
    for name, settings in OFFLOADED.items():
        expected = trained(
            context.device, {"momentum_dtype": settings.get("momentum_dtype", "fp32")}
        )
        folder = {"offload_dir": str(context.folder)} if settings["offload"] == "nvme" else {}
        call = functools.partial(trained, context.device, settings | folder)
        with context.trying(name):
            figures[name] = _rounds(
                context, f"momentum in {name}", 20 if context.on_gpu else 2, call, expected
            )
    for name, there in (("none", "cpu"), ("cpu", "none")):
        with context.trying(f"checkpoint, offload {name}"):
            here, saved = {"offload": name}, str(context.folder / f"checkpoint-{name}")
            on_ranks(context, here, steps=TEN[:5], saved=saved)
            expected, resumed = (
                on_ranks(context, here),
                on_ranks(context, here, steps=TEN[5:], saved=saved),
            )
            context.hold(same(resumed, expected), f"checkpoint, offload {name}: other bits")
            moved = on_ranks(context, {"offload": there}, steps=TEN[5:], saved=saved, cut=1)
            error = figures[f"saved with offload {name}, resumed with {there} and columns"] = (
                distance(moved, expected)
            )
            context.near(
                f"checkpoint of offload {name}, resumed with {there} and columns", error, 1e-4
            )


def cost(context: Context) -> None:
    """Milliseconds of an optimizer's step, on a GPU on as many layers of llama3-8b as fit, and on small matrices.

    "owner" is Muon as it is by default; host_ms is the time until the step has been launched,
    peak_mb the memory beside weights and gradients. "owner / momentum on the host" is what offload
    leaves of a step's speed. Ratios and the planner's estimate are for information; memory may not
    grow.
    """
    figures, now = context.figures, replace(context, figures={}, skipped={}, wrong=[])
    models = {"small matrices": [(256, 512)] * (64 if context.on_gpu else 4)}
    if not context.on_gpu:
        context.skip("llama3-8b", "CUDA graph", "launches", "memory")
    else:
        of_layer = 24 * sum(math.prod(shape) for shape in LLAMA) / context.ranks
        layers = min(32, int(0.6 * torch.cuda.mem_get_info()[0] / of_layer))
        models[f"llama3-8b, {layers} layers"] = LLAMA * layers
    machine(now)
    for model, shapes in models.items():
        steps: dict[str, float] = {}
        for label, make in _optimizers(context, shapes).items():
            with context.trying(f"{model}: {label}"):
                figures[f"{model}: {label}"] = found = _cost_of(context, make)
                steps[label], grown = found["step_ms"], found.pop("grown_mb")
                context.hold(
                    grown < 0.1, f"{model}: {label}: five steps left {grown:.1f} MiB behind"
                )
        planned, ours = (
            plan.step_ms(shapes, context.ranks, measured(now.figures)),
            steps.pop("owner", math.nan),
        )
        figures |= {
            f"{model}: owner / {other}": ours / other_ms for other, other_ms in steps.items()
        }
        figures[f"{model}: planner's estimate, ms"] = planned
        figures[f"{model}: error of the estimate, %"] = 100 * (planned / ours - 1)


def _optimizers(
    context: Context, shapes: Sequence[tuple[int, int]]
) -> dict[str, Callable[[], Any]]:
    """Makers of optimizers on the same weights with gradients, their rows over the ranks where there are several."""
    mesh = init_device_mesh(context.device.type, (context.ranks,)) if context.ranks > 1 else None
    weights = [
        nn.Parameter(on_mesh(torch.randn(shape, device=context.device), mesh).clone())
        for shape in shapes
    ]
    for one in weights:
        one.grad = one.detach().clone()
    named = [(f"layers.{number}.weight", one) for number, one in enumerate(weights)]
    names = (
        "owner",
        "all-gather",
        "NorMuon",
        "int8 momentum",
        *(("CUDA graph",) if context.on_gpu else ()),
    )
    settings = {name: VARIANTS[name] for name in names} | {
        "momentum on the host": {"offload": "cpu"}
    }
    made: dict[str, Callable[[], Any]]
    made = {
        name: functools.partial(Muon, named, lr=1e-3, **given) for name, given in settings.items()
    }
    if context.ranks == 1:
        made["torch.optim.Muon"] = functools.partial(torch.optim.Muon, weights, lr=1e-3)
    return made | {
        "AdamW": functools.partial(torch.optim.AdamW, weights, lr=1e-3, fused=context.on_gpu)
    }


def _cost_of(context: Context, make: Callable[[], Any]) -> dict[str, float]:
    """Of one optimizer: the time of a step and the host's part of it, and on a GPU memory and launches."""
    gc.collect()
    before, hosts, optimizer = _allocated(context), list[float](), make()

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
    figures = {"step_ms": context.seconds(step) * 1e3, "host_ms": statistics.mean(hosts[-5:]) * 1e3}
    figures["grown_mb"] = (_allocated(context) - state) / 2**20
    if context.on_gpu:
        peak = torch.cuda.max_memory_allocated()
        figures |= {"state_mb": (state - before) / 2**20, "peak_mb": (peak - before) / 2**20}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            optimizer.step()
            torch.cuda.synchronize()
        kernels = [
            one
            for one in profiled.events()
            if one.device_type.name == "CUDA" and not one.is_user_annotation
        ]
        figures |= {
            "launches": len(kernels),
            "kernels_ms": sum(one.device_time for one in kernels) / 1e3,
        }
    if hasattr(optimizer, "close"):
        optimizer.close()
    return figures


def _allocated(context: Context) -> int:
    """Bytes of the tensors that are alive."""
    if context.on_gpu:
        return torch.cuda.memory_allocated()
    alive = (
        one.untyped_storage()
        for one in gc.get_objects()
        if type(one) in (torch.Tensor, nn.Parameter)
    )
    total, end = 0, 0
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in alive):
        # a storage may be a part of another's memory
        total += max(start + size - max(start, end), 0)
        end = max(end, start + size)
    return total


_LOST = "train without what fails here, and send the report"
CHECKS = {
    "machine": Check(
        machine, "the device, and its speed", "see whether nvidia-smi and torch agree on the driver"
    ),
    "arithmetic": Check(
        arithmetic,
        "Newton-Schulz is that of fp64",
        f"--muon-fp32-matmul-prec highest, or {_LOST}",
        3,
    ),
    "exchange": Check(
        exchange,
        "steps on ranks are those on whole matrices",
        f"other --muon-exchange, or {_LOST}",
        3,
    ),
    "stress": Check(stress, "results do not depend on timing", _LOST, 4),
    "offload": Check(
        offload, "offload and checkpoints change no result", f"--muon-offload none, or {_LOST}", 2
    ),
    "training": Check(training, "training on ranks is that on one", _LOST, 12),
    "cost": Check(
        cost,
        "what a step costs, and the planner's estimate",
        "send the report, as memory may grow",
        2,
    ),
}
