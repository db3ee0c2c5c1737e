"""Muon in PyTorch Lightning: in one process, or under FSDP2 by its ModelParallelStrategy.

    python examples/trainers/lightning_fsdp2.py [--compile] [--resume]
    torchrun --nproc-per-node 2 examples/trainers/lightning_fsdp2.py

Gradients of two batches make a step. Needs transformers and pytorch-lightning.
"""

import common
import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import megatron_muon


class Llama(lightning.LightningModule):
    """A Llama that is sharded layer by layer where there are several ranks."""

    def __init__(self, *, compiled: bool) -> None:
        """The model, whole and on the CPU."""
        super().__init__()
        self.model, self.tokens = common.small_llama(), torch.tensor(common.rows())
        self.compiled, self.losses = compiled, []

    def configure_model(self) -> None:
        """Shard and compile it; Lightning may call this twice."""
        if common.RANKS > 1 and not isinstance(self.model, torch.distributed.fsdp.FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        if self.compiled:
            self.model.compile(backend="aot_eager" if common.ON_CPU else "inductor")

    def training_step(self, batch: object, number: int) -> torch.Tensor:
        """Loss of a batch that its number determines, so a resumed run sees the same."""
        first = (number * common.RANKS + self.global_rank) * common.BATCH
        tokens = self.tokens[first : first + common.BATCH].to(self.device)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        if number % 2:
            self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """Muon, of the parameters that `configure_model` has sharded."""
        optimizer = megatron_muon.Muon(self.named_parameters(), lr=0.02, adamw_lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, common.STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train() -> None:
    """Train, or go on from the checkpoint."""
    given = common.arguments(__doc__)
    strategy = ModelParallelStrategy(data_parallel_size=common.RANKS, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu" if common.ON_CPU else "gpu",
        devices=common.RANKS,
        strategy=strategy if common.RANKS > 1 else "auto",
        accumulate_grad_batches=2,
        max_steps=common.STEPS,
        callbacks=[
            ModelCheckpoint(given.folder, "{step}", every_n_train_steps=common.SAVED, save_top_k=-1)
        ],
        logger=False,
        enable_progress_bar=False,
    )
    llama = Llama(compiled=given.compile)
    numbers = torch.utils.data.DataLoader(range(4 * common.STEPS * common.RANKS), batch_size=1)
    trainer.fit(
        llama,
        numbers,
        ckpt_path=f"{given.folder}/step={common.SAVED}.ckpt" if given.resume else None,
    )
    common.show(llama.losses)


if __name__ == "__main__":
    train()
    common.end()
