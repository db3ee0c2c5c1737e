"""Muon under Megatron-FSDP as a library, for a small Llama of transformers.

    torchrun --nproc-per-node 2 examples/megatron_fsdp_library.py [TEXT_FILE]

Runs on GPUs over NCCL, or where there is none on the CPU over gloo, with megatron-muon[megatron] to
stand in for CUDA. Needs transformers, and megatron-fsdp or megatron-core. What belongs to Muon is
marked.
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import megatron_muon
from megatron_muon.errors import quiet_imports

STEPS, BATCH, SEQUENCE = 60, 8, 64


def start() -> torch.device:
    """The process group and this rank's device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    from megatron_muon import cpu

    cpu.install()  # the CPU stands in for a GPU
    dist.init_process_group("gloo")
    return torch.device("cpu")


def train(device: torch.device) -> None:
    """Train for `STEPS` steps."""
    with quiet_imports():  # without warnings about what is not installed
        # or the package megatron_fsdp, which is the same
        from megatron.core.distributed.fsdp.src import megatron_fsdp

    text = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    model = megatron_fsdp.fully_shard_model(
        LlamaForCausalLM(config).to(device),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[LlamaDecoderLayer],
        zero_dp_strategy="optim_grads_params",
    )
    model._replace_param_with_distributed_if_needed()
    # Muon, then its wrapper as usual
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.02, adamw_lr=3e-3)
    optimizer = megatron_fsdp.fully_shard_optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    if dist.get_rank() == 0:
        print(optimizer.table(), flush=True)
    # each rank its own part of the batch
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        starts = torch.randint(len(tokens) - SEQUENCE, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + SEQUENCE] for start in starts.tolist()]).to(
            device
        )
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(
                    f"step {step + 1:3}  loss {mean.item() / dist.get_world_size():.3f}", flush=True
                )


def main() -> None:
    """Train, and end the ranks together: nothing made with the process group outlives it."""
    train(start())  # model, optimizer and mesh are gone when it returns
    gc.collect()  # those in cycles too
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
