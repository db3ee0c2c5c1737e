"""Times training steps of a transformers Llama with `megatron_muon.QKClip` and without, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.qk_clip --repeat 20

The shape is that of configs/quickstart.yaml. Every arm has a model and a Muon of its own, under
FSDP2 where there are several ranks; within a round each takes ten steps, in an order that rotates.
A step is forward, backward, Muon, clip. On a CPU, processor time is a surer measure than time where
other work is running.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import megatron_muon

STEPS = 10
ARMS = {"without": 0, "interval 1": 1, "interval 10": 10}


def llama(given: argparse.Namespace) -> Any:
    """The model, sharded by layer over all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": given.hidden_size,
        "intermediate_size": 3 * given.hidden_size,
        "vocab_size": 272,
    }
    heads = {
        "num_attention_heads": given.hidden_size // 64,
        "num_key_value_heads": max(1, given.hidden_size // 128),
    }
    config = LlamaConfig(
        num_hidden_layers=given.num_layers,
        max_position_embeddings=given.seq_length,
        **shape,
        **heads,
    )
    model = LlamaForCausalLM(config).train()
    for module in (*model.model.layers, model) if dist.is_initialized() else ():
        fully_shard(module)
    return model


def measure(given: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of a step in each round, of each arm, on this rank: time, and processor time."""
    arms = {}
    for name, interval in ARMS.items():
        model = llama(given)
        optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.008)
        arms[name] = (
            model,
            optimizer,
            megatron_muon.QKClip(model, interval=interval) if interval else None,
        )
    tokens = torch.randint(257, (given.micro_batch_size, given.seq_length))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for number in range(given.warmup + given.repeat):
        names = list(arms)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            model, optimizer, clip = arms[name]
            if dist.is_initialized():
                dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                optimizer.step()
                if clip is not None:
                    clip.step()
                optimizer.zero_grad()
            if number >= given.warmup:
                spent = time.perf_counter() - start, time.process_time() - used
                found[name].append((1e3 * spent[0] / STEPS, 1e3 * spent[1] / STEPS))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="of each rank")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--repeat", type=int, default=20, help="rounds of ten steps of each")
    given = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    found = measure(given)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"{'ms of a step':28}{'median':>9}{'least':>9}{'ratio, of rounds':>18}{'of the least':>14}"
        )
        for place, kind in enumerate(("time", "processor time")):
            base = [round_[place] for round_ in found["without"]]
            for name, rounds in found.items():
                steps = [round_[place] for round_ in rounds]
                ratio = statistics.median(
                    step / other for step, other in zip(steps, base, strict=True)
                )
                figures = f"{statistics.median(steps):9.1f}{min(steps):9.1f}{ratio:18.3f}{min(steps) / min(base):14.3f}"
                print(f"{kind}, {name}".ljust(28) + figures)
    if dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
