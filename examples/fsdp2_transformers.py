"""Muon for a Hugging Face model under FSDP2: a small random Llama learns the bytes of a text.

    torchrun --nproc-per-node 2 examples/fsdp2_transformers.py [TEXT_FILE]

Runs on GPUs over NCCL, or where there is none on the CPU over gloo; half a minute on two cores.
Needs torch, transformers and megatron-muon, no Megatron. What belongs to Muon is marked.
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import megatron_muon

STEPS, BATCH, SEQUENCE = 60, 8, 64


def start() -> torch.device:
    """The process group and this rank's device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def sharded_model(device: torch.device) -> LlamaForCausalLM:
    """A Llama of 0.9 million parameters, sharded layer by layer over all ranks."""
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
    model = LlamaForCausalLM(config).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(device: torch.device) -> None:
    """Train for `STEPS` steps."""
    text = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = sharded_model(device)
    optimizer = megatron_muon.Muon(model, lr=0.02, adamw_lr=3e-3)  # Muon, after fully_shard
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
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
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
