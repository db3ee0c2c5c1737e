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
from megatron_muon.fsdp.arguments import iteration_of
from megatron_muon.fsdp.cuts import placed_shards
from megatron_muon.fsdp.selection import select
from megatron_muon.settings import MuonSettings
from megatron_muon.tools.plan.estimate import Group
from megatron_muon.tools.plan.training_step import Planned


def read_model(path: Path, world_size: int) -> Planned:
    """The matrices of the model that a `transformers` folder or config.json describes, by `fully_shard` over all ranks.

    The model is built on the meta device; nothing is downloaded. The settings are the defaults of `Muon`.

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
        named = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            automatic = transformers.AutoModelForCausalLM
            model = named(config) if named else automatic.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--hf {path}: transformers {transformers.__version__} cannot build it: {reason}") from None
    selection = select(model.named_parameters())
    parameters = [p for group in selection.muon for p in group["params"]]
    shapes = {p: (p.shape[0], p.shape[1]) for p in parameters}
    cut = {shape: placed_shards(shape, np.arange(world_size), [Shard(0)]) for shape in set(shapes.values())}
    layout = Layout(world_size, tuple(Matrix(selection.names[p], shape, cut[shape]) for p, shape in shapes.items()))
    settings, iteration = MuonSettings(), iteration_of()
    vars(settings).update(muon_coefficient_type=iteration.coefficient_type, muon_num_ns_steps=iteration.steps)
    return Planned(settings, [Group("fully_shard", layout)], None)
