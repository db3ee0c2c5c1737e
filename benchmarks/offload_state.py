"""Times the optimizer step of a GPT under Megatron-FSDP, bf16, with state on the device, host and disk, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.offload_state --offload-dir /local/nvme --repeat 9
    --json state.json

Each way of `--muon-offload` x `--muon-offload-state` has a model of its own, all with the same
weights and gradients. A step is norm, Muon, Adam and installing the model's weights. Within a round
they step one after the other, and the disk is probed; a step's time is that of the slowest rank.
Bytes on the device are those of optimizer state and main weights, a GPU's slots included, by this
rank's parameters. On CPU over gloo, where host and device are one memory, or on GPUs over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_muon
from benchmarks.memory import peak_extra_bytes
from benchmarks.offload import DiskProbe
from megatron_muon import cpu
from megatron_muon.errors import quiet_imports
from megatron_muon.offload.store import DEVICE, DISK, HOST

WAYS = (
    ("none", "momentum"),
    ("cpu", "momentum"),
    ("cpu", "all"),
    ("nvme", "momentum"),
    ("nvme", "all"),
)


class Way:
    """A model with its optimizer, and gradients that stay."""

    def __init__(
        self, offload: str, state: str, args: argparse.Namespace, device: torch.device
    ) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        self.name = offload if offload == "none" else f"{offload}, {state}"
        self.seconds: list[float] = []
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=8,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        model = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=args.vocabulary, max_sequence_length=64
        )
        sharding = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy="optim_grads_params",
            gradient_reduce_div_fusion=device.type == "cuda",
            grad_reduce_in_fp32=True,
        )
        self.model = FullyShardedDataParallel(config, sharding, model.to(device))
        settings: dict[str, Any] = {}
        if offload != "none":
            settings = {"muon_offload": offload, "muon_offload_state": state}
            settings["muon_offload_buffer_mb"] = args.offload_buffer_mb
        if offload == "nvme":
            directory = Path(args.offload_dir, f"bench-{state}")
            directory.mkdir(parents=True, exist_ok=True)
            settings["muon_offload_dir"] = str(directory)
        self.optimizer = megatron_muon.get_megatron_muon_optimizer(
            megatron_muon.MuonOptimizerConfig(
                optimizer="muon",
                lr=0.001,
                weight_decay=0.1,
                clip_grad=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                muon_extra_scale_factor=0.2,
                muon_fp32_matmul_prec="medium" if args.ns_dtype == "bf16" else "highest",
                use_distributed_optimizer=True,
                **settings,
            ),
            [self.model],
        )
        # no forward pass follows that would need whole weights
        self.model.start_param_sync = lambda *_, **__: None
        self.model.finish_grad_sync()
        generator = torch.Generator().manual_seed(dist.get_rank())
        buffer = self.model.param_and_grad_buffer
        for group in buffer.parameter_groups:
            gradients = group.main_grad_buffer.data
            gradients.copy_(1e-3 * torch.randn(gradients.shape, generator=generator))
        buffer.update_main_grads()
        self.parameters = sum(p._local_tensor.numel() for _, p in buffer.optimizer_named_parameters)

    def step(self) -> None:
        """One optimizer step."""
        updated, _, _ = self.optimizer.step()
        assert updated, "a gradient was not finite"

    def bytes(self) -> Counter[str]:
        """Optimizer state and main weights of this rank by place."""
        found: Counter[str] = Counter()
        for store in self.optimizer.stores:
            found.update(store.bytes)
        for member in self.optimizer.chained_optimizers:
            for slots in member.optimizer.state.values():
                tensors = (getattr(value, "_local_tensor", value) for value in slots.values())
                found[DEVICE] += sum(
                    tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)
                )
        for group in self.model.param_and_grad_buffer.parameter_groups:
            data = group.main_weight_buffer.data
            found[DEVICE] += 0 if data.is_meta else data.nbytes
        return found


def main() -> None:
    """Time all ways in turn, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument(
        "--offload-dir", required=True, metavar="DIR", help="a directory on the disk to be measured"
    )
    parser.add_argument(
        "--offload-buffer-mb", type=float, default=12.0, help="of each kind of state (12)"
    )
    parser.add_argument(
        "--ns-dtype", choices=("bf16", "fp32"), default="bf16", help="of Newton-Schulz (bf16)"
    )
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    device = start()
    with quiet_imports():
        ways = [Way(offload, state, args, device) for offload, state in WAYS]
    group = dist.group.WORLD
    assert group is not None
    disk = DiskProbe(Path(args.offload_dir), group)
    for repeat in range(args.warmup + args.repeat):
        for way in ways:
            elapsed = timed(way, device)
            if repeat >= args.warmup:
                way.seconds.append(elapsed)
        disk.probe()
    lines = [figures(way, statistics.median(ways[0].seconds), device) for way in ways]
    rates = disk.result(None)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {ways[0].parameters:,} parameters on the first,"
            f" {device.type}"
        )
        print(
            f"disk, all ranks at once: reads {rates['read_gb_per_s']:.2f}, writes"
            f" {rates['write_gb_per_s']:.2f} GB/s"
        )
        print(
            f"{'state':<16}{'median ms':>10}{'/ none':>8}{'device bytes/parameter':>24}{'host MB':>9}{'disk MB':>9}"
        )
        for line in lines:
            print(
                f"{line['state']:<16}{line['median_ms']:>10,.1f}{line['over_none']:>8.2f}"
                f"{line['device_bytes_per_parameter']:>24.2f}{line[HOST] / 1e6:>9,.1f}{line[DISK] / 1e6:>9,.1f}"
            )
        if args.json is not None:
            args.json.write_text(
                json.dumps({"ways": lines, "disk": rates, "ranks": dist.get_world_size()}), "utf-8"
            )
    dist.barrier()
    dist.destroy_process_group()


def start() -> torch.device:
    """The process group, and this rank's device."""
    from megatron.core import parallel_state

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        cpu.install()
        cpu.keep_freed_memory()  # as a training does
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel()
    megatron_muon.patch_megatron_fsdp()
    return device


def timed(way: Way, device: torch.device) -> float:
    """Seconds of a step on the slowest rank."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    begun = time.perf_counter()
    way.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = torch.tensor(time.perf_counter() - begun, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def figures(way: Way, none: float, device: torch.device) -> dict[str, Any]:
    """A line of the table: bytes are those of the first rank. Collective."""
    median, found = statistics.median(way.seconds), way.bytes()
    return {
        "state": way.name,
        "median_ms": 1e3 * median,
        "over_none": median / none,
        "times_ms": [1e3 * seconds for seconds in way.seconds],
        "parameters": way.parameters,
        "device_bytes_per_parameter": found[DEVICE] / way.parameters,
        "peak_extra_bytes": peak_extra_bytes(way.step, device),
        **{place: found[place] for place in (DEVICE, HOST, DISK)},
    }


if __name__ == "__main__":
    main()
