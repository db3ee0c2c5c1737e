"""Muon in your own training loop: a Megatron GPT, Megatron-FSDP and the optimizer factory.

    torchrun --nproc-per-node 2 examples/own_training_loop.py

Runs on GPUs over NCCL, or where there is none on the CPU over gloo. What belongs to Muon is marked.
"""

import os

import torch
import torch.distributed as dist

import megatron_muon
from megatron_muon.errors import quiet_imports

with quiet_imports():  # without Megatron's warnings about what is not installed
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

SEQUENCE, VOCABULARY, BATCH = 64, 64, 8


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


def wrapped_model(device: torch.device) -> FullyShardedDataParallel:
    """A small GPT, its parameters sharded over all ranks."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=96,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE
    )
    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        gradient_reduce_div_fusion=device.type == "cuda",
    )
    return FullyShardedDataParallel(config, sharding, model.to(device))


def batch(generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """`(BATCH, SEQUENCE + 1)` tokens that count upwards from anywhere, by steps of 1, 2 or 3."""
    first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    step = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return ((first + step * torch.arange(SEQUENCE + 1)) % VOCABULARY).to(device)


def main() -> None:
    """Train for 30 steps."""
    device = start()
    with quiet_imports():  # and about what it has deprecated
        model = wrapped_model(device)
    config = megatron_muon.MuonOptimizerConfig(  # Muon: the optimizer
        optimizer="muon",
        lr=0.02,
        min_lr=0.0,
        weight_decay=0.1,
        clip_grad=1.0,
        muon_momentum=0.95,
        muon_extra_scale_factor=0.2,
        use_distributed_optimizer=True,
    )
    optimizer = megatron_muon.get_megatron_muon_optimizer(config, [model])

    generator = torch.Generator().manual_seed(dist.get_rank())
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1)
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, device=device).tril().logical_not()
    for step in range(1, 31):
        optimizer.zero_grad()
        tokens = batch(generator, device)
        loss = (
            model(tokens[:, :-1].contiguous(), positions, future, labels=tokens[:, 1:].contiguous())
            .float()
            .mean()
        )
        loss.backward()
        finalize_model_grads([model])
        updated, gradient_norm, _ = optimizer.step()
        assert updated, "a gradient was not finite"
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(
                f"step {step:3d}  loss {loss.item() / dist.get_world_size():.4f}  norm"
                f" {gradient_norm:.3f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
