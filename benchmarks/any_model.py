"""Times the optimizer step of `megatron_muon.Muon` on FSDP2's shards of a transformer, beside others, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.any_model --hidden-size 512 --num-layers 8 --repeat 9

    torchrun ... --dion DIR        with microsoft/dion's Muon too, of a checkout, which has no package
    torchrun ... --experts 16      of each layer a stack of experts alone, (16, hidden size, 2 x hidden size)

The others: muon-fsdp2 (`pip install muon-fsdp2`, left out where it is missing), torch.optim.Muon on
the DTensors, whose products gather whole matrices on every rank, and torch.optim.AdamW. All have
the same shards and gradients, fp32, and Newton-Schulz of 5 steps in bf16; embeddings are AdamW's
everywhere. Within a round the optimizers step one after the other; a step's time is that of the
slowest rank. On CPU over gloo, or on GPUs over NCCL.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_muon

type Maker = Callable[[list[nn.Parameter], list[nn.Parameter]], list[torch.optim.Optimizer]]

LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1
VOCABULARY = 8192


class Block(nn.Module):
    """The matrices of a transformer layer with a gated MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))
        for name in ("gate", "up"):
            self.add_module(name, nn.Linear(hidden, 4 * hidden, bias=False))
        self.down = nn.Linear(4 * hidden, hidden, bias=False)


class Experts(nn.Module):
    """A stack of experts."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(count, hidden, 2 * hidden) / hidden**0.5)


class Transformer(nn.Module):
    """The parameters of a transformer, or of the experts of one; it is never run."""

    def __init__(self, hidden: int, layers: int, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(
            Experts(experts, hidden) if experts else Block(hidden) for _ in range(layers)
        )


def model(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """A transformer that is sharded by layer."""
    torch.manual_seed(0)
    with device:
        whole = Transformer(args.hidden_size, args.num_layers, args.experts)
    for block in whole.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return whole


def optimizers(mesh: DeviceMesh, dion: str | None, *, stacks: bool) -> dict[str, Maker]:
    """Makers, from matrices and the rest; `dion` is a checkout. Some do not take `stacks`."""
    muon: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}

    def ours(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        groups = [{"params": matrices, "optimizer": "muon"}, {"params": rest, "optimizer": "adamw"}]
        return [megatron_muon.Muon(groups, **muon)]

    def fsdp2(
        matrices: list[nn.Parameter], rest: list[nn.Parameter]
    ) -> list[torch.optim.Optimizer]:
        import muon_fsdp2

        of_matrices = {"params": matrices, "use_muon": True, "rms_scale": False, **muon}
        return [
            muon_fsdp2.Muon(
                [of_matrices, {"params": rest, "use_muon": False, "lr": LR, "weight_decay": DECAY}]
            )
        ]

    def torchs(
        matrices: list[nn.Parameter], rest: list[nn.Parameter]
    ) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Muon(matrices, **muon),
            torch.optim.AdamW(rest, lr=LR, weight_decay=DECAY),
        ]

    def adamw(
        matrices: list[nn.Parameter], rest: list[nn.Parameter]
    ) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW([*matrices, *rest], lr=LR, weight_decay=DECAY)]

    def dions(*, gram: bool) -> Maker:
        def make(
            matrices: list[nn.Parameter], rest: list[nn.Parameter]
        ) -> list[torch.optim.Optimizer]:
            from dion import Muon  # its elementwise passes are compiled by torch in the first step

            of_rest = {"params": rest, "algorithm": "adamw", "lr": LR, "weight_decay": DECAY}
            settings: dict[str, Any] = {
                "lr": LR,
                "mu": MOMENTUM,
                "weight_decay": DECAY,
                "nesterov": True,
            }
            groups = [{"params": matrices}, of_rest]
            return [
                Muon(groups, mesh, use_gram_newton_schulz=gram, use_polar_express=False, **settings)
            ]

        return make

    found: dict[str, Maker] = {
        "megatron_muon": ours,
        "muon-fsdp2": fsdp2,
        "torch.optim.Muon": torchs,
        "torch.optim.AdamW": adamw,
    }
    if stacks or importlib.util.find_spec("muon_fsdp2") is None:
        del found["muon-fsdp2"]
    if stacks:
        del found["torch.optim.Muon"]
    if dion is not None and not Path(dion, "dion", "muon.py").is_file():
        if dist.get_rank() == 0:
            print(f"--dion {dion} is not a checkout of microsoft/dion: left out")
    elif dion is not None:
        sys.path.insert(0, dion)
        found["dion"] = dions(gram=False)
        if importlib.util.find_spec("gram_newton_schulz") is not None:
            found["dion, Gram iteration"] = dions(gram=True)
    return found


def main() -> None:
    """Time all in turn, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument(
        "--experts", type=int, default=0, metavar="E", help="layers are stacks of so many experts"
    )
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dion", metavar="DIR", help="a checkout of microsoft/dion")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="megatron_muon and these alone")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    contenders: dict[str, Any] = {}
    gradients: dict[int, torch.Tensor] = {}
    for name, make in optimizers(mesh, args.dion, stacks=bool(args.experts)).items():
        if args.only and name not in ("megatron_muon", *args.only):
            continue
        module = model(args, mesh, device)
        matrices = [p for key, p in module.named_parameters() if "embed" not in key]
        contenders[name] = (
            make(matrices, [p for key, p in module.named_parameters() if "embed" in key]),
            list(module.parameters()),
        )
    for number, parameter in enumerate(next(iter(contenders.values()))[1]):
        torch.manual_seed(number * dist.get_world_size() + dist.get_rank())
        gradients[number] = 1e-3 * torch.randn_like(parameter.to_local())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(args.warmup + args.repeat):
        for name, (members, parameters) in contenders.items():
            for number, parameter in enumerate(parameters):  # muon-fsdp2 changes them
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.to_local().copy_(gradients[number])
            elapsed = timed(members, device)
            if repeat >= args.warmup:
                times[name].append(elapsed)
    if dist.get_rank() == 0:
        ours = statistics.median(times["megatron_muon"])
        layers = f"{args.num_layers} layers" + (
            f" of {args.experts} experts" if args.experts else ""
        )
        print(
            f"{dist.get_world_size()} ranks, hidden size {args.hidden_size}, {layers},"
            f" {device.type}"
        )
        print(f"{'optimizer step':<20}{'median ms':>10}{'min ms':>10}{'/ megatron_muon':>18}")
        for name, found in times.items():
            median = statistics.median(found)
            print(
                f"{name:<20}{1e3 * median:>10,.1f}{1e3 * min(found):>10,.1f}{median / ours:>18.2f}",
                flush=True,
            )
    dist.barrier()  # docs/any-model.md says why
    dist.destroy_process_group()


def timed(members: list[torch.optim.Optimizer], device: torch.device) -> float:
    """Seconds that the slowest rank takes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for optimizer in members:
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


if __name__ == "__main__":
    main()
