"""Trains a small mixture of experts of transformers by `megatron_muon.Muon` and by AdamW, at several rates and seeds.

    megatron-muon data prepare --stdlib --output data/stdlib     # unless the quickstart has done it
    python -m benchmarks.mixture --steps 100 --seeds 3

A Qwen3-MoE of 4 layers with 8 experts each, two for a token, on the quickstart's text, bytes, in
one process in fp32, on a GPU where there is one.
Every run of a seed has the same weights at the start and the same batches. The rate warms up over a
tenth of the steps and falls to a tenth along a cosine; Muon's updates have AdamW's size, so one
rate serves all of its parameters. The table has the mean loss on text that is not trained on.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import megatron_muon
from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import read_head

BATCH, SEQUENCE, HELD_OUT = 8, 128, 0.02
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECAY, BETAS = 0.1, (0.9, 0.95)


def model(seed: int) -> Any:
    """A mixture of 7 million parameters, with random weights."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=257,
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=SEQUENCE,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config).to(DEVICE)


def muon(network: Any, rate: float) -> torch.optim.Optimizer:
    """Muon with updates of AdamW's size."""
    return megatron_muon.Muon(
        network.named_parameters(),
        lr=rate,
        weight_decay=DECAY,
        adamw_betas=BETAS,
        adjust_lr_fn="match_rms_adamw",
    )


def adamw(network: Any, rate: float) -> torch.optim.Optimizer:
    """AdamW, whose decay spares vectors, as Muon's does."""
    groups = [
        {"params": [p for p in network.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS)


def windows(tokens: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Random stretches of text, `(count, SEQUENCE)`."""
    starts = torch.randint(len(tokens) - SEQUENCE, (count,), generator=generator)
    return torch.stack([tokens[start : start + SEQUENCE] for start in starts.tolist()]).to(DEVICE)


def loss_after(
    make: Callable[[Any, float], torch.optim.Optimizer],
    rate: float,
    seed: int,
    steps: int,
    text: torch.Tensor,
) -> float:
    """The loss on held-out text after training."""
    cut = int(len(text) * (1 - HELD_OUT))
    network = model(seed)
    optimizer = make(network, rate)
    warmup = max(steps // 10, 1)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * float(np.cos(np.pi * (step - warmup) / (steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = windows(text[:cut], BATCH, generator)
        optimizer.zero_grad()
        network(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    held_out = windows(text[cut:], 8 * BATCH, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(
            np.mean(
                [float(network(input_ids=some, labels=some).loss) for some in held_out.split(BATCH)]
            )
        )


def main() -> None:
    """Train all, and print a row for each optimizer and rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--data", default="data/stdlib", metavar="PREFIX", help="what `data prepare` has written"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1.5e-3, 4e-3])
    args = parser.parse_args()
    try:
        dtype, _ = read_head(args.data)
    except UserError as error:
        parser.error(str(error))
    text = torch.from_numpy(np.fromfile(f"{args.data}.bin", dtype=dtype).astype(np.int64))
    optimizer: Any = muon(model(0), 1e-3)
    inside = sum(
        p.numel()
        for name, p in model(0).named_parameters()
        if "embed" not in name and "lm_head" not in name
    )
    taken = sum(p.numel() for p in optimizer.selection.views)
    print(
        f"Muon takes {taken:,} of {inside:,} parameters that are neither embedding nor output layer"
    )
    for name, make in (("adamw", adamw), ("muon", muon)):
        for rate in args.rates:
            losses = [loss_after(make, rate, seed, args.steps, text) for seed in range(args.seeds)]
            shown = "  ".join(f"{loss:.4f}" for loss in losses)
            print(
                f"{name:<6} rate {rate:<7g} mean {statistics.mean(losses):.4f}  of seeds {shown}",
                flush=True,
            )


if __name__ == "__main__":
    main()
