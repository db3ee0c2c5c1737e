"""A GPT for Megatron's pretrain: model, batches, loss, datasets.

megatron-core's wheel ships the training loop but not the script around it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_muon.megatron import LOSS
from megatron_muon.megatron.data.corpus import OutputPaths
from megatron_muon.megatron.flags.command_line import check_vocabularies
from megatron_muon.megatron.upstream import (
    BlendedMegatronDatasetBuilder,
    GPTDatasetConfig,
    GPTModelConfig,
    MockGPTDataset,
    get_args,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    get_rerun_state_machine,
    get_timers,
    get_tokenizer,
    gpt_config_from_args,
    gpt_dataset,
    print_rank_0,
)
from megatron_muon.megatron.upstream import parallel_state as mpu

LOCAL_LAYERS = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "bias_gelu_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""Arguments for megatron-core's local layers, which need no kernel."""

_BATCH_FIELDS = {"tokens", "labels", "loss_mask", "attention_mask", "position_ids"}
_DATA_SETTINGS = (
    "multiple_validation_sets",
    "full_validation",
    "split",
    "num_dataset_builder_threads",
    "mmap_bin_files",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "context_parallel_size",
)
Batch = dict[str, torch.Tensor | None]


def gpt_config(args: argparse.Namespace) -> GPTModelConfig:
    """The model that validated flags describe.

    megatron-core 0.19 leaves out --rope-scaling-factor, so that each model would have the default
    of 8.
    """
    config: GPTModelConfig = gpt_config_from_args(args)
    config.rope_scaling_factor = args.rope_scaling_factor
    return config


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]]) -> Batch:
    """The next micro-batch, read by the first tensor-parallel rank, cut by context parallelism."""
    args, tp_rank = get_args(), mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        read = next(data_iterator)
        for name in read.keys() & _BATCH_FIELDS:  # a blend's have the number of the data set, too
            batch[name] = read[name].cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
    )
    return get_batch_on_this_cp_rank(  # type: ignore[no-any-return]
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss, number of tokens, and both to log; loss and mask are `(batch, sequence)`."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda value: not torch.isfinite(value).all(),
            message="non-finite loss",
            tolerance=0.0,
            fatal=True,
        )
    tokens = mask.sum().to(torch.int)
    logged = torch.cat([loss.detach().view(1), tokens.view(1)])
    return loss, tokens, {LOSS: logged}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One forward pass of a micro-batch: each token's loss, and the function that reduces it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    inputs = (batch.get(name) for name in ("tokens", "position_ids", "attention_mask"))
    loss_mask = batch["loss_mask"]
    output = model(*inputs, labels=batch["labels"], loss_mask=loss_mask)
    assert loss_mask is not None  # set on the last pipeline stage, the only one
    return output, partial(loss_func, loss_mask)


class GPTDataset(gpt_dataset.GPTDataset):
    """megatron-core's GPT dataset, with indices in PREFIX.cache by default.

    megatron-core's own default, PREFIX/cache, makes a folder of a prefix of file names. Names of
    indices contain the name of this class.
    """

    config: GPTDatasetConfig

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        if self.config.path_to_cache is None:
            self.config = copy.copy(self.config)  # shared by the data sets of a blend
            self.config.path_to_cache = str(OutputPaths(Path(self.dataset.path_prefix)).cache)
        return super()._build_document_sample_shuffle_indices()  # type: ignore[no-any-return]


def train_valid_test_datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test sets of at least `samples` samples each."""
    args = get_args()
    check_vocabularies(args)
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        **{name: getattr(args, name) for name in _DATA_SETTINGS},
    )
    print_rank_0("> building training, validation and test sets ...")
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        dataset, samples, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()


train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]  # every data-parallel rank builds its own
