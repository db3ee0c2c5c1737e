"""The matrices of a Hugging Face model under FSDP2 as `megatron_muon.Muon` has them, without ranks."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Shard

from megatron_muon import shipped
from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.errors import UserError, install
from megatron_muon.fsdp.cuts import placed_shards
from megatron_muon.fsdp.selection import select
from megatron_muon.tools.plan.estimate import Group


def read_model(path: Path, world_size: int) -> Group:
    """The matrices of the model that a `transformers` folder or config.json describes, by `fully_shard` over all ranks.

    The model is built on the meta device; nothing is downloaded.

    Raises:
        UserError: transformers is not installed, or has no such model.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = shipped.find(path)
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"--hf needs transformers ({error}); {install('hf')}") from None
    if not path.exists():
        raise UserError(f"--hf {path}: there is no such folder or file; give a model's folder or its config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        named = (config.architectures or [""])[0]
        with torch.device("meta"):
            if hasattr(transformers, named):
                model = getattr(transformers, named)(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--hf {path}: transformers {transformers.__version__} cannot build it: {reason}") from None
    selection = select(model.named_parameters())
    parameters = [p for group in selection.muon for p in group["params"]]
    ranks = np.arange(world_size)
    shapes = {p: (p.shape[0], p.shape[1]) for p in parameters}
    cut = {shape: placed_shards(shape, ranks, [Shard(0)]) for shape in set(shapes.values())}
    matrices = (Matrix(selection.names[p], shape, cut[shape]) for p, shape in shapes.items())
    return Group("fully_shard", Layout(world_size, tuple(matrices)))
