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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.fsdp.muon import Muon
from megatron_muon.offload.codecs import Codec, Int8
from megatron_muon.offload.store import RecordStore
from megatron_muon.tools.doctor import SKIPPED
from megatron_muon.tools.doctor.checks import Context, Figures

LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
"""The matrices of a layer of llama3-8b."""
SHAPES: tuple[tuple[int, ...], ...] = (
    *((rows // 16, cols // 16) for rows, cols in LLAMA),
    *((256, 512), (333, 777), (64, 64), (1, 100), (100, 3)),
    (6, 40, 24),
)
"""That layer in small, odd matrices, and a stack of experts."""
SIMULATED = 4
"""Ranks that one process stands for."""
STEPS = 10

Named = list[tuple[str, nn.Parameter]]


@functools.cache
def values(seed: int) -> list[torch.Tensor]:
    """Random numbers of `SHAPES`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters(device: torch.device) -> Named:
    """Named matrices, the same on every device."""
    weights = [nn.Parameter((0.02 * one).to(device)) for one in values(0)]
    names = (f"layers.{number}.{'experts.' * (one.dim() == 3)}weight" for number, one in enumerate(weights))
    return list(zip(names, weights, strict=True))


def give_gradients(named: Named, step: int) -> None:
    """Fill in the gradients of a step, in the tensors that were there."""
    for (_, one), value in zip(named, values(1 + step), strict=True):
        if one.grad is None:
            one.grad = torch.empty_like(one)
        one.grad.copy_(value)


def muon(named: Named, **settings: Any) -> Muon:
    """Muon of these in true fp32 unless `settings` have another precision."""
    base: dict[str, Any] = {"lr": 0.02, "fp32_matmul_prec": "highest"}
    return Muon(named, exchange_buffer_mb=8.0, **(base | settings))


def trained(device: torch.device, **settings: Any) -> list[torch.Tensor]:
    """Weights and momentum after ten steps of Muon on whole matrices, copied to the processor."""
    named = parameters(device)
    optimizer = muon(named, **settings)
    for step in range(STEPS):
        give_gradients(named, step)
        optimizer.step()
    momentum = optimizer.momentum_state()
    found = [one.detach().cpu().clone() for one in (*(one for _, one in named), *(momentum[one] for _, one in named))]
    optimizer.close()
    return found


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest distance between tensors, as a share of how far the second ones have moved in training."""
    first = [one.detach() for _, one in parameters(torch.device("cpu"))]
    first += [torch.zeros_like(one) for one in first]  # momentum
    moved = zip(found, expected, first, strict=False)
    return max(float((one - two).norm() / (two - start).norm()) for one, two, start in moved)


VARIANTS: dict[str, dict[str, Any]] = {
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
}
ALONE = ("team_size", "exchange", "share_replicated", "cuda_graph")
"""Settings that the reference goes without."""
ROUNDED = {"AdaMuon": 1e-2, "int8 momentum": 0.1}
"""Where a last bit may change how momentum is rounded for storage, or be divided by the root of a small number."""


def on_ranks(context: Context, settings: dict[str, Any], **options: Any) -> list[torch.Tensor]:
    """Whole weights after ten steps on cut matrices, as this rank of several has them; see `_trained_on_ranks`.

    In a process alone, threads are `SIMULATED` ranks, and all their weights follow each other. Their collectives are
    those that torch tests DTensor with; on a GPU each waits for all streams.
    """
    call = functools.partial(_trained_on_ranks, context.device, settings, **options)
    if context.ranks > 1:
        return call()
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store, found, failures = HashStore(), list[torch.Tensor](), list[Exception]()
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
        except Exception as failure:
            failures.append(failure)
            threaded.ProcessLocalGroup.exception_handle(failure)

    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        with mock.patch.object(threaded.Collective, "join", waiting), ThreadPoolExecutor(SIMULATED) as threads:
            list(threads.map(work, range(SIMULATED)))
    finally:
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
    if failures:
        raise failures[0]
    return found


def _trained_on_ranks(
    device: torch.device, settings: dict[str, Any], *, steps: range = range(STEPS), cut: int = 0, saved: str = ""
) -> list[torch.Tensor]:
    """On a rank of the default group: whole weights after `steps` on matrices that are cut along a dimension.

    What is to be shared stays whole. The checkpoint `saved` is written at the end, or read where steps begin later.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole, is_shared = parameters(device), "share_replicated" in settings

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if is_shared else distribute_tensor(tensor, mesh, [Shard(cut)], src_data_rank=None)

    named = [(name, nn.Parameter(placed(one.detach().clone()))) for name, one in whole]
    optimizer = muon(named, **settings)
    state = {"weights": dict(named), "optimizer": optimizer.state_dict()}
    if steps.start:
        load(state, checkpoint_id=saved)
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        give_gradients(whole, step)
        for (_, one), (_, of) in zip(named, whole, strict=True):
            one.grad = placed(of.grad)  # type: ignore[arg-type]
        optimizer.step()
    if saved and not steps.start:
        save(state | {"optimizer": optimizer.state_dict()}, checkpoint_id=saved)
    optimizer.close()
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach().cpu().clone() for _, one in named]


def exchange(context: Context) -> Figures:
    """Ten steps of all schemes and variants, twice, beside the processor's on whole matrices."""
    figures: Figures = {}
    for name, settings in VARIANTS.items():
        if "cuda_graph" in settings and not context.on_gpu:
            figures[name] = SKIPPED
            continue
        alone = {key: value for key, value in settings.items() if key not in ALONE}
        with context.trying(name):
            expected = trained(torch.device("cpu"), **alone)
            if "cuda_graph" in settings:  # threads cannot capture beside each other
                made, again = (trained(context.device, **settings)[: len(SHAPES)] for _ in range(2))
            else:
                made, again = (on_ranks(context, settings) for _ in range(2))
            error = figures[name] = max(distance(some, expected) for some in itertools.batched(made, len(SHAPES)))
            context.hold(all(map(torch.equal, made, again)), f"{name}: other bits the second time")
            limit = ROUNDED.get(name, 1e-4)
            context.hold(error < limit, f"{name}: {error:.3g} from whole matrices; less than {limit:g} is usual")
    return figures


@contextmanager
def disturbed(context: Context, seed: int) -> Iterator[None]:
    """Every stream of a step sleeps at random times, and memory that it frees is overwritten with NaN at once."""
    chance = random.Random(seed)

    def sleep(cycles: Sequence[int]) -> None:
        if context.on_gpu:
            torch.cuda._sleep(chance.choice(cycles))
        else:
            time.sleep(chance.choice(cycles) * 3e-9)

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def disturb(*args: Any, **options: Any) -> Any:
            sleep((0, 0, 10_000, 200_000, 1_000_000))
            for power in chance.sample(range(9, 22), 4):
                torch.full((2**power,), torch.nan, device=context.device)
            return call(*args, **options)

        return disturb

    def copying(method: Callable[..., Any], stream: int) -> Callable[..., Any]:
        def disturb(store: RecordStore, *args: Any) -> Any:
            with torch.cuda.stream(store._streams[stream]) if context.on_gpu else ExitStack():
                sleep((0, 10_000, 1_000_000))
            return method(store, *args)

        return disturb

    with ExitStack() as patches:
        for owner, name in ((ShardedMuon, "prepare"), (ShardedMuon, "apply"), (ShardedMuon, "_agree_on_gradients"),
                            (Orthogonalizer, "orthogonalize_stack"), (Codec, "decode"), (Int8, "encode")):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, before(getattr(owner, name))))
        for name, stream in (("_bring", 0), ("_return", 1)):
            patches.enter_context(mock.patch.object(RecordStore, name, copying(getattr(RecordStore, name), stream)))
        yield


def _rounds(context: Context, what: str, count: int, make: Callable[[], Any], expected: Any) -> str:
    """How many of so many disturbed rounds have other bits than `expected`; none may."""
    differ = 0
    for number in range(count):
        with disturbed(context, 1000 * context.rank + number):
            differ += not all(map(torch.equal, make(), expected))
    context.hold(not differ, f"{what}: {differ} of {count} disturbed rounds have other bits")
    return f"{differ} of {count} disturbed rounds differ"


def stress(context: Context) -> Figures:
    """Steps under random delays of every stream, with freed memory overwritten, have the bits of undisturbed ones."""
    figures: Figures = {}
    for name, rounds in (("owner", 200), ("teams", 50), ("NorMuon", 50)):
        call = functools.partial(on_ranks, context, VARIANTS[name], steps=range(3))
        figures[name] = _rounds(context, name, rounds if context.on_gpu else 3, call, call())
    return figures


OFFLOADED: dict[str, dict[str, Any]] = {
    "host": {"offload": "cpu"},
    "half on the host": {"offload": "cpu", "offload_fraction": 0.5},
    "host, bf16": {"offload": "cpu", "momentum_dtype": "bf16"},
    "files": {"offload": "nvme"},
    "files, int8, small buffers": {"offload": "nvme", "momentum_dtype": "int8", "offload_buffer_mb": 1.0},
}


def offload(context: Context) -> Figures:
    """Momentum on the host or in files, under delays, changes no bit; nor does a checkpoint of five steps.

    The same checkpoint is then read where matrices are cut along columns, with momentum in the other memory.
    """
    figures: Figures = {}
    for name, settings in OFFLOADED.items():
        expected = trained(context.device, momentum_dtype=settings.get("momentum_dtype", "fp32"))
        folder = {"offload_dir": str(context.folder)} if settings["offload"] == "nvme" else {}
        call = functools.partial(trained, context.device, **settings, **folder)
        with context.trying(name):
            figures[name] = _rounds(context, f"momentum in {name}", 20 if context.on_gpu else 2, call, expected)
    for name, there in (("none", "cpu"), ("cpu", "none")):
        with context.trying(f"checkpoint, offload {name}"):
            here, saved = {"offload": name}, str(context.folder / f"checkpoint-{name}")
            on_ranks(context, here, steps=range(5), saved=saved)
            expected, resumed = on_ranks(context, here), on_ranks(context, here, steps=range(5, STEPS), saved=saved)
            context.hold(all(map(torch.equal, resumed, expected)), f"checkpoint, offload {name}: other bits")
            moved = on_ranks(context, {"offload": there}, steps=range(5, STEPS), saved=saved, cut=1)
            error = figures[f"checkpoint from {name} to {there}, columns"] = distance(moved[: len(SHAPES)], expected)
            context.hold(error < 1e-4, f"checkpoint from {name} to {there}, along columns: {error:.3g} off")
    return figures
