"""Times the step of `megatron_muon.Muon` and others on FSDP2's shards of a transformer.

    torchrun --nproc-per-node 2 -m benchmarks.any_model --hidden-size 512 --num-layers 8 --repeat 9

    torchrun ... --dion DIR        also microsoft/dion's Muon, from a checkout (it has no package)
    torchrun ... --experts 16      layers are stacks of experts, (16, hidden size, 2 x hidden size)
    torchrun ... --optimizer soap  `megatron_muon.Sharded`, and the class on whole matrices

The others: muon-fsdp2 (`pip install muon-fsdp2`, left out if missing), torch.optim.Muon on the
DTensors, whose products gather whole matrices on every rank, and torch.optim.AdamW. All have the
same shards and gradients, fp32, and Newton-Schulz of 5 steps in bf16; embeddings are AdamW's.
Within a round the optimizers step one after the other; a step's time is that of the slowest rank.
Runs on CPU over gloo, or on GPUs over NCCL.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_muon
from megatron_muon.core.methods.candidate import find
from megatron_muon.metrics import synchronize
from megatron_muon.shards import local_part

type Parameters = list[nn.Parameter]
type Optimizers = list[torch.optim.Optimizer]
type Maker = Callable[[Parameters, Parameters], Optimizers]

LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1
MUON: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
VOCABULARY = 8192
OURS = "megatron_muon"
WHOLE = "the class, as in DDP"


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
    """The parameters of a transformer, or of its experts; it is never run."""

    def __init__(self, hidden: int, layers: int, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(
            Experts(experts, hidden) if experts else Block(hidden) for _ in range(layers)
        )


def model(
    args: argparse.Namespace, mesh: DeviceMesh, device: torch.device, *, is_whole: bool
) -> Transformer:
    """A transformer, sharded by layer, or whole on every rank."""
    torch.manual_seed(0)
    with device:
        whole = Transformer(args.hidden_size, args.num_layers, args.experts)
    if is_whole:
        return whole
    for block in whole.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return whole


def ours(matrices: Parameters, rest: Parameters) -> Optimizers:
    """This package's Muon."""
    groups = [{"params": matrices, "optimizer": "muon"}, {"params": rest, "optimizer": "adamw"}]
    return [megatron_muon.Muon(groups, **MUON)]


def sharded(name: str) -> Maker:
    """This package's `Sharded`."""

    def make(matrices: Parameters, rest: Parameters) -> Optimizers:
        groups = [{"params": matrices, "optimizer": name}, {"params": rest, "optimizer": "adamw"}]
        return [megatron_muon.Sharded(name, groups, lr=LR)]

    return make


def on_whole_matrices(name: str) -> Maker:
    """The class itself."""

    def make(matrices: Parameters, rest: Parameters) -> Optimizers:
        whole: Any = find(name, {}).make
        return [whole(matrices, lr=LR), *adamw(rest, [])]

    return make


def fsdp2(matrices: Parameters, rest: Parameters) -> Optimizers:
    """The package muon-fsdp2."""
    import muon_fsdp2

    of_matrices = {"params": matrices, "use_muon": True, "rms_scale": False, **MUON}
    of_rest = {"params": rest, "use_muon": False, "lr": LR, "weight_decay": DECAY}
    return [muon_fsdp2.Muon([of_matrices, of_rest])]


def torchs(matrices: Parameters, rest: Parameters) -> Optimizers:
    """torch's Muon on DTensors."""
    return [torch.optim.Muon(matrices, **MUON), *adamw(rest, [])]


def adamw(matrices: Parameters, rest: Parameters) -> Optimizers:
    """AdamW for all parameters."""
    return [torch.optim.AdamW([*matrices, *rest], lr=LR, weight_decay=DECAY)]


def dion_on(mesh: DeviceMesh, *, gram: bool) -> Maker:
    """microsoft/dion's Muon, with the Gram iteration or the usual one."""

    def make(matrices: Parameters, rest: Parameters) -> Optimizers:
        from dion import Muon  # torch compiles its elementwise passes in the first step

        of_rest = {"params": rest, "algorithm": "adamw", "lr": LR, "weight_decay": DECAY}
        muon = Muon(
            [{"params": matrices}, of_rest],
            mesh,
            lr=LR,
            mu=MOMENTUM,
            weight_decay=DECAY,
            nesterov=True,
            use_gram_newton_schulz=gram,
            use_polar_express=False,
        )
        return [muon]

    return make


def contenders(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Maker]:
    """Makers of the optimizers, from matrices and the other parameters."""
    if args.optimizer:
        return {OURS: sharded(args.optimizer), WHOLE: on_whole_matrices(args.optimizer)}
    found: dict[str, Maker] = {OURS: ours}
    if not args.experts:  # these take no stacks
        if importlib.util.find_spec("muon_fsdp2") is not None:
            found["muon-fsdp2"] = fsdp2
        found["torch.optim.Muon"] = torchs
    found["torch.optim.AdamW"] = adamw
    if args.dion is not None:
        sys.path.insert(0, args.dion)
        found["dion"] = dion_on(mesh, gram=False)
        if importlib.util.find_spec("gram_newton_schulz") is not None:
            found["dion, Gram iteration"] = dion_on(mesh, gram=True)
    wanted = (OURS, *(args.only or found))
    return {name: make for name, make in found.items() if name in wanted}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--hidden-size", type=int, default=512)
    add("--num-layers", type=int, default=8)
    add("--experts", type=int, default=0, metavar="E", help="layers are stacks of E experts")
    add("--repeat", type=int, default=9)
    add("--warmup", type=int, default=2)
    add("--dion", metavar="DIR", help="a checkout of microsoft/dion")
    add("--optimizer", metavar="NAME", help="a class of emerging-optimizers instead of Muon")
    add("--only", nargs="+", metavar="NAME", help="megatron_muon and these alone")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Times all in turn, and prints a table."""
    args = parse(argv)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    optimizers: dict[str, Optimizers] = {}
    parameters: dict[str, Parameters] = {}
    for name, make in contenders(args, mesh).items():
        module = model(args, mesh, device, is_whole=name == WHOLE)
        parameters[name] = list(module.parameters())
        embedding, *matrices = parameters[name]
        optimizers[name] = make(matrices, [embedding])
    torch.manual_seed(1 + dist.get_rank())
    own: list[Any] = list(parameters[OURS])
    gradients = [1e-3 * torch.randn_like(parameter.to_local()) for parameter in own]
    whole = [1e-3 * torch.randn(parameter.shape, device=device) for parameter in own]
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for repeat in range(args.warmup + args.repeat):
        for name, members in optimizers.items():
            set_gradients(parameters[name], whole if name == WHOLE else gradients)
            elapsed = timed(members, device)
            if repeat >= args.warmup:
                times[name].append(1e3 * elapsed)
    if dist.get_rank() == 0:
        show(args, times, device)
    dist.barrier()  # docs/any-model.md explains why
    dist.destroy_process_group()


def set_gradients(parameters: Parameters, gradients: Sequence[torch.Tensor]) -> None:
    """Sets the gradients of all parameters anew: muon-fsdp2 changes them."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        made: Any = torch.zeros_like(parameter)
        local_part(made).copy_(gradient)
        parameter.grad = made


def timed(members: Optimizers, device: torch.device) -> float:
    """Seconds that the slowest rank takes."""
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    for optimizer in members:
        optimizer.step()
    synchronize(device)
    elapsed = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def show(args: argparse.Namespace, times: dict[str, list[float]], device: torch.device) -> None:
    """Prints the table."""
    experts = f" of {args.experts} experts" if args.experts else ""
    layers = f"{args.num_layers} layers{experts}"
    size = f"{dist.get_world_size()} ranks, hidden size {args.hidden_size}, {layers}"
    print(f"{size}, {device.type}")
    print(f"{'optimizer step':<20}{'median ms':>10}{'min ms':>10}{'/ megatron_muon':>18}")
    base = statistics.median(times[OURS])
    for name, found in times.items():
        median = statistics.median(found)
        figures = f"{median:>10,.1f}{min(found):>10,.1f}{median / base:>18.2f}"
        print(f"{name:<20}{figures}", flush=True)


if __name__ == "__main__":
    main()
