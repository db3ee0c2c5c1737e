"""The checks that train: a model under `fully_shard` with checkpoints, Megatron's own loop, and what steps cost."""

from __future__ import annotations

import functools
import gc
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor, Shard

from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.core.memory import Memory
from megatron_muon.core.ranks import of_all_ranks
from megatron_muon.fsdp import arguments
from megatron_muon.fsdp.cuts import placed_shards
from megatron_muon.fsdp.muon import Muon
from megatron_muon.fsdp.views import View
from megatron_muon.shipped import QUICKSTART
from megatron_muon.tools.doctor.checks import Check, Context, Figures, arithmetic, machine, transformer_engine
from megatron_muon.tools.doctor.steps import LLAMA, VARIANTS, Named, exchange, offload, stress
from megatron_muon.tools.plan import training_step
from megatron_muon.tools.plan.estimate import HARDWARE, Group, Hardware, Settings, plan_group
from megatron_muon.tools.train.processes import environment, pretrain_program
from megatron_muon.tools.train.records import read_events

ROOT = Path(__file__).resolve().parents[2]


LINE = ("--split", "100,0,0", "--num-layers", "2", "--train-iters", "20", "--lr-decay-iters", "20", "--eval-iters", "0",
        "--eval-interval", "1000", "--log-interval", "1", "--muon-fp32-matmul-prec", "highest")  # fmt: skip
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
TRAININGS: Mapping[str, Sequence[str]] = {
    **{
        name: ("--data-parallel-sharding-strategy", name)
        for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    },
    "bf16": ("--bf16", *OVERLAP),
    "momentum on the host": ("--muon-offload", "cpu"),
    "all state on the host": ("--muon-offload", "cpu", "--muon-offload-state", "all", *OVERLAP),
    "files, int8": ("--muon-offload", "nvme", "--muon-offload-dir", ".", "--muon-momentum-dtype", "int8"),
    "NorMuon": ("--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", "normuon"),
    "hyperball": ("--muon-hyperball", "--weight-decay", "0"),
    "QK-clip": ("--qk-clip", "--qk-clip-threshold", "0.1"),
    "Adam": ("--optimizer", "adam"),
    "local layers": ("--transformer-impl", "local"),
    "local layers, QK-clip": ("--transformer-impl", "local", "--qk-clip", "--qk-clip-threshold", "0.1"),
}
ON_CPU = ("optim_grads_params", "optim", "QK-clip", "Adam")
OWN_REFERENCE = ("NorMuon", "hyperball", "QK-clip", "Adam", "local layers, QK-clip")
"""Those whose state or losses are others than plain Muon's: each beside one rank's run of the same, from its start."""
RESUMED = ("optim_grads_params", "bf16", "all state on the host")


def training(context: Context) -> Figures:
    """20 steps of the quickstart's model in Megatron's loop beside one rank's; plain Muon's last ten are resumed."""
    data = context.folder / "data"
    if context.rank == 0:
        words = ("-m", "megatron_muon.cli", "data", "prepare", "--suffix", ".py", "--input", str(ROOT))
        done = subprocess.run([sys.executable, *words, "--output", str(data)], capture_output=True, text=True)
        context.hold(done.returncode == 0, f"preparing data: {done.stderr}")
    has_te = context.on_gpu and not transformer_engine()
    names = [name for name in TRAININGS if has_te or "local" not in name] if context.on_gpu else ON_CPU
    plain, _ = _train(context, "reference", "--save", ".", "--save-interval", "10", alone=True)
    found: Figures = {}
    at_once = 4 if context.on_gpu and context.ranks == 1 else 1
    with ThreadPoolExecutor(at_once) as threads:
        for name, figures in zip(names, threads.map(functools.partial(_beside, context, plain), names), strict=True):
            found[name] = figures
            context.keep(found)
    muon, adam = (
        1e3 * _train(context, f"{name}, alone", *TRAININGS[name])[1]
        if at_once > 1
        else found[name].get("step, ms", 0.0)
        for name in ("optim_grads_params", "Adam")
    )
    return found | ({"Muon / Adam, step": muon / adam} if muon and adam else {})


def _beside(context: Context, plain: dict[int, float], name: str) -> Figures:
    """A training beside one rank's of the same, or beside the `plain` one, whose checkpoint of step 10 it loads."""
    flags, expected = [*TRAININGS[name], "--save", ".", "--save-interval", "15"], plain
    if name in OWN_REFERENCE:
        expected, _ = _train(context, f"{name}, one rank", *TRAININGS[name], alone=True)
    else:
        flags += ["--load", "../reference", "--ckpt-step", "10"]
    losses, seconds = _train(context, name, *flags)
    if not losses or not expected:
        return {}
    error = max(abs(value - expected[step]) for step, value in losses.items())
    close = 0.05 if any(word in name for word in ("bf16", "int8", "local")) else 5e-3
    context.hold(error < close, f"{name}: losses differ from one rank's by {error:.3g}; less than {close:g} is usual")
    if name in RESUMED:
        again, _ = _train(context, f"{name}, resumed", *TRAININGS[name], "--load", f"../{name}", "--ckpt-step", "15")
        same = bool(again) and all(losses[step] == value for step, value in again.items())
        context.hold(same, f"{name}: resumed {again}, at once {losses}")
    return {"last loss": losses[max(losses)], "from one rank": error, "step, ms": seconds * 1e3}


def _train(context: Context, name: str, *flags: str, alone: bool = False) -> tuple[dict[int, float], float]:
    """The losses of a run by step, and the median seconds of a step; empty where it failed.

    All ranks start it together, or the first one `alone` with the whole batch.
    """
    folder, ranks = context.folder / name, 1 if alone else context.ranks
    folder.mkdir(exist_ok=True)
    port = of_all_ranks(get_free_port())[0]
    micro = max(1, 8 // context.ranks)
    batch = ("--micro-batch-size", str(micro), "--global-batch-size", str(micro * context.ranks))
    logs = ("--tensorboard-dir", "tensorboard")
    unsaved = () if "--save" in flags else ("--unset", "--save", "--unset", "--save-interval")
    config = ("--config", str(QUICKSTART), "--data-path", "../data", "--device", context.device.type)
    command = [sys.executable, *pretrain_program(), *config, *LINE, *batch, *logs, *unsaved, *flags]
    env = environment(ranks) | {"MASTER_PORT": str(port), "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1")}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "WORLD_SIZE": str(ranks), "RANK": str(context.rank)}
    env |= {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    status = 0
    if not alone or context.rank == 0:
        with (folder / f"log.{context.rank}").open("w+") as log:
            status = subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=log, check=False).returncode
            log.seek(0)
            context.hold(status == 0, f"{name}: status {status}\n{''.join(log.readlines()[-30:])}")
    if any(of_all_ranks(status)):
        return {}, 0.0
    events = read_events(folder / "tensorboard")
    times = [point.value for point in events.points("iteration-time")][3:]
    return {point.step: point.value for point in events.points("lm loss")}, statistics.median(times or [0.0])


def cost(context: Context) -> Figures:
    """A step on the matrices of llama3-8b, as many layers as fit, and on small ones, beside torch's and the plan's."""
    figures: Figures = {}
    models = {"small matrices": [(256, 512)] * (64 if context.on_gpu else 4)}
    if context.on_gpu:
        of_layer = 24 * sum(math.prod(shape) for shape in LLAMA) / context.ranks
        layers = min(32, int(0.6 * torch.cuda.mem_get_info()[0] / of_layer))
        models[f"llama3-8b, {layers} layers"] = LLAMA * layers
    machine_now = profile(machine(context))
    for model, shapes in models.items():
        named = _weights(context, shapes)
        for label, make in _optimizers(named, context).items():
            with context.trying(f"{model}: {label}"):
                figures[f"{model}: {label}"] = found = _cost_of(context, make)
                grown = found.pop("grown_mb")
                context.hold(grown < 1.0, f"{model}: {label}: five steps left {grown:.1f} MiB behind")
        ours = figures.get(f"{model}: owner", {}).get("step_ms", math.nan)
        for other in ("AdamW", "torch.optim.Muon"):
            if theirs := figures.get(f"{model}: {other}"):
                figures[f"{model}: owner / {other}"] = ours / theirs["step_ms"]
        planned = planned_ms(shapes, context.ranks, machine_now)
        figures[f"{model}: plan"] = {"step_ms": planned, "error, %": 100 * (planned / ours - 1)}
        context.keep(figures)
    return figures


def _weights(context: Context, shapes: Sequence[tuple[int, int]]) -> Named:
    """Matrices with gradients, made on the device; their rows over the ranks where there are several."""
    mesh = init_device_mesh(context.device.type, (context.ranks,)) if context.ranks > 1 else None
    named = []
    for number, (rows, cols) in enumerate(shapes):
        one, gradient = torch.randn(2, rows // context.ranks, cols, device=context.device).mul_(0.02).unbind()
        if mesh is not None:
            one, gradient = (DTensor.from_local(each, mesh, [Shard(0)], run_check=False) for each in (one, gradient))
        named.append((f"layers.{number}.weight", nn.Parameter(one)))
        named[-1][1].grad = gradient
    return named


def _optimizers(named: Named, context: Context) -> dict[str, Callable[[], Any]]:
    """Makers, on the same parameters."""
    weights = [one for _, one in named]
    settings = {name: VARIANTS[name] for name in ("owner", "all-gather", "NorMuon", "int8 momentum", "CUDA graph")}
    settings["offload"] = {"offload": "cpu"}
    made: dict[str, Callable[[], Any]] = {
        name: functools.partial(Muon, named, lr=1e-3, **given) for name, given in settings.items()
        if context.on_gpu or name != "CUDA graph"
    }  # fmt: skip
    if context.ranks == 1:
        made["torch.optim.Muon"] = functools.partial(torch.optim.Muon, weights, lr=1e-3)
    return made | {"AdamW": functools.partial(torch.optim.AdamW, weights, lr=1e-3, fused=context.on_gpu)}


def _cost_of(context: Context, make: Callable[[], Any]) -> Figures:
    """Of one optimizer: the time of a step and the host's part of it, memory, and on a GPU launches."""
    before, hosts = _allocated(context), list[float]()
    optimizer = make()

    def step() -> None:
        begun = time.perf_counter()
        optimizer.step()
        hosts.append(time.perf_counter() - begun)

    step()
    step()
    context.synchronize()
    state = _allocated(context)
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    figures: Figures = {"step_ms": context.seconds(step, 5) * 1e3, "state_mb": (state - before) / 2**20}
    figures |= {"host_ms": statistics.median(hosts[3:]) * 1e3, "grown_mb": (_allocated(context) - state) / 2**20}
    if context.on_gpu:
        figures["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            optimizer.step()
            torch.cuda.synchronize()
        kernels = [one for one in profiled.events() if one.device_type.name == "CUDA"]
        figures |= {"launches": len(kernels), "kernels_ms": sum(one.device_time for one in kernels) / 1e3}
    if hasattr(optimizer, "close"):
        optimizer.close()
    return figures


def _allocated(context: Context) -> int:
    """Bytes of the tensors that are alive."""
    if context.on_gpu:
        return torch.cuda.memory_allocated()
    alive = (one.untyped_storage() for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter))
    return sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values())


def profile(measured: Figures) -> Hardware:
    """A machine for `plan` from what `machine` has measured; links that it could not, by the data sheet."""
    name = " ".join(measured.get("GPU", ["cpu"])[0].split(",")[0].lower().split()[1:2]) or "cpu"
    known = HARDWARE.get(f"{name}-sxm", HARDWARE["h100-sxm" if "GPU" in measured else "cpu-2core"])
    nodes = measured.get("nodes", 1)
    link = {"network_gb_per_s" if nodes > 1 else "node_gb_per_s": measured.get("all_to_all_gb_per_s")}
    return replace(
        known,
        name=f"measured {name}",
        bf16_tflops=measured["bf16_tflops"],
        fp32_tflops=measured["fp32_tflops"],
        memory_gb_per_s=measured["memory_gb_per_s"],
        node_ranks=max(1, measured["ranks"] // nodes) if measured["ranks"] > 1 else known.node_ranks,
        **{key: value for key, value in link.items() if value is not None},
    )


def planned_ms(shapes: Sequence[tuple[int, int]], ranks: int, hardware: Hardware) -> float:
    """What `plan` says of a step on these matrices: products and exchange, and elementwise work."""
    cut = {shape: placed_shards(View(shape), np.arange(ranks), [Shard(0)])[0] for shape in dict.fromkeys(shapes)}
    layout = Layout(ranks, tuple(Matrix(str(number), shape, cut[shape]) for number, shape in enumerate(shapes)))
    settings = Settings(None, Memory(2, hardware.iterate(arguments.iteration_of())))
    step_ms = plan_group(Group("fully_shard", layout), settings, hardware).step_ms
    held = sum(map(math.prod, shapes)) / ranks
    moved = held * (training_step.holder_bytes(settings) + training_step.owner_bytes(settings))
    return step_ms + moved / hardware.memory_gb_per_s / 1e6


_LOST = "what is named fails here: train without it, and send the report"
CHECKS = {
    "machine": Check(machine, "what the device is and reaches", "see whether nvidia-smi and torch agree on the driver"),
    "arithmetic": Check(arithmetic, "Newton-Schulz against fp64", f"try --muon-fp32-matmul-prec highest; {_LOST}"),
    "exchange": Check(exchange, "ranks step as whole matrices do", f"try --muon-exchange allgather; {_LOST}"),
    "stress": Check(stress, "no result depends on timing", _LOST, limit=4),
    "offload": Check(offload, "state moves and changes no bit", f"use --muon-offload none; {_LOST}", limit=2),
    "training": Check(training, "Megatron-FSDP trains as one rank", _LOST, limit=8),
    "cost": Check(
        cost, "what a step costs, and what plan says", "memory that stays behind adds up; send the report", 2
    ),
}
"""All of them in their order."""
