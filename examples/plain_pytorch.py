"""Muon for a plain PyTorch model, in one process or under DDP: a small vision transformer.

    python examples/plain_pytorch.py
    torchrun --nproc-per-node 2 examples/plain_pytorch.py

Needs torch and megatron-muon. What belongs to Muon is marked.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import megatron_muon

STEPS, BATCH, SIDE, PATCH, WIDTH = 120, 64, 16, 4, 64
CLASSES = ("square", "disc", "cross", "stripes")


class VisionTransformer(nn.Module):
    """Patches through a convolution, three transformer layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)  # 4D: AdamW's
        self.position = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`(batch, 1, SIDE, SIDE)` to scores `(batch, classes)`."""
        x = self.patches(images).flatten(2).mT + self.position
        return self.head(self.encoder(x).mean(dim=1))


def drawn(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shapes in noise, and which shapes they are."""
    labels = torch.randint(len(CLASSES), (BATCH,), generator=generator)
    middle = torch.randint(6, 10, (BATCH, 2, 1, 1), generator=generator)
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    y, x = row - middle[:, 0], column - middle[:, 1]
    shapes = [
        torch.maximum(x.abs(), y.abs()) <= 4,
        x**2 + y**2 <= 20,
        (x.abs() <= 1) | (y.abs() <= 1),
        (x + y) % 4 < 2,
    ]
    images = torch.stack(shapes)[labels, torch.arange(BATCH)].float()[:, None]
    return images + 0.5 * torch.randn(images.shape, generator=generator), labels


def main() -> None:
    """Train for `STEPS` steps."""
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if several else 0
    torch.manual_seed(0)  # the same weights on every rank
    model = VisionTransformer()
    trained = nn.parallel.DistributedDataParallel(model) if several else model
    # Muon: in_proj_weight is query, key and value, each orthogonalised alone
    optimizer = megatron_muon.Muon(
        model.named_parameters(),
        lr=0.02,
        adamw_lr=3e-3,
        exclude=["position"],
        split={"in_proj_weight": (WIDTH, WIDTH, WIDTH)},
        share_replicated=several,  # each matrix is orthogonalised by one rank
    )
    if rank == 0:
        print(optimizer.table(), flush=True)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        images, labels = drawn(generator)
        scores = trained(images)
        loss = nn.functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            right = (scores.argmax(dim=1) == labels).float().mean()
            print(
                f"step {step + 1:3}  loss {loss.item():.3f}  right {right.item():.0%}", flush=True
            )
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
