"""A pretraining script of someone's own, as Megatron-LM's are, for
tests/functional/test_own_megatron.py.

The environment variable ENABLE says where it enables Muon: "first", or "last", after Megatron's
functions have been imported by name, and again; else nowhere. It prints a checksum of the weights.
"""

import os
import sys
import zlib
from functools import partial

import megatron_muon.cpu

if os.environ["ENABLE"] == "first":
    megatron_muon.enable()
else:
    megatron_muon.cpu.install()

import torch
from megatron.core.datasets import utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables

if os.environ["ENABLE"] == "last":
    megatron_muon.enable()
    megatron_muon.enable()

utils.compile_helpers = lambda: None  # the wheel of megatron-core has the helper, and no Makefile
models = set()


def loss_func(loss_mask, output):
    loss = torch.sum(output.view(-1).float() * loss_mask.view(-1))
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


def forward_step(data_iterator, model):
    models.add(model)
    batch = {name: value.cuda() for name, value in next(data_iterator).items()}
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(loss_func, batch["loss_mask"])


def datasets(samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        path_to_cache=f"{args.data_path[0]}.cache",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()


datasets.is_distributed = True

if __name__ == "__main__":
    # a flag of pretrain_gpt.py's name
    args = parse_args(lambda parser: parser.add_argument("--device") and parser)
    validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    set_global_variables(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    for model in models:
        weights = [
            getattr(p, "_local_tensor", p).detach().cpu().numpy().tobytes()
            for p in model.parameters()
        ]
        sys.stdout.write(
            f"weights of rank {args.rank}: {zlib.crc32(b''.join(weights))}\n",
        )
