"""Checks of `doctor --gpu`: optimizer steps on real or simulated ranks; the list of all checks.

The reference is the package's own step on whole matrices on the CPU, which the tests compare with
independent optimizers.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.passes import Passes
from megatron_muon.core.rows import Rows
from megatron_muon.fsdp.muon import Muon
from megatron_muon.offload.store import DISK, HOST, RecordStore
from megatron_muon.tools.doctor.gpu_checks import Context, arithmetic, machine, training

# A sixteenth of a layer of llama3-8b, odd matrices, and a stack of experts.
SHAPES: list[tuple[int, ...]] = [
    (256, 256),
    (64, 256),
    (896, 256),
    (256, 896),
    (256, 512),
    (333, 777),
    (64, 64),
    (1, 100),
    (100, 3),
    (6, 40, 24),
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
        name = "experts.weight" if start.dim() == 3 else "weight"
        shard = on_mesh(start.to(device), mesh, cut)
        named[f"layers.{at}.{name}"] = nn.Parameter(shard.clone())
    weights = list(named.values())
    base: Given = {
        "lr": 0.02,
        "fp32_matmul_prec": "highest",
        "exchange_buffer_mb": 8.0,
        "audit_interval": 0,
    }
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
    if settings.get("offload") == "nvme":
        settings = settings | {"offload_dir": str(context.folder)}

    if "cuda_graph" in settings:  # threads cannot capture at the same time
        return trained(context.device, settings)

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
    synchronize = torch.get_device_module(context.device).synchronize

    def waiting(*args: Any) -> Any:
        synchronize()
        work = join(*args)  # type: ignore[no-untyped-call]
        synchronize()
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
    goals = zip(expected, itertools.cycle(values(0)))
    for one, (goal, start) in zip(found, itertools.cycle(goals)):  # of each simulated rank
        moved = (goal - start).norm()
        errors.append((one - goal).norm() / moved)
    return float(torch.stack(errors).max())


def same(found: Weights, expected: Weights) -> bool:
    """True if two lists have the same bits."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


# Methods of a step that start late; `with_momentum` may be on a stream of its own.
DELAYED: list[tuple[type, str]] = [
    (Passes, "advance"),
    (Rows, "with_momentum"),
    (Passes, "descend"),
    (NewtonSchulz, "run"),
    (RecordStore, "_bring"),
    (RecordStore, "_return"),
]
SLEEP_CYCLES = (0, 0, 10_000, 200_000, 1_000_000)


@contextmanager
def disturbed(context: Context, seed: int) -> Iterator[None]:
    """Every stream of a step sleeps at random times, and freed memory is overwritten with NaN."""
    chance = random.Random(seed)

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def disturb(one: Any, *args: Any, **options: Any) -> Any:
            for stream in (None, *getattr(one, "_streams", ())):
                cycles = chance.choice(SLEEP_CYCLES)
                if context.on_gpu:
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(cycles)
                else:
                    time.sleep(cycles * 3e-9)
            for power in chance.sample(range(9, 22), 4):
                torch.full((2**power,), torch.nan, device=context.device)
            return method(one, *args, **options)

        return disturb

    with ExitStack() as patches:
        for owner, name in DELAYED:
            method = late(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, method))
        yield


VARIANTS: dict[str, Given] = {
    "owner": {},
    "teams": {"team_size": "2"},
    "all-gather": {"exchange": "allgather"},
    "shared": {"share_replicated": True},
    "NorMuon": {"moment2_method": "normuon"},
    "hyperball": {"hyperball": True, "weight_decay": 0.0},
    "CUDA graph": {"cuda_graph": True},
    "int8 momentum": {"momentum_dtype": "int8"},
    "bf16 iteration": {"fp32_matmul_prec": "medium"},
    "momentum on the host": {"offload": "cpu"},
    "half of it on the host": {"offload": "cpu", "offload_fraction": 0.5},
    "momentum in files": {"offload": "nvme", "offload_buffer_mb": 1.0},
}
# settings without effect on the reference
ALONE = ("team_size", "exchange", "share_replicated", "cuda_graph")
# A last bit may change how momentum is rounded.
ROUNDED = {"int8 momentum": 0.1, "bf16 iteration": 0.1}


def steps(context: Context) -> None:
    """Ten steps of each exchange, variant and offload, compared with a CPU's on whole matrices.

    Each step is audited too (`fsdp.audit`). The figure is the largest error of a weight over the
    distance that it has moved: less than 1e-4, int8 momentum and the iteration in bf16 0.1.
    Further rounds, in which streams sleep at random and freed memory is overwritten with NaN, must
    have the same bits. One process simulates four ranks.
    """
    for name, settings in VARIANTS.items():
        if "cuda_graph" in settings and not context.on_gpu:
            context.skipped.append(f"{name}: no GPU")
            continue
        with context.trying(name):
            _check_variant(context, name, settings)


def _check_variant(context: Context, name: str, settings: Given) -> None:
    alone = {}
    for key, value in settings.items():
        if key not in ALONE and not key.startswith("offload"):
            alone[key] = value
    with redirect_stdout(io.StringIO()) as said:
        made = on_ranks(context, settings | {"audit_interval": 1})
    for line in said.getvalue().splitlines():
        context.hold("warning: audit" not in line, f"{name}: {line}")
    error = distance(made, trained(torch.device("cpu"), alone))
    context.figures[name] = error
    context.near(f"{name}, from whole matrices", error, ROUNDED.get(name, 1e-4))
    rounds = 10 if context.on_gpu else 1
    differ = 0
    for number in range(rounds):
        with disturbed(context, 1000 * context.rank + number):
            if not same(on_ranks(context, settings), made):
                differ += 1
    context.hold(not differ, f"{name}: {differ} of {rounds} disturbed rounds have other bits")


def checkpoint(context: Context) -> None:
    """A checkpoint by torch, resumed, changes no bit; nor does resuming with offloaded momentum.

    It is then resumed with matrices cut along columns and momentum in the other memory. The figure
    is the largest error of a weight over the distance that it has moved: less than 1e-4.
    """
    for name, other in (("none", "cpu"), ("cpu", "none")):
        label = f"saved with offload {name}, resumed with {other} and columns"
        with context.trying(label):
            saved = str(context.folder / name)
            run = functools.partial(on_ranks, context, {"offload": name})
            run(steps=TEN[:5], saved=saved)
            expected = run()
            rest: Given = {"steps": TEN[5:], "saved": saved}
            is_same = same(run(**rest), expected)
            context.hold(is_same, f"resumed with offload {name}: other bits")
            moved = on_ranks(context, {"offload": other}, cut=1, **rest)
            error = context.figures[label] = distance(moved, expected)
            context.near(label, error, 1e-4)


CHECKS = {
    "machine": machine,
    "arithmetic": arithmetic,
    "steps": steps,
    "checkpoint": checkpoint,
    "training": training,
}
