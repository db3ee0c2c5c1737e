"""Reads the weights of a checkpoint, and writes one without optimizer state.

Names are those of megatron-core's local layers, without wrappers:
`decoder.layers.0.mlp.linear_fc1.weight`. In a gated projection the gate's rows are a weight ending
in `_w`, the others one ending in `_v`, as in fsdp_dtensor. Transformer Engine keeps a norm in the
linear layer that follows it and numbers experts differently. Entries are written as megatron-core
0.19 saves them; `--finetune` starts with new optimizer state.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.checkpoint import content, folders
from megatron_muon.checkpoint.dcp import SummedFiles
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.command_line import build_parser
from megatron_muon.megatron.upstream import core  # noqa: F401  # see its row

_RELEASE = "release"
"""Megatron's name of weights that no run of Megatron has trained."""

_TO_LOCAL = (
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (
        r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$",
        r"self_attention.\1_layernorm.\2",
    ),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (
        r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)(_[wv])?$",
        r"mlp.experts.local_experts.\3.\1.\2\4",
    ),
)
"""Patterns of Transformer Engine's names, and the names of the local layers."""


class Weights:
    """The weights in the folder of a run, of its --save, or of one iteration.

    Attributes:
        folder: the iteration's.
        args: Megatron's arguments of the run.
        tensors: the weights by name.

    Raises:
        UserError: the checkpoint is incomplete or damaged (with `verify`, checksums are compared),
            or is not one of Megatron-FSDP.
    """

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        self.folder = folder = folders.find(directory)
        if wrong := folders.problems(folder, verify=verify, threads=2):
            raise UserError(f"this checkpoint cannot be read: {wrong[0]}")
        entries = content.read_entries(folder)
        objects = content.objects(entries)
        names = [name for name in content.weight_names(entries) if name not in objects]
        stored = content.read(folder, ["args", *names])
        args = stored.get("args")
        if not isinstance(args, argparse.Namespace):
            raise UserError(
                f"{folder} has no arguments of a run; give a checkpoint of --ckpt-format"
                " fsdp_dtensor"
            )
        # an older Megatron had fewer arguments
        defaults = vars(build_parser().parse_args([]))
        self.args = argparse.Namespace(**defaults | vars(args))
        self.tensors: dict[str, Tensor] = {local_name(name): stored[name] for name in names}

    @property
    def trained_in(self) -> torch.dtype:
        """The dtype of the run's matrix products."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else torch.float32


def local_name(entry: str) -> str:
    """The name of a weight, or of its half, in megatron-core's local layers."""
    name = content.plain(entry.removeprefix("model."))
    for pattern, replacement in _TO_LOCAL:
        name = re.sub(pattern, replacement, name)
    return name


def write(save_dir: Path, tensors: Mapping[str, Tensor], args: argparse.Namespace) -> None:
    """Write a checkpoint for runs with these arguments, whose --load is `save_dir`."""
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    for name, tensor in tensors.items():
        state[f"model.module.{_stored(name, args)}"] = tensor
    folder = folders.iteration_folder(save_dir, _RELEASE)
    writer = FileSystemWriter(folders.begin(folder))
    writer.fs = files = SummedFiles()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=writer, planner=planner, no_dist=True)
    folders.finish(folder, files.sums)
    (save_dir / folders.TRACKER).write_text(_RELEASE, "utf-8")


def _stored(name: str, args: argparse.Namespace) -> str:
    """The inverse of `local_name`, for the layers of a run with these arguments."""
    if args.transformer_impl != "transformer_engine":
        return name
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    if not args.num_experts:
        return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if args.moe_grouped_gemm:
        name = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", r"\2.\3\1", name)
    return name
