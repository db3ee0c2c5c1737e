"""The checks that train in Megatron's own loop, and of what a step costs; and the list of all checks."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port

from megatron_muon.core.ranks import of_all_ranks
from megatron_muon.fsdp.muon import Muon
from megatron_muon.megatron.gpu import no_transformer_engine
from megatron_muon.shipped import QUICKSTART
from megatron_muon.tools.doctor import SKIPPED
from megatron_muon.tools.doctor.checks import Check, Context, arithmetic, machine
from megatron_muon.tools.doctor.steps import LLAMA, VARIANTS, exchange, offload, on_mesh, stress
from megatron_muon.tools.plan import command as plan
from megatron_muon.tools.plan.estimate import measured
from megatron_muon.tools.train.processes import environment, pretrain_program
from megatron_muon.tools.train.records import read_events

ROOT = Path(__file__).resolve().parents[2]
LINE = ("--split", "100,0,0", "--num-layers", "2", "--train-iters", "20", "--lr-decay-iters", "20", "--eval-iters", "0",
        "--eval-interval", "1000", "--log-interval", "1", "--muon-fp32-matmul-prec", "highest",
        "--tensorboard-dir", "tensorboard", "--data-path", "../data")  # fmt: skip
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
    "files, int8": ("--muon-offload", "nvme", "--muon-offload-dir", ".", "--muon-momentum-dtype", "int8"),
    "NorMuon": ("--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", "normuon"),
    "hyperball": ("--muon-hyperball", "--weight-decay", "0"),
    "QK-clip": QK_CLIP,
    "Adam": ("--optimizer", "adam"),
    "local layers": ("--transformer-impl", "local"),
    "local layers, QK-clip": ("--transformer-impl", "local", *QK_CLIP),
}
ON_CPU = ("optim_grads_params", "optim", "QK-clip", "Adam")
# Those whose state or losses are others than plain Muon's: each beside one rank's run of the same, from its start.
OWN_REFERENCE = ("NorMuon", "hyperball", "QK-clip", "Adam", "local layers", "local layers, QK-clip")
RESUMED = ("optim_grads_params", "bf16", "all state on the host")


def training(context: Context) -> None:
    """20 steps of the quickstart's model in Megatron's loop, compared with the same run on one rank.

    Plain Muon's runs begin at one rank's checkpoint of step 10. The largest difference of a loss is less than 0.005, in
    bf16 and with int8 momentum 0.05; a run that is resumed has the same losses. Losses are no measure of
    quality. With one rank in all, a run is compared with itself.
    """
    if context.rank == 0:
        words = ("-m", "megatron_muon.cli", "data", "prepare", "--suffix", ".py", "--input", str(ROOT), "--output")
        done = subprocess.run([sys.executable, *words, "data"], cwd=context.folder, capture_output=True, text=True)
        context.hold(done.returncode == 0, f"preparing data: {done.stderr}")
    has_te = context.on_gpu and not no_transformer_engine()
    names = [name for name in TRAININGS if has_te or "local" not in name] if context.on_gpu else ON_CPU
    why = "skipped: no Transformer Engine" if context.on_gpu else SKIPPED
    plain, _ = _train(context, "reference", "--save", ".", "--save-interval", "10", alone=True)
    at_once = 4 if context.on_gpu and context.ranks == 1 else 1
    with ThreadPoolExecutor(at_once) as threads:
        for name, figures in zip(names, threads.map(functools.partial(_beside, context, plain), names), strict=True):
            context.figures[name] = figures
            context.keep(now=f"after {name}")
    step_s = [_train(context, f"{name}, alone", *TRAININGS[name])[1] for name in ("optim_grads_params", "Adam")]
    context.figures |= {name: why for name in TRAININGS if name not in names}
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
    error = float(torch.tensor([value - expected[step] for step, value in losses.items()]).abs().max())
    close = 0.05 if any(word in name for word in ("bf16", "int8")) else 5e-3
    context.near(f"{name}: losses beside one rank's", error, close)
    found: dict[str, Any] = {"last loss": losses[max(losses)], "largest difference": error}
    if name in RESUMED:
        again, _ = _train(context, f"{name}, resumed", *TRAININGS[name], "--load", f"../{name}", "--ckpt-step", "15")
        same = bool(again) and all(losses[step] == value for step, value in again.items())
        context.hold(same, f"{name}: resumed {again}, at once {losses}")
        found["resumed"] = "the same losses" if same else "other losses"
    return found


def _train(context: Context, name: str, *flags: str, alone: bool = False) -> tuple[dict[int, float], float]:
    """The losses of a run by step, and the median seconds of a step; empty where it failed.

    All ranks start it together, or the first one `alone` with the whole batch.
    """
    folder, ranks = context.folder / name, 1 if alone else context.ranks
    folder.mkdir(exist_ok=True)
    port = of_all_ranks(get_free_port())[0]
    micro = max(1, 8 // context.ranks)
    batch = ("--micro-batch-size", str(micro), "--global-batch-size", str(micro * context.ranks))
    unsaved = () if "--save" in flags else ("--unset", "--save", "--unset", "--save-interval")
    config = ("--config", str(QUICKSTART), "--device", context.device.type)
    command = [sys.executable, *pretrain_program(), *config, *LINE, *batch, *unsaved, *flags]
    env = environment(ranks) | {"WORLD_SIZE": str(ranks), "RANK": str(context.rank)}
    env |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    env = {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"} | env
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


def cost(context: Context) -> None:
    """Milliseconds of an optimizer's step, on a GPU on as many layers of llama3-8b as fit, and on small matrices.

    "owner" is Muon as it is by default; host_ms is the time until the step has been launched, peak_mb the memory beside
    weights and gradients. "owner / momentum on the host" is what offload leaves of a step's speed. Ratios and the
    planner's estimate are for information; memory may not grow.
    """
    figures, now = context.figures, replace(context, figures={}, wrong=[])
    models = {"small matrices": [(256, 512)] * (64 if context.on_gpu else 4)}
    if not context.on_gpu:
        figures |= dict.fromkeys(("llama3-8b", "CUDA graph", "launches", "memory"), SKIPPED)
    else:
        of_layer = 24 * sum(math.prod(shape) for shape in LLAMA) / context.ranks
        layers = min(32, int(0.6 * torch.cuda.mem_get_info()[0] / of_layer))
        models[f"llama3-8b, {layers} layers"] = LLAMA * layers
    machine(now)
    hardware = measured(now.figures)
    for model, shapes in models.items():
        steps: dict[str, float] = {}
        for label, make in _optimizers(context, shapes).items():
            with context.trying(f"{model}: {label}"):
                figures[f"{model}: {label}"] = found = _cost_of(context, make)
                steps[label], grown = found["step_ms"], found.pop("grown_mb")
                context.hold(grown < 0.1, f"{model}: {label}: five steps left {grown:.1f} MiB behind")
        planned, ours = plan.step_ms(shapes, context.ranks, hardware), steps.pop("owner", math.nan)
        figures |= {f"{model}: owner / {other}": ours / other_ms for other, other_ms in steps.items()}
        figures[f"{model}: planner's estimate, ms"] = planned
        figures[f"{model}: error of the estimate, %"] = 100 * (planned / ours - 1)


def _optimizers(context: Context, shapes: Sequence[tuple[int, int]]) -> dict[str, Callable[[], Any]]:
    """Makers of optimizers on the same weights with gradients, their rows over the ranks where there are several."""
    mesh = init_device_mesh(context.device.type, (context.ranks,)) if context.ranks > 1 else None
    weights = [nn.Parameter(on_mesh(torch.randn(shape, device=context.device), mesh).clone()) for shape in shapes]
    for one in weights:
        one.grad = one.detach().clone()
    named = [(f"layers.{number}.weight", one) for number, one in enumerate(weights)]
    settings = {name: VARIANTS[name] for name in ("owner", "all-gather", "NorMuon", "int8 momentum", "CUDA graph")}
    settings["momentum on the host"] = {"offload": "cpu"}
    made: dict[str, Callable[[], Any]] = {
        name: functools.partial(Muon, named, lr=1e-3, **given) for name, given in settings.items()
        if context.on_gpu or name != "CUDA graph"
    }  # fmt: skip
    if context.ranks == 1:
        made["torch.optim.Muon"] = functools.partial(torch.optim.Muon, weights, lr=1e-3)
    return made | {"AdamW": functools.partial(torch.optim.AdamW, weights, lr=1e-3, fused=context.on_gpu)}


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
        figures |= {"state_mb": (state - before) / 2**20}
        figures |= {"peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            optimizer.step()
            torch.cuda.synchronize()
        kernels = [one for one in profiled.events() if one.device_type.name == "CUDA" and not one.is_user_annotation]
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


_LOST = "train without what fails here, and send the report"
CHECKS = {
    "machine": Check(machine, "the device, and its speed", "see whether nvidia-smi and torch agree on the driver"),
    "arithmetic": Check(arithmetic, "Newton-Schulz is that of fp64", f"--muon-fp32-matmul-prec highest, or {_LOST}", 3),
    "exchange": Check(
        exchange, "steps on ranks are those on whole matrices", f"--muon-exchange allgather, or {_LOST}", 3
    ),
    "stress": Check(stress, "results do not depend on timing", _LOST, 4),
    "offload": Check(offload, "offload and checkpoints change no result", f"--muon-offload none, or {_LOST}", 2),
    "training": Check(training, "training on ranks is that on one", _LOST, 12),
    "cost": Check(cost, "what a step costs, and the planner's estimate", "send the report, as memory may grow", 2),
}
"""All of them in their order."""
