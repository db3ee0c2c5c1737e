"""Shared by the trainer examples: a small Llama, the bytes of a text, accelerate on a CPU.

Each example trains twelve steps and saves a checkpoint after six of them. With `--resume` it starts
from there, and the losses that it prints are the same to the last bit. Each runs on GPUs, or where
there is none on the CPU over gloo.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, SAVED, BATCH, SEQUENCE = 12, 6, 4, 32
ON_CPU = not torch.cuda.is_available()
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def arguments(description: str) -> argparse.Namespace:
    """The arguments that all examples have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--folder", default="trainer-run", help="where checkpoints go")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in the folder"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--trl", action="store_true", help="TRL's SFTTrainer in the place of transformers' Trainer"
    )
    return parser.parse_args()


def small_llama() -> LlamaForCausalLM:
    """A Llama of 0.1 million parameters over bytes, with the same weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
        )
    )


def rows(count: int = 512) -> list[list[int]]:
    """Pieces of a text, as bytes."""
    text = Path(argparse.__file__).read_bytes()
    return [list(text[start : start + SEQUENCE]) for start in range(0, count * SEQUENCE, SEQUENCE)]


def shard_on_cpu(state: object) -> None:
    """Make accelerate shard on a CPU, where it would use DDP, by presenting CPUs as GPUs."""
    from accelerate.utils import DistributedType

    state.distributed_type = DistributedType.MULTI_GPU


def show(losses: list[float]) -> None:
    """Print, on the first rank, the losses that follow the checkpoint."""
    if int(os.environ.get("RANK", "0")) == 0:
        for step, loss in enumerate(losses[-(STEPS - SAVED) :], SAVED + 1):
            print(f"step {step:2}  loss {loss!r}", flush=True)


def end() -> None:
    """End the ranks together, when all that was made with the process group is gone."""
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
