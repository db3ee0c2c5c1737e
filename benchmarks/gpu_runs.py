"""The checks of `benchmarks.gpu` that start processes: ranks over gloo on one GPU, FSDP2 over NCCL, trainings."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.command import run_logged, torchrun
from benchmarks.gpu_checks import Check, Context, Figures, arithmetic, kernel, machine
from benchmarks.gpu_steps import (
    SHAPES,
    VARIANTS,
    cost,
    disturbed,
    give_gradients,
    parameters,
    streams,
    trained,
    variants,
)
from megatron_muon.errors import RunFailedError
from megatron_muon.fsdp.muon import Muon
from megatron_muon.tools.train.processes import ROOT, environment
from megatron_muon.tools.train.records import read_events


def _worker(context: Context, ranks: int, name: str, **settings: Any) -> Figures:
    """What rank 0 of so many processes of `WORKERS` found."""
    log, output = context.folder / f"{name}.log", context.folder / f"{name}.json"
    words = ("-m", "benchmarks.gpu_runs", name, context.device.type, str(output), json.dumps(settings))
    try:
        run_logged(torchrun(ranks, *words), log, env=environment(ranks), what=name)
    except RunFailedError:
        context.hold(False, f"{name} on {ranks} ranks: " + "\n".join(log.read_text().splitlines()[-25:]))
        return {}
    found: Figures = json.loads(output.read_text("utf-8"))
    return found


def ranks(context: Context) -> Figures:
    """Rows of FSDP2's shards on two ranks over gloo, both on one device, beside whole matrices."""
    figures: Figures = {}
    found = _worker(context, 2, "sharded")
    figures["2 ranks"] = found.pop("errors", {})
    context.wrong += found.get("wrong", [])
    return figures


SHARDED = ("normuon", "adamuon", "hyperball", "cautious", "offload cpu", "int8 momentum")


def _sharded(device: torch.device) -> Figures:
    """On each rank: variants on sharded matrices, the bits of a second and of a disturbed time; how far off."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    found: Figures = {"errors": {}, "wrong": []}
    settings: dict[str, dict[str, Any]] = {
        "plain": {}, "teams": {"team_size": "2"}, "allgather": {"exchange": "allgather"},
        **{name: VARIANTS[name] for name in SHARDED},
    }  # fmt: skip
    first = [one.detach().clone() for _, one in parameters(SHAPES, torch.device("cpu"))]
    if device.type == "cpu":
        settings = {name: settings[name] for name in ("plain", "teams")}
    for name, given in settings.items():
        try:
            made, again = (_train_sharded(mesh, device, given) for _ in range(2))
            if device.type == "cuda":
                with disturbed(dist.get_rank()):
                    stressed = _train_sharded(mesh, device, given)
                if not all(map(torch.equal, made, stressed)):
                    found["wrong"].append(f"{name}: other bits under delays")
        except Exception as failure:
            found["wrong"].append(f"{name}: {type(failure).__name__}: {failure}")
            continue
        expected = trained(device, 5, **{k: v for k, v in given.items() if k not in ("team_size", "exchange")})
        moved = zip(made, expected, first, strict=False)
        error = max(((one - two).norm() / (two - start).norm()).item() for one, two, start in moved)
        found["errors"][name] = float(f"{error:.3g}")
        print(name, error, flush=True)
        if not all(map(torch.equal, made, again)):
            found["wrong"].append(f"{name}: other bits the second time")
        if error > (0.1 if "int8" in name else 1e-4):
            found["wrong"].append(f"{name}: {error:.3g} from whole matrices")
    return found


def _train_sharded(mesh: Any, device: torch.device, settings: dict[str, Any], steps: int = 5) -> list[torch.Tensor]:
    """Whole weights after some steps of Muon on rows of each matrix, uneven ones too."""
    whole = parameters(SHAPES, device)
    sharded = []
    for name, one in whole:
        local = one.detach().tensor_split(_cuts(one.shape[0], mesh.size()))[mesh.get_local_rank()].clone()
        made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=one.shape, stride=one.stride())
        sharded.append((name, nn.Parameter(made)))
    optimizer = Muon(
        sharded,
        **{
            "lr": 0.02,
            "fp32_matmul_prec": "highest",
            "ns_coefficients": "quintic",
            "exchange_buffer_mb": 8.0,
            **settings,
        },
    )
    for step in range(steps):
        give_gradients(whole, step)
        for (_, one), (_, of) in zip(sharded, whole, strict=True):
            assert of.grad is not None
            local = of.grad.tensor_split(_cuts(of.shape[0], mesh.size()))[mesh.get_local_rank()]
            one.grad = DTensor.from_local(
                local.clone(), mesh, [Shard(0)], run_check=False, shape=of.shape, stride=of.stride()
            )
        optimizer.step()
    found = []
    for _, one in sharded:
        rows: list[Any] = [None] * mesh.size()
        mine: Any = one.data
        dist.all_gather_object(rows, mine.to_local().cpu())
        found.append(torch.cat(rows))
    optimizer.close()
    return found


def _cuts(rows: int, ranks: int) -> list[int]:
    """Where FSDP2 cuts so many rows."""
    each = -(-rows // ranks)
    return [min(each * number, rows) for number in range(1, ranks)]


def fsdp2(context: Context) -> Figures:
    """A transformer under fully_shard on one rank over NCCL: losses, a checkpoint by torch, and the same after it."""
    found = _worker(context, 1, "fully_sharded", folder=str(context.folder))
    context.wrong += found.pop("wrong", [])
    return found


def _fully_sharded(device: torch.device, folder: str) -> Figures:
    """On the rank: training, with and without fully_shard; save, load, and the same losses after it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found: Figures = {"wrong": []}

    def model(*, sharded: bool, **policy: Any) -> nn.Module:
        torch.manual_seed(0)
        layers = [
            nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        ]
        made = nn.Sequential(nn.Embedding(64, 128), *layers, nn.Linear(128, 64)).to(device)
        if sharded:
            for layer in list(made)[1:3]:
                fully_shard(layer, **policy)
            fully_shard(made, **policy)
        return made

    def losses(made: nn.Module, optimizer: Any, steps: range) -> list[float]:
        seen = []
        for step in steps:
            batch = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(step)).sort(1).values.to(device)
            loss = nn.functional.cross_entropy(made(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seen.append(loss.item())
        return seen

    def muon(made: nn.Module, **settings: Any) -> Muon:
        return Muon(
            made.named_parameters(), **{"lr": 0.02, "adamw_lr": 3e-3, "fp32_matmul_prec": "highest", **settings}
        )

    plain = model(sharded=False)
    expected = losses(plain, muon(plain), range(20))
    bf16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    kinds: dict[str, Any] = {
        "fp32": ({}, {}),
        "offload cpu": ({}, {"offload": "cpu"}),
        "int8": ({}, {"momentum_dtype": "int8"}),
        "normuon": ({}, {"moment2_method": "normuon"}),
        "bf16": (bf16, {"fp32_matmul_prec": "medium"}),
        "allgather": ({}, {"exchange": "allgather"}),
        "graph": ({}, {"cuda_graph": True}),
    }
    for name, (policy, settings) in kinds.items():
        if name == "graph" and device.type != "cuda":
            continue
        try:
            made = model(sharded=True, **policy)
            optimizer = muon(made, **settings)
            seen = losses(made, optimizer, range(10))
            state = {"model": made.state_dict(), "optimizer": get_optimizer_state_dict(made, optimizer)}
            save(state, checkpoint_id=f"{folder}/{name}")
            seen += losses(made, optimizer, range(10, 20))
            other = model(sharded=True, **policy)
            resumed = muon(other, **settings)
            state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed)}
            load(state, checkpoint_id=f"{folder}/{name}")
            other.load_state_dict(state["model"])
            set_optimizer_state_dict(other, resumed, state["optimizer"])
            again = losses(other, resumed, range(10, 20))
        except Exception as failure:
            found["wrong"].append(f"{name}: {type(failure).__name__}: {failure}")
            continue
        found[name] = [seen[-1], max(abs(a - b) for a, b in zip(seen, expected, strict=True))]
        if again != seen[10:]:
            found["wrong"].append(f"{name}: after loading {again[-1]}, without {seen[-1]}")
        if found[name][1] > {"fp32": 1e-3, "offload cpu": 1e-3, "allgather": 1e-3, "graph": 1e-3}.get(name, 0.5):
            found["wrong"].append(f"{name}: losses differ from one process's by {found[name][1]}")
    return found


LINE = ("--split", "100,0,0", "--num-layers", "2", "--train-iters", "20", "--lr-decay-iters", "20", "--eval-iters", "0",
        "--eval-interval", "1000", "--log-interval", "1", "--muon-fp32-matmul-prec", "highest")  # fmt: skip
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
TRAININGS: dict[str, Sequence[str]] = {
    **{name: ("--data-parallel-sharding-strategy", name) for name in STRATEGIES},
    "bf16": ("--bf16", *OVERLAP),
    "offload momentum": ("--muon-offload", "cpu"),
    "offload all": ("--muon-offload", "cpu", "--muon-offload-state", "all", *OVERLAP),
    "nvme, int8": ("--muon-offload", "nvme", "--muon-offload-dir", ".", "--muon-momentum-dtype", "int8"),
    "metrics": ("--muon-metrics-interval", "5"),
    "normuon": ("--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", "normuon"),
    "hyperball": ("--muon-hyperball", "--weight-decay", "0"),
    "qk-clip": ("--qk-clip", "--qk-clip-threshold", "1"),
    "adam": ("--optimizer", "adam"),
}
FROM_START = ("normuon", "hyperball", "qk-clip", "adam")
"""Those whose state or losses are others than plain Muon's: compared with a processor's run of the same."""
RESUMED = ("optim_grads_params", "bf16", "offload all")


def training(context: Context) -> Figures:
    """20 steps of the quickstart's model by pretrain_gpt.py, the last ten after a processor's, and its losses."""
    data, saved, expected = reference(context)
    names = tuple(TRAININGS) if context.on_gpu else ("optim_grads_params", "qk-clip")
    found: Figures = {}
    with ThreadPoolExecutor(len(names) if context.on_gpu else 1) as threads:
        one = functools.partial(_compared, context, data, saved, expected)
        for name, figures in zip(names, threads.map(one, names), strict=True):
            found[name] = figures
            context.keep(found)
    return found


def reference(context: Context) -> tuple[Path, Path, dict[str, dict[int, float]]]:
    """The data; where a processor's plain run saved step 10; its losses by step, and those of `FROM_START`."""
    data, saved = context.folder / "data", context.folder / "saved"
    prepare = (sys.executable, "-m", "megatron_muon.cli", "data", "prepare", "--input", str(ROOT / "benchmarks"),
               "--suffix", ".py", "--output", str(data))  # fmt: skip
    run_logged(prepare, context.folder / "prepare.log", env=environment(1), what="data")
    keeps = ("--save", str(saved), "--save-interval", "10")
    runs = {"plain": keeps, **{name: TRAININGS[name] for name in (FROM_START if context.on_gpu else ("qk-clip",))}}
    with ThreadPoolExecutor(len(runs) if context.on_gpu else 1) as threads:
        losses = threads.map(lambda name: _train(context, data, f"{name} cpu", "--device", "cpu", *runs[name])[0], runs)
    return data, saved, dict(zip(runs, losses, strict=True))


def _compared(context: Context, data: Path, saved: Path, expected: dict[str, dict[int, float]], name: str) -> Figures:
    """A training's distance from the processor's losses, and whether it is the same when it is resumed."""
    flags, own = (*TRAININGS[name], "--device", context.device.type), expected.get(name, expected["plain"])
    path = str(context.folder / name.replace(" ", "-").replace(",", "") / "saved")
    keeps = ("--save", path, "--save-interval", "15")
    begins = () if name in FROM_START else ("--load", str(saved), "--ckpt-step", "10")
    found, seconds = _train(context, data, name, *flags, *begins, *keeps)
    if not found or not own:
        return {}
    error = max(abs(value - own[step]) for step, value in found.items())
    close = 0.05 if "bf16" in name or "int8" in name else 5e-3
    context.hold(error < close, f"{name}: losses differ from a processor's by {error:.3g}")
    figures: Figures = {"last": found[max(found)], "error": error, "step_ms": seconds * 1e3}
    if name in RESUMED:
        again, _ = _train(context, data, f"{name} resumed", *flags, "--load", path, "--ckpt-step", "15")
        figures["resumed"] = bool(again) and all(found[step] == value for step, value in again.items())
        context.hold(figures["resumed"], f"{name}: resumed {again}, not {found}")
    return figures


def _train(context: Context, data: Path, name: str, *flags: str) -> tuple[dict[int, float], float]:
    """The losses of a run by step, and the median seconds of a step; empty where it failed."""
    folder = context.folder / name.replace(" ", "-").replace(",", "")
    folder.mkdir(exist_ok=True)
    words = (
        str(ROOT / "pretrain_gpt.py"),
        "--config",
        str(ROOT / "configs" / "quickstart.yaml"),
        "--data-path",
        str(data),
    )
    logs = ("--tensorboard-dir", str(folder / "tensorboard"))
    unsaved = () if "--save" in flags else ("--unset", "--save", "--unset", "--save-interval")
    command = torchrun(1, *words, *LINE, *logs, *unsaved, *flags)
    env = environment(1) | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (folder / "log").write_text(process.stdout)
    if process.returncode:
        context.hold(False, f"{name}: status {process.returncode}\n" + "\n".join(process.stdout.splitlines()[-30:]))
        return {}, 0.0
    events = read_events(folder / "tensorboard")
    times = [point.value for point in events.points("iteration-time")][3:]
    return {point.step: point.value for point in events.points("lm loss")}, statistics.median(times or [0.0])


CHECKS = {
    "machine": Check(machine),
    "variants": Check(variants),
    "streams": Check(streams, needs_gpu=True),
    "ranks": Check(ranks),
    "fsdp2": Check(fsdp2),
    "training": Check(training),
    "arithmetic": Check(arithmetic),
    "kernel": Check(kernel, needs_gpu=True),
    "cost": Check(cost),
}
WORKERS: dict[str, Callable[..., Figures]] = {"sharded": _sharded, "fully_sharded": _fully_sharded}


def main() -> None:
    """On a rank that `_worker` has started."""
    name, kind, output, settings = sys.argv[1:]
    backend = "gloo" if name == "sharded" or kind == "cpu" else "nccl"
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    found = WORKERS[name](device, **json.loads(settings))
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found), "utf-8")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
