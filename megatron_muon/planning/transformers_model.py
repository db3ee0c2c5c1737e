"""The matrices of a Hugging Face model under FSDP2 as `megatron_muon.Muon` has them, without ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.errors import UserError
from megatron_muon.fsdp.selection import select
from megatron_muon.planning.estimate import Group


def read_model(path: Path, world_size: int) -> Group:
    """The matrices of the model that a `transformers` folder or config.json describes, by `fully_shard` over all ranks.

    The model is built on the meta device; nothing is downloaded.

    Raises:
        UserError: transformers is not installed, or has no such model.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"--hf needs transformers ({error}); pip install 'megatron-muon[hf]'") from None
    if not path.exists():
        raise UserError(f"--hf {path}: there is no such folder or file; give a model's folder or its config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
        named = (config.architectures or [""])[0]
        with torch.device("meta"):
            if hasattr(transformers, named):
                model = getattr(transformers, named)(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--hf {path}: transformers {transformers.__version__} cannot build it: {reason}") from None
    selection = select(model.named_parameters())
    matrices = []
    for parameter in (p for group in selection.muon for p in group["params"]):
        rows, cols = parameter.shape
        each = -(-rows // world_size)  # as torch.chunk cuts: the last ranks may have fewer, or none
        held = [min(each, max(rows - each * rank, 0)) for rank in range(world_size)]
        matrices.append(row_sharded(selection.names[parameter], (rows, cols), held))
    return Group("fully_shard", Layout(world_size, tuple(matrices)))
