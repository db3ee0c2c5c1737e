"""Muon in transformers' Trainer and TRL's SFTTrainer, in one process or under FSDP2.

    python examples/trainers/transformers_trainer.py [--trl] [--compile] [--resume]
    torchrun --nproc-per-node 2 examples/trainers/transformers_trainer.py

Gradients of two batches make a step. Needs transformers, accelerate and, with `--trl`, TRL.
"""

import common
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import megatron_muon


def train() -> None:
    """Train, or go on from the checkpoint."""
    given = common.arguments(__doc__)
    kind, kind_of_arguments, others = Trainer, TrainingArguments, {}
    if given.trl:
        from trl import SFTConfig, SFTTrainer

        bytes_alone = Tokenizer(
            models.WordLevel({str(byte): byte for byte in range(256)}, unk_token="0")
        )
        others["processing_class"] = PreTrainedTokenizerFast(
            tokenizer_object=bytes_alone, pad_token="0", eos_token="1"
        )
        kind, kind_of_arguments = SFTTrainer, SFTConfig
    args = kind_of_arguments(
        given.folder,
        max_steps=common.STEPS,
        save_steps=common.SAVED,
        per_device_train_batch_size=common.BATCH,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=common.ON_CPU,
        torch_compile=given.compile,
        torch_compile_backend="aot_eager" if given.compile and common.ON_CPU else None,
        fsdp=common.RANKS > 1,
        fsdp_config=(
            {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if common.RANKS > 1 else None
        ),
    )
    if common.RANKS > 1 and common.ON_CPU:
        common.shard_on_cpu(args.distributed_state)
    model, dataset = (
        common.small_llama(),
        Dataset.from_dict({"input_ids": common.rows(), "labels": common.rows()}),
    )
    muon = {"params": model, "lr": 0.02, "adamw_lr": 3e-3}
    trainer = kind(
        model,
        args,
        train_dataset=dataset,
        optimizer_cls_and_kwargs=(megatron_muon.Muon, muon),
        **others,
    )
    trainer.train(
        resume_from_checkpoint=f"{given.folder}/checkpoint-{common.SAVED}" if given.resume else None
    )
    common.show([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    train()
    common.end()
