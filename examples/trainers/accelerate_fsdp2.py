"""Muon in a loop of one's own with accelerate: in one process, or under FSDP2.

    python examples/trainers/accelerate_fsdp2.py [--compile] [--resume]
    torchrun --nproc-per-node 2 examples/trainers/accelerate_fsdp2.py

Gradients of two batches make a step. Needs transformers and accelerate.
"""

import common
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin

import megatron_muon


def train() -> None:
    """Train, or go on from the checkpoint."""
    given = common.arguments(__doc__)
    plugin = None
    if common.RANKS > 1:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="SHARDED_STATE_DICT",
        )
        if common.ON_CPU:
            common.shard_on_cpu(PartialState(cpu=True))
    accelerator = Accelerator(cpu=common.ON_CPU, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model, tokens = common.small_llama(), torch.tensor(common.rows())
    if given.compile:
        model = torch.compile(model, backend="aot_eager" if common.ON_CPU else "inductor")
    optimizer = megatron_muon.Muon(model, lr=0.02, adamw_lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, common.STEPS)
    batches = torch.utils.data.DataLoader(tokens, batch_size=common.BATCH)
    model, optimizer, schedule, batches = accelerator.prepare(model, optimizer, schedule, batches)
    if given.resume:
        accelerator.load_state(given.folder)
        batches = accelerator.skip_first_batches(batches, 2 * common.SAVED)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        step = len(losses) + common.SAVED * given.resume
        if step == common.STEPS:
            break
        if step == common.SAVED and not given.resume and accelerator.sync_gradients:
            accelerator.save_state(given.folder)
    common.show(losses)


if __name__ == "__main__":
    train()
    common.end()
