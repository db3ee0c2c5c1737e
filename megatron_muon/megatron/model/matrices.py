"""The matrices of a Megatron model: Muon's parameters, their shapes and blocks, and their ranks.

Muon takes 2D weights and stacks of experts, except embeddings, output layers, excluded ones, and
parameters whose rows are fused in an unknown way: one update for several matrices would be wrong.
Several of megatron-core's projections hold several matrices in one parameter: query, key and value;
gate and up; a latent and a rotary key; a layer's experts. Splits follow from sizes of the model and
of whole matrices, never from the rows that a rank holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.layout import RowSplit, whole
from megatron_muon.errors import UserError
from megatron_muon.matrices.fused import LOOKS_FUSED
from megatron_muon.matrices.roles import EMBEDDING, OUTPUT, role_of, why_not_muon
from megatron_muon.matrices.table import Row
from megatron_muon.matrices.views import Matrices, View
from megatron_muon.megatron.flags.named_optimizer import is_class
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.megatron.upstream import (
    TransformerConfig,
    _get_qkv_split_shapes,
    get_ep_layer_offset,
    installed,
)
from megatron_muon.patterns import matching, values_of
from megatron_muon.ranks import new_group_of, numbers_of_all_ranks

MUON = "muon"
"""Muon in the table of parameters; the scalar optimizer has Megatron's name for it."""

QKV = "linear_qkv.weight"
"""The end of the only name whose matrices megatron-core's own Muon splits."""

UNKNOWN = "fused in a way that is not known (docs/parameters.md)"
"""A reason to leave a 2D weight to the scalar optimizer, like those of `why_not_muon`."""

_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+")
"""The number of an expert in a parameter's name."""

_ANY_NUMBER = re.compile(r"(?<=\.)\d+|(?<=weight)\d+")

_LEFT_BEHIND = (
    "allreduce",
    "shared_embedding",
    "expert_tp",
    "grad_norm_group",
    "use_muon",
    "partition_sizes",
)


def restore_attributes(model_chunks: Sequence[Any]) -> None:
    """Copy the attributes that Megatron-FSDP leaves on original parameters to the optimizer's.

    Without `allreduce` an expert parameter counts as dense, is reduced over the wrong group and
    enters the gradient norm wrong (ParamAndGradBuffer._init_optimizer_named_parameters of
    megatron-core 0.19 copies a fixed list).
    """
    for chunk in model_chunks:
        for parameter in chunk.parameters():
            original = getattr(parameter, "orig_param", None)
            for name in _LEFT_BEHIND:
                if hasattr(original, name):
                    setattr(parameter, name, getattr(original, name))


def tag_for_muon(
    model_chunks: Sequence[Any],
    *,
    exclude: Sequence[str] = (),
    steps_for: Mapping[str, int] | None = None,
    like_upstream: bool = False,
) -> None:
    """Set attributes of trainable parameters: `use_muon`, `why_not_muon`, `fused_rows` and others.

    A `use_muon` that a script has set is kept, except where megatron-core sets it too. Parameters
    that match a pattern of `exclude` (`--muon-exclude`) go to the scalar optimizer; `steps_for` has
    Newton-Schulz steps by pattern, of which the last match holds (`--muon-ns-steps-for`).
    `like_upstream` chooses weights and blocks as megatron-core's own Muon (`--muon-matrices`).
    Raises a UserError for a pattern that matches none of Muon's matrices.

    Source: megatron.core.optimizer._get_megatron_emerging_optimizer, which does this for its own
    Muon.
    """
    for name, parameter, path in _trained(model_chunks):
        if not hasattr(parameter, "is_upstreams"):  # before marks of this package
            parameter.is_upstreams = not installed().IS_LEFT_OUT(parameter)
        if "experts" in name and "shared" not in name:
            parameter.expert_tp = True
        # A custom model's; 0.19 refuses --moe-single-grouped-weight under Megatron-FSDP.
        parameter.expert_stack = parameter.ndim == 3 and ".experts." in name
        if not like_upstream and len(path) > 1 and installed().has_marked(path[-2]):
            vars(parameter).pop("use_muon", None)
        if like_upstream:
            parameter.expert_stack = False
            if QKV in name and parameter.ndim == 2:
                _fuse(name, parameter, path)
        elif parameter.ndim == 2 or parameter.expert_stack:
            why = _fuse(name, parameter, path)
            if parameter.ndim == 2:
                why = _outside(name, parameter, path[-1]) or why
            if why and not hasattr(parameter, "use_muon"):
                parameter.use_muon, parameter.why_not_muon = False, why
    matrices = {name: parameter for parameter, name in muon_matrices(model_chunks).items()}
    trained = [name for p, name in parameter_names(model_chunks).items() if p.requires_grad]
    others = [name for name in trained if name not in matrices]
    hint = " (--muon-log-params lists all)"
    for name in matching("--muon-exclude", exclude, matrices, others=others, hint=hint):
        parameter = matrices.pop(name)
        parameter.use_muon, parameter.why_not_muon = False, "--muon-exclude"
        others.append(name)
    steps = values_of(
        matrices, steps_for or {}, argument="--muon-ns-steps-for", others=others, hint=hint
    )
    for name, parameter in matrices.items():
        parameter.ns_steps = steps.get(name, 0)


def _trained(model_chunks: Sequence[Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """Names, trainable parameters, and the modules around each, the outermost first."""
    for chunk in model_chunks:
        modules = dict(chunk.named_modules())
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                parts = name.split(".")[:-1]
                prefixes = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
                yield name, parameter, [modules[prefix] for prefix in prefixes]


def _outside(name: str, parameter: Any, module: Any) -> str:
    """Why a 2D weight is not a matrix inside the network, by module, mark and name; or empty."""
    role = role_of(module)
    if role != EMBEDDING and getattr(parameter, "is_embedding_or_output_parameter", False):
        role = OUTPUT
    return why_not_muon(name.replace("module.", ""), parameter, role=role)


def _fuse(name: str, parameter: Any, path: Sequence[Any]) -> str:
    """Set a parameter's `fused_rows`; `UNKNOWN` if its rows seem to be fused in another way."""
    stated = getattr(parameter, "partition_sizes", ())
    if not stated and name.endswith(".in_proj.weight"):
        stated = getattr(path[-2], "in_proj_split_sections", ())
    configs = [getattr(module, "config", None) for module in reversed(path)]
    config = next(each for each in configs if isinstance(each, TransformerConfig))
    fused = fused_rows(name, config, stated)
    fits = fused is None or fused.fits(view_of(parameter).matrix[0])
    parameter.fused_rows = fused if fits else None
    if fused is None and LOOKS_FUSED.search(".".join(name.split(".")[-2:])):
        return UNKNOWN
    return "" if fits else UNKNOWN


def is_muon_matrix(parameter: torch.Tensor) -> bool:
    """True if Muon takes this tagged parameter, a 2D weight or a stack of experts."""
    # megatron-core's mark
    embedding = getattr(parameter, "is_embedding_or_output_parameter", False)
    is_matrix = parameter.ndim == 2 or getattr(parameter, "expert_stack", False)
    return is_matrix and not embedding and getattr(parameter, "use_muon", True)


def muon_matrices(model_chunks: Sequence[Any]) -> dict[Any, str]:
    """The trainable parameters that Muon takes, with their names."""
    names = parameter_names(model_chunks)
    return {p: name for p, name in names.items() if p.requires_grad and is_muon_matrix(p)}


def unlike_upstream(model_chunks: Sequence[Any], config: MuonOptimizerConfig) -> list[str]:
    """Tagged weights that megatron-core's own Muon treats otherwise, layers and experts as `*`."""
    found: dict[str, None] = {}
    for parameter, name in parameter_names(model_chunks).items():
        if not parameter.requires_grad:
            continue
        is_theirs = parameter.is_upstreams
        difference = ""
        if is_theirs != is_muon_matrix(parameter):
            difference = "Muon there, not here" if is_theirs else "Muon here, not there"
        elif is_theirs and QKV not in name and len(block_split(parameter, config).parts) > 1:
            difference = "one block there"
        if difference:
            found[f"{_ANY_NUMBER.sub('*', name)} ({difference})"] = None
    return list(found)


def parameter_names(model_chunks: Sequence[Any]) -> dict[Any, str]:
    """The unique name of each parameter, without the wrappers' `module.` prefixes."""
    names = {}
    for index, chunk in enumerate(model_chunks):
        prefix = f"chunk{index}." if len(model_chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            names[parameter] = prefix + name.replace("module.", "")
    return names


def with_all_experts(names: Mapping[Any, str], config: TransformerConfig) -> dict[Any, str]:
    """The same names, with experts counted over all expert-parallel ranks."""
    first = get_ep_layer_offset(config.num_moe_experts)
    found = {}
    for parameter, name in names.items():
        found[parameter] = _EXPERT.sub(lambda number: str(first + int(number[0])), name)
    return found


def parameter_rows(
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[torch.Tensor, str],
    matrices: Mapping[torch.Tensor, Matrices],
    label: str = MUON,
) -> list[Row]:
    """Rows of the table, with blocks, and reasons why Muon leaves a 2D weight.

    Shapes are whole over data- and tensor-parallel ranks, and those of this expert-parallel rank
    for experts. Groups of matrices have no `optimizer`; the table calls it `label`.
    """
    rows = []
    for group in sorted(groups, key=lambda group: "optimizer" in group):
        optimizer = group.get("optimizer", label)
        for p in group["params"]:
            note = matrices[p].note() if p in matrices else ""
            if p.ndim == 2 and optimizer != label:
                note = getattr(p, "why_not_muon", "use_muon=False")
            whole_or_part = p if p.ndim == 2 else getattr(p, "orig_param", p)
            rows.append(Row(optimizer, names[p], tuple(whole_or_part.shape), note))
    return rows


@dataclass(frozen=True)
class Fused:
    """The rows of one parameter, as they repeat from its first row to its last."""

    parts: tuple[int, ...] = ()  # rows of each matrix in one repetition; none for one matrix
    heads: tuple[int, ...] = ()  # rows of each head in one repetition; none without heads
    gated: bool = False  # the first half of the rows is the gate, the other is up
    interleave: int = 0  # rows of gate that alternate with as many of up; 0: all of gate first
    is_cut_by_part: bool = False  # tensor-parallel ranks hold some rows of each part

    def fits(self, rows: int) -> bool:
        """True if rows are a whole number of repetitions."""
        if self.gated:
            return rows % (2 * max(self.interleave, 1)) == 0
        return rows % sum(self.parts or self.heads) == 0

    def split(self, rows: int, settings: MuonOptimizerConfig, *, tensor_parallel: int) -> RowSplit:
        """The blocks of a matrix of `rows` rows, one tensor-parallel rank's after another's."""
        if self.gated and (settings.muon_split_gated_mlp or is_class(settings.optimizer)):
            half = self.interleave or rows // (2 * tensor_parallel)
            return RowSplit(groups=rows // (2 * half), parts=(half, half))
        if self.heads and settings.muon_split_heads:
            return RowSplit(groups=1, parts=self.heads * (rows // sum(self.heads)))
        if self.parts and settings.muon_split_qkv:
            return RowSplit(groups=rows // sum(self.parts), parts=self.parts)
        return whole(rows)


def fused_rows(name: str, config: Any, stated: Sequence[int] = ()) -> Fused | None:
    """How the rows of a parameter are fused; None if none are known to be.

    `stated` are the rows of each part on a tensor-parallel rank, if the layer itself states them:
    `partition_sizes` of a weight, as of Mamba's `in_proj`, or `in_proj_split_sections` of a
    GatedDeltaNet. `config` is the TransformerConfig of the parameter's layer.

    Sources, megatron-core 0.19: `_get_qkv_split_shapes` of its own Muon for QKV;
    get_query_key_value_tensors of SelfAttention (the gate lies between query and key),
    CrossAttention and MLASelfAttention; MLP.forward, where gate and up are the halves of the first
    projection. Its own Muon leaves all but QKV whole, latent attention too.
    """
    if stated:
        return Fused(parts=tuple(rows for rows in stated if rows))
    if config.multi_latent_attention:
        nope, rotary, value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        if ".linear_qkv_down_proj.weight" in name:
            parts = (config.q_lora_rank, config.kv_lora_rank, rotary)
            return Fused(parts=parts, is_cut_by_part=True)
        if ".linear_kv_down_proj.weight" in name:
            return Fused(parts=(config.kv_lora_rank, rotary))
        if ".linear_kv_up_proj.weight" in name:
            return Fused(parts=(nope, value), heads=(nope, value))
        if re.search(r"\.linear_q(_up)?_proj\.weight", name):
            return Fused(heads=(nope + rotary,))
    if QKV in name:  # also beside latent attention, in a hybrid model
        return Fused(parts=tuple(_get_qkv_split_shapes(config)), heads=(config.kv_channels,))
    if ".linear_kv.weight" in name:
        return Fused(parts=(config.kv_channels,) * 2, heads=(config.kv_channels,))
    if config.gated_linear_unit and "linear_fc1.weight" in name:
        interleave = None
        if ".shared_experts." in name:
            interleave = getattr(config, "moe_shared_expert_glu_interleave_size", None)
        elif ".experts.linear_fc1." in name:  # not those of SequentialMLP, which never interleaves
            interleave = getattr(config, "moe_mlp_glu_interleave_size", None)
        return Fused(gated=True, interleave=interleave or 0)
    return None


def view_of(parameter: torch.Tensor, *, over_tp: bool = True) -> View:
    """How Muon reads a parameter: a 2D weight as a matrix, a stack as one for each expert.

    It is whole over tensor-parallel ranks; without `over_tp` this tensor-parallel rank's part
    counts as the parameter.
    """
    whole_or_part = parameter if over_tp else getattr(parameter, "orig_param", parameter)
    return View(tuple(whole_or_part.shape))


def block_split(
    parameter: torch.Tensor, settings: MuonOptimizerConfig, *, over_tp: bool = True
) -> RowSplit:
    """How each matrix of a tagged parameter splits into blocks; `over_tp` as for `view_of`.

    Raises:
        UserError: tensor parallelism cuts latent attention's fused down projection. Each rank has
            some rows of the query's latent and then of the other's (`FusedMLASelfAttention`), whose
            end with the rotary key may be on any rank: these are not groups of equal parts.
    """
    rows, _ = view_of(parameter, over_tp=over_tp).matrix
    part, _ = view_of(parameter, over_tp=False).matrix
    all_rows, _ = view_of(parameter).matrix
    fused: Fused | None = getattr(parameter, "fused_rows", None)
    is_cut = fused is not None and fused.is_cut_by_part and all_rows != part
    if is_cut and settings.muon_split_qkv:
        raise UserError(
            "--mla-down-proj-fusion with tensor parallelism: each rank has a part of both latents"
            " in linear_qkv_down_proj, which cannot be split into its matrices; leave"
            " --mla-down-proj-fusion out, or use --muon-no-split-qkv"
        )
    if fused is None or not fused.fits(rows):  # this rank may have too few query groups
        return whole(rows)
    return fused.split(rows, settings, tensor_parallel=rows // part)


def matrices_of(
    name: str, parameter: torch.Tensor, settings: MuonOptimizerConfig, *, over_tp: bool = True
) -> Matrices:
    """The matrices of a tagged parameter; `over_tp` as for `view_of`."""
    return Matrices(
        name=name,
        view=view_of(parameter, over_tp=over_tp),
        split=block_split(parameter, settings, over_tp=over_tp),
        steps=getattr(parameter, "ns_steps", 0),
    )


def matrix_group(
    data_parallel: dist.ProcessGroup, tensor_parallel: dist.ProcessGroup
) -> dist.ProcessGroup:
    """The ranks that together hold matrices cut by data and tensor parallelism. Collective."""
    if tensor_parallel.size() == 1:
        return data_parallel
    first = min(dist.get_process_group_ranks(data_parallel))
    label = min(numbers_of_all_ranks([first], tensor_parallel))[0]
    return new_group_of(label)


def over_gloo(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for tensors in host memory. Collective over all ranks."""
    return new_group_of(min(dist.get_process_group_ranks(group)), backend="gloo")
