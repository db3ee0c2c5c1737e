"""The checks of steps: on rows of matrices, on real ranks or on simulated ones; under delays; with state elsewhere.

The reference is the package's own step on whole matrices on the processor, which the tests hold to independent
optimizers.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.fsdp.muon import Muon
from megatron_muon.offload.codecs import Codec, Int8
from megatron_muon.offload.store import DISK, HOST, RecordStore
from megatron_muon.tools.doctor import SKIPPED
from megatron_muon.tools.doctor.checks import Context

# The matrices of a layer of llama3-8b, in small with odd ones and a stack of experts.
LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
SHAPES: tuple[tuple[int, ...], ...] = (
    *((rows // 16, cols // 16) for rows, cols in LLAMA),
    *((256, 512), (333, 777), (64, 64), (1, 100), (100, 3)),
    (6, 40, 24),
)
SIMULATED = 4  # ranks that one process stands for
STEPS = 10
Given = dict[str, Any]


@functools.cache
def values(seed: int) -> list[torch.Tensor]:
    """Random numbers of `SHAPES`: of 0 the weights, of others gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * (0.02 if not seed else 1.0) for shape in SHAPES]


def on_mesh(tensor: torch.Tensor, mesh: DeviceMesh | None, dim: int = 0) -> torch.Tensor:
    """A tensor cut along a dimension over the ranks of a mesh that all have it; whole without one."""
    return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)


def trained(
    device: torch.device,
    settings: Given,
    mesh: DeviceMesh | None = None,
    *,
    steps: range = range(STEPS),
    cut: int = 0,
    saved: str = "",
) -> list[torch.Tensor]:
    """Whole weights, on the processor, after `steps` of Muon in true fp32 on matrices that are cut over a mesh.

    The checkpoint `saved` is written at the end, or read where steps begin later.
    """
    mesh = None if "share_replicated" in settings else mesh  # what is to be shared is whole
    weights = [nn.Parameter(on_mesh(one.to(device), mesh, cut).clone()) for one in values(0)]
    names = (f"layers.{number}.{'experts.' * (one.dim() == 3)}weight" for number, one in enumerate(weights))
    named = dict(zip(names, weights, strict=True))
    base: Given = {"lr": 0.02, "fp32_matmul_prec": "highest", "exchange_buffer_mb": 8.0}
    optimizer = Muon(named.items(), **(base | settings))
    state = {"weights": named, "optimizer": optimizer.state_dict()}
    if steps.start:
        load(state, checkpoint_id=saved)
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        for one, value in zip(weights, values(1 + step), strict=True):
            one.grad = torch.empty_like(one) if one.grad is None else one.grad  # a graph reads where it was captured
            one.grad.copy_(on_mesh(value.to(device), mesh, cut))
        optimizer.step()
    if saved and not steps.start:
        save(state | {"optimizer": optimizer.state_dict()}, checkpoint_id=saved)
    kept = sum(store.bytes[HOST] + store.bytes[DISK] for store in optimizer.stores)
    if not kept and settings.get("offload", "none") != "none":
        raise RuntimeError("nothing was offloaded")
    optimizer.close()
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach().cpu().clone() for one in weights]


def on_ranks(context: Context, settings: Given, **options: Any) -> list[torch.Tensor]:
    """What `trained` returns on this rank of several.

    In a process alone, threads are `SIMULATED` ranks, and all their weights follow each other. Their collectives are
    those that torch tests DTensor with; on a GPU each waits for all streams.
    """

    def call() -> list[torch.Tensor]:
        mesh = init_device_mesh(context.device.type, (dist.get_world_size(),))
        return trained(context.device, settings, mesh, **options)

    if context.ranks > 1:
        return call()
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store, found, failures = HashStore(), list[torch.Tensor](), list[BaseException]()
    join: Callable[..., Any] = threaded.Collective.join

    def waiting(*args: Any) -> Any:
        context.synchronize()
        work = join(*args)
        context.synchronize()
        return work

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=SIMULATED, store=store)
            found.extend(call())
            dist.destroy_process_group()
        except BaseException as failure:  # torch ends the others by SystemExit
            failures.append(failure)
            threaded.ProcessLocalGroup.exception_handle(failure)

    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        with mock.patch.object(threaded.Collective, "join", waiting), ThreadPoolExecutor(SIMULATED) as threads:
            list(threads.map(work, range(SIMULATED)))
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        _set_thread_isolation_mode(False)
    if failures:
        raise next((one for one in failures if isinstance(one, Exception)), failures[0])
    return found


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest distance of weights from those expected over how far these have moved; NaN where one is NaN."""
    moved = zip(found, itertools.cycle(expected), itertools.cycle(values(0)), strict=False)
    return float(torch.stack([(one - two).norm() / (two - start).norm() for one, two, start in moved]).max())


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
ALONE = ("team_size", "exchange", "share_replicated", "cuda_graph")  # settings that the reference goes without
# Where a last bit may change how momentum is rounded for storage, or be divided by the root of a small number.
ROUNDED = {"AdaMuon": 1e-2, "int8 momentum": 0.1, "bf16 iteration": 0.1}


def exchange(context: Context) -> None:
    """Ten steps of each exchange and each variant of Muon on ranks, compared with a CPU's on whole matrices.

    The figure is the largest error of a weight over how far it has moved: less than 1e-4, AdaMuon 0.01, int8 momentum
    and the iteration in bf16 0.1. A second run must have the same bits. One process simulates four ranks.
    """
    for name, settings in VARIANTS.items():
        if "cuda_graph" in settings and not context.on_gpu:
            context.figures[name] = SKIPPED
            continue
        alone = {key: value for key, value in settings.items() if key not in ALONE}
        is_graph = "cuda_graph" in settings  # threads cannot capture beside each other
        call = functools.partial(trained, context.device) if is_graph else functools.partial(on_ranks, context)
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
        places: list[tuple[Any, ...]] = [(ShardedMuon, name) for name in ("prepare", "apply", "_agree_on_gradients")]
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
        call = functools.partial(on_ranks, context, VARIANTS[name], steps=range(3))
        with context.trying(name):
            context.figures[name] = _rounds(context, name, rounds if context.on_gpu else 3, call, call())


OFFLOADED: dict[str, Given] = {
    "host": {"offload": "cpu"},
    "half on the host": {"offload": "cpu", "offload_fraction": 0.5},
    "host, bf16": {"offload": "cpu", "momentum_dtype": "bf16"},
    "files": {"offload": "nvme"},
    "files, int8, small buffers": {"offload": "nvme", "momentum_dtype": "int8", "offload_buffer_mb": 1.0},
}


def offload(context: Context) -> None:
    """Momentum on the host or in files, under delays, changes no bit; nor does a checkpoint that is saved and resumed.

    The checkpoint is then resumed with matrices cut along columns and momentum in the other memory. Its figure is the
    largest error of a weight over how far it has moved: less than 1e-4.
    """
    figures = context.figures
    for name, settings in OFFLOADED.items():
        expected = trained(context.device, {"momentum_dtype": settings.get("momentum_dtype", "fp32")})
        folder = {"offload_dir": str(context.folder)} if settings["offload"] == "nvme" else {}
        call = functools.partial(trained, context.device, settings | folder)
        with context.trying(name):
            figures[name] = _rounds(context, f"momentum in {name}", 20 if context.on_gpu else 2, call, expected)
    for name, there in (("none", "cpu"), ("cpu", "none")):
        with context.trying(f"checkpoint, offload {name}"):
            here, saved = {"offload": name}, str(context.folder / f"checkpoint-{name}")
            on_ranks(context, here, steps=range(5), saved=saved)
            expected, resumed = on_ranks(context, here), on_ranks(context, here, steps=range(5, STEPS), saved=saved)
            context.hold(same(resumed, expected), f"checkpoint, offload {name}: other bits")
            moved = on_ranks(context, {"offload": there}, steps=range(5, STEPS), saved=saved, cut=1)
            error = figures[f"saved with offload {name}, resumed with {there} and columns"] = distance(moved, expected)
            context.near(f"checkpoint of offload {name}, resumed with {there} and columns", error, 1e-4)
