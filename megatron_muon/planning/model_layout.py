"""The layout that Megatron-FSDP gives a GPT, derived on paper from the model's sizes.

Lists a model's parameters in module order, puts them into buckets, and cuts the buckets over ranks, as megatron-core
0.19 does (megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer; each function names its counterpart).
Dense matrices and expert matrices have groups of their own. Nothing here imports Megatron; no tensor is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_muon.core.layout import BlockedLayout, Blocks, Layout, Matrix, Shard
from megatron_muon.errors import UserError
from megatron_muon.megatron.model.names import matching

UNITS = "optim_grads_params"
"""The strategy whose buckets follow transformer layers; "optim" and "optim_grads" cut by size."""

STRATEGIES = ("optim", "optim_grads", UNITS)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A GPT's sizes; fields are named after Megatron's flags.

    Attributes:
        num_query_groups: key and value heads; as many as attention heads where attention is not grouped.
        moe_layers: which layers are mixtures of experts, one entry a layer; empty for a dense model.
        moe_ffn_hidden_size: of one expert.
        moe_shared_expert_intermediate_size: 0 without shared expert.
        moe_latent_size: width that experts work in; 0 for the hidden size.
        moe_grouped_gemm: all first projections of a layer's experts before all second ones (TEGroupedMLP), instead
            of expert by expert (SequentialMLP).
        padded_vocab_size: rows of the embedding, which take room in buckets that are cut by size; 0 leaves them out.
        split_qkv: orthogonalise query, key and value alone.
        split_gated_mlp: orthogonalise gate and up of a gated MLP alone.
        split_heads: orthogonalise every attention head of query, key and value alone.
        exclude: patterns of `--muon-exclude`: the scalar optimizer takes matrices whose names match.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    swiglu: bool = False
    bias: bool = False
    qkv_bias: bool = False
    layer_norm_bias: bool = False
    qk_layernorm: bool = False
    attention_output_gate: bool = False
    num_experts: int = 0
    moe_layers: tuple[bool, ...] = ()
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_latent_size: int = 0
    moe_grouped_gemm: bool = False
    padded_vocab_size: int = 0
    untied_output: bool = False
    split_qkv: bool = True
    split_gated_mlp: bool = False
    split_heads: bool = False
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """How ranks divide the model and its data; fields are named after Megatron's flags.

    Raises:
        UserError: the sizes do not divide the world.
    """

    world_size: int
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    instances: int = 1

    def __post_init__(self) -> None:
        for flag, size in (
            ("--world-size", self.world_size),
            ("--tensor-model-parallel-size", self.tensor),
            ("--expert-model-parallel-size", self.expert),
            ("--expert-tensor-parallel-size", self.expert_tensor),
            ("--context-parallel-size", self.context),
            ("--num-distributed-optimizer-instances", self.instances),
        ):
            if size < 1:
                raise UserError(f"{flag} must be at least 1, got {size}")
        for what, size in (
            ("tensor x context parallel size x optimizer instances", self.tensor * self.context * self.instances),
            (
                "expert x expert tensor parallel size x optimizer instances",
                self.expert * self.expert_tensor * self.instances,
            ),
        ):
            if self.world_size % size:
                raise UserError(f"{what} is {size}, which does not divide {self.world_size} ranks; change --world-size")

    @property
    def dense_ranks(self) -> int:
        """Ranks over which a dense matrix is sharded: dp_cp of one optimizer instance."""
        return self.world_size // (self.tensor * self.instances)

    @property
    def expert_ranks(self) -> int:
        """Ranks over which an expert's matrix is sharded: expt_dp of one optimizer instance."""
        return self.world_size // (self.expert * self.expert_tensor * self.instances)


@dataclass(frozen=True)
class Parameter:
    """A parameter of this tensor- and expert-parallel rank, in module order.

    Attributes:
        unit: transformer layer that it belongs to; None outside of all.
        muon: whether Muon takes it.
        blocks: how its rows make blocks; None for one block.
    """

    name: str
    shape: tuple[int, ...]
    unit: int | None
    muon: bool = False
    blocks: Blocks | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row_size(self) -> int:
        """Elements of a row; 1 for a vector."""
        return math.prod(self.shape[1:])

    @property
    def is_expert(self) -> bool:
        """As Megatron-FSDP tells experts: by name. Shared experts are dense."""
        return ".experts." in self.name


def model_layouts(
    model: ModelSizes,
    parallel: ParallelSizes,
    *,
    strategy: str = UNITS,
    bucket_size: int | None = None,
    over_tp: bool = False,
) -> tuple[BlockedLayout, BlockedLayout | None]:
    """Layouts of the dense matrices over dp_cp ranks, and of the experts' over expt_dp ranks (None without experts).

    All instances of the distributed optimizer belong to a group, as replicas. The groups of the expert-parallel ranks
    are all alike, and without `over_tp` so are those of the tensor-parallel ranks.

    Args:
        model: the model's sizes.
        parallel: the world and how it is divided.
        strategy: one of `STRATEGIES`.
        bucket_size: elements after which a bucket that is cut by size ends; None for no such cut.
        over_tp: matrices are whole over tensor-parallel ranks, which belong to the group then. Otherwise the part of
            each tensor-parallel rank is a matrix of its own.

    Raises:
        UserError: the parallel sizes do not divide the model, the strategy does not shard, or a pattern of `exclude`
            matches no matrix.
    """
    if strategy not in STRATEGIES:
        raise UserError(
            f"--data-parallel-sharding-strategy {strategy} leaves nothing to plan; choose one of "
            f"{', '.join(STRATEGIES)}"
        )
    if model.num_query_groups % parallel.tensor and not over_tp:
        raise UserError(
            f"--num-query-groups {model.num_query_groups} must be a multiple of --tensor-model-parallel-size "
            f"{parallel.tensor}, or --muon-tp-mode duplicated"
        )
    listed = _without_excluded(model, list(model_parameters(model, parallel)))
    dense = _layout(
        [parameter for parameter in listed if not parameter.is_expert], parallel.dense_ranks, strategy, bucket_size
    )
    listed_experts = [parameter for parameter in listed if parameter.is_expert]
    experts = _layout(listed_experts, parallel.expert_ranks, strategy, bucket_size) if listed_experts else None
    uncut = replace(parallel, tensor=1, expert_tensor=1) if over_tp else parallel
    whole = {parameter.name: parameter for parameter in model_parameters(model, uncut)}
    return (
        _over_replicas(dense, whole, parallel.tensor if over_tp else 1, parallel.instances),
        None
        if experts is None
        else _over_replicas(experts, whole, parallel.expert_tensor if over_tp else 1, parallel.instances),
    )


def _over_replicas(blocked: BlockedLayout, whole: dict[str, Parameter], tensor: int, instances: int) -> BlockedLayout:
    """The layout of one tensor-parallel rank's parts, in one instance, as that of whole matrices over all of them.

    Ranks are ordered as Megatron orders them: tensor-parallel ones lie together, instances lie apart.

    Args:
        blocked: the parts over data-parallel ranks.
        whole: the whole matrices.
        tensor: parts of a matrix; one that is not cut has as many replicas.
        instances: instances of the distributed optimizer.
    """
    size = blocked.layout.world_size
    if tensor == instances == 1:
        return blocked
    matrices = []
    for matrix in blocked.layout.matrices:
        rows, cols = whole[matrix.name].shape
        shards = []
        for shard in matrix.shards:
            places = [
                [(instance * size + shard.rank) * tensor + part for instance in range(instances)]
                for part in range(tensor)
            ]
            if (rows, cols) == matrix.shape:  # not cut
                places = [sorted(rank for ranks in places for rank in ranks)]
            for part, (first, *others) in enumerate(places):
                row_start = shard.row_start + (part * matrix.shape[0] if rows != matrix.shape[0] else 0)
                col_start = part * matrix.shape[1] if cols != matrix.shape[1] else 0
                shards.append(Shard(first, row_start, shard.rows, col_start, shard.cols, replicas=tuple(others)))
        matrices.append(Matrix(matrix.name, (rows, cols), tuple(sorted(shards, key=lambda shard: shard.rank))))
    blocks = tuple(whole[matrix.name].blocks for matrix in matrices)
    return BlockedLayout(Layout(size * tensor * instances, tuple(matrices)), blocks)


def _without_excluded(model: ModelSizes, listed: Sequence[Parameter]) -> list[Parameter]:
    """The parameters, those that `--muon-exclude` names not Muon's."""
    matrices = [parameter.name for parameter in listed if parameter.muon]
    others = [parameter.name for parameter in listed if not parameter.muon]
    excluded = set(matching(model.exclude, matrices, others=others))
    return [replace(parameter, muon=False) if parameter.name in excluded else parameter for parameter in listed]


def model_parameters(model: ModelSizes, parallel: ParallelSizes) -> Iterator[Parameter]:
    """All parameters of one tensor- and expert-parallel rank, in module order.

    Source: megatron.core.models.gpt.gpt_model.GPTModel and the modules it builds. Where norms are fused into the
    projection that follows (Transformer Engine), vectors stand elsewhere; they come after the matrices in a bucket, so
    no cut of a matrix moves.
    """
    _check_divides(model, parallel)
    hidden, vocab = model.hidden_size, model.padded_vocab_size // parallel.tensor
    if vocab:
        yield Parameter("embedding.word_embeddings.weight", (vocab, hidden), None)
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}"
        yield from _norm(model, f"{prefix}.input_layernorm", layer)
        yield from _attention(model, parallel, f"{prefix}.self_attention", layer)
        yield from _norm(model, f"{prefix}.pre_mlp_layernorm", layer)
        if model.moe_layers and model.moe_layers[layer]:
            yield from _mixture(model, parallel, f"{prefix}.mlp", layer)
        else:
            ffn = model.ffn_hidden_size // parallel.tensor
            yield from _mlp(model, f"{prefix}.mlp", layer, hidden, ffn, bias=model.bias)
    yield Parameter("decoder.final_layernorm.weight", (hidden,), None)
    if model.layer_norm_bias:
        yield Parameter("decoder.final_layernorm.bias", (hidden,), None)
    if vocab and model.untied_output:
        yield Parameter("output_layer.weight", (vocab, hidden), None)


def _check_divides(model: ModelSizes, parallel: ParallelSizes) -> None:
    for what, size, divisor, flag in (
        ("--num-attention-heads", model.num_attention_heads, parallel.tensor, "--tensor-model-parallel-size"),
        ("--num-attention-heads", model.num_attention_heads, model.num_query_groups, "--num-query-groups"),
        ("--ffn-hidden-size", model.ffn_hidden_size, parallel.tensor, "--tensor-model-parallel-size"),
        (
            "--moe-shared-expert-intermediate-size",
            model.moe_shared_expert_intermediate_size,
            parallel.tensor,
            "--tensor-model-parallel-size",
        ),
        ("--num-experts", model.num_experts, parallel.expert, "--expert-model-parallel-size"),
        ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size, parallel.expert_tensor, "--expert-tensor-parallel-size"),
    ):
        if size % divisor:
            raise UserError(f"{what} {size} must be a multiple of {flag} {divisor}")
    if model.moe_layers and len(model.moe_layers) != model.num_layers:
        raise UserError(
            f"--moe-layer-freq names {len(model.moe_layers)} layers, --num-layers is {model.num_layers}; "
            "make them equal"
        )


def _norm(model: ModelSizes, name: str, layer: int, size: int = 0) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (size or model.hidden_size,), layer)
    if model.layer_norm_bias:
        yield Parameter(f"{name}.bias", (size or model.hidden_size,), layer)


def _attention(model: ModelSizes, parallel: ParallelSizes, name: str, layer: int) -> Iterator[Parameter]:
    """Source: megatron.core.transformer.attention.SelfAttention; the output projection is built first."""
    heads, groups = model.num_attention_heads // parallel.tensor, model.num_query_groups // parallel.tensor
    query = model.num_attention_heads // model.num_query_groups * model.kv_channels
    parts = (query, *([query] if model.attention_output_gate else []), model.kv_channels, model.kv_channels)
    rows = model.num_query_groups * sum(parts) // parallel.tensor
    hidden = model.hidden_size
    yield Parameter(f"{name}.linear_proj.weight", (hidden, heads * model.kv_channels), layer, muon=True)
    if model.bias:
        yield Parameter(f"{name}.linear_proj.bias", (hidden,), layer)
    blocks: Blocks | None = (groups, parts) if model.split_qkv and groups else None
    if model.split_heads:
        blocks = (1, (model.kv_channels,) * (rows // model.kv_channels))
    yield Parameter(f"{name}.linear_qkv.weight", (rows, hidden), layer, True, blocks)
    if model.bias or model.qkv_bias:
        yield Parameter(f"{name}.linear_qkv.bias", (rows,), layer)
    if model.qk_layernorm:
        yield from _norm(model, f"{name}.q_layernorm", layer, model.kv_channels)
        yield from _norm(model, f"{name}.k_layernorm", layer, model.kv_channels)


def _mlp(model: ModelSizes, name: str, layer: int, width: int, ffn: int, *, bias: bool) -> Iterator[Parameter]:
    """Source: megatron.core.transformer.mlp.MLP; gate and up share the first projection."""
    up = 2 * ffn if model.swiglu else ffn
    yield Parameter(f"{name}.linear_fc1.weight", (up, width), layer, True, _gate_and_up(model, ffn))
    if bias:
        yield Parameter(f"{name}.linear_fc1.bias", (up,), layer)
    yield Parameter(f"{name}.linear_fc2.weight", (width, ffn), layer, muon=True)
    if bias:
        yield Parameter(f"{name}.linear_fc2.bias", (width,), layer)


def _gate_and_up(model: ModelSizes, ffn: int) -> Blocks | None:
    """The blocks of a first projection with `ffn` rows of each."""
    return (1, (ffn, ffn)) if model.swiglu and model.split_gated_mlp else None


def _mixture(model: ModelSizes, parallel: ParallelSizes, name: str, layer: int) -> Iterator[Parameter]:
    """Source: megatron.core.transformer.moe.moe_layer.MoELayer."""
    hidden, width = model.hidden_size, model.moe_latent_size or model.hidden_size
    yield Parameter(f"{name}.router.weight", (model.num_experts, hidden), layer, muon=True)
    if model.bias:
        yield Parameter(f"{name}.router.bias", (model.num_experts,), layer)
    if model.moe_latent_size:
        yield Parameter(f"{name}.fc1_latent_proj.weight", (width, hidden), layer, muon=True)
        yield Parameter(f"{name}.fc2_latent_proj.weight", (hidden, width), layer, muon=True)
    local = model.num_experts // parallel.expert
    ffn = model.moe_ffn_hidden_size // parallel.expert_tensor
    up = 2 * ffn if model.swiglu else ffn
    if model.moe_grouped_gemm:
        for expert in range(local):
            blocks = _gate_and_up(model, ffn)
            yield Parameter(f"{name}.experts.linear_fc1.weight{expert}", (up, width), layer, True, blocks)
        for expert in range(local):
            yield Parameter(f"{name}.experts.linear_fc2.weight{expert}", (width, ffn), layer, muon=True)
    else:
        for expert in range(local):
            yield from _mlp(model, f"{name}.experts.local_experts.{expert}", layer, width, ffn, bias=model.bias)
    if model.moe_shared_expert_intermediate_size:
        if model.moe_shared_expert_gate:
            yield Parameter(f"{name}.shared_experts.gate_weight", (1, hidden), layer, muon=True)
        shared = model.moe_shared_expert_intermediate_size // parallel.tensor
        yield from _mlp(model, f"{name}.shared_experts", layer, hidden, shared, bias=False)


def _layout(parameters: Sequence[Parameter], world_size: int, strategy: str, bucket_size: int | None) -> BlockedLayout:
    shards: dict[str, tuple[Shard, ...]] = {}
    for bucket in buckets(parameters, by_unit=strategy == UNITS, bucket_size=bucket_size):
        shards.update(cut_bucket(bucket, world_size))
    ours = [parameter for parameter in parameters if parameter.muon]
    matrices = tuple(Matrix(p.name, (p.shape[0], p.shape[1]), shards[p.name]) for p in ours)
    return BlockedLayout(Layout(world_size, matrices), tuple(parameter.blocks for parameter in ours))


def buckets(parameters: Sequence[Parameter], *, by_unit: bool, bucket_size: int | None) -> list[list[Parameter]]:
    """Parameters of one kind (dense or expert) in buckets, each in the order of its storage.

    Source: `_get_parameter_groups`. A layer is one bucket; what lies outside of layers ends a bucket when it has
    `bucket_size` elements. Within a bucket, long rows come first.
    """
    groups: dict[int | None, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.unit if by_unit else None, []).append(parameter)
    made = []
    for unit, members in groups.items():
        bucket: list[Parameter] = []
        filled = 0
        for parameter in members:
            bucket.append(parameter)
            filled += parameter.numel
            if unit is None and bucket_size and filled >= bucket_size:
                made.append(bucket)
                bucket, filled = [], 0
        if bucket:
            made.append(bucket)
    return [sorted(bucket, key=lambda parameter: -parameter.row_size) for bucket in made]


def cut_bucket(bucket: Sequence[Parameter], world_size: int) -> dict[str, tuple[Shard, ...]]:
    """The row shards of a bucket's matrices: the bucket is padded and cut into equal pieces, a piece a rank.

    Source: `build_data_parallel_buffer_index` and `DataParallelBuffer._get_item_slice_in_shard`.
    """
    factor = chunk_factor(bucket)
    offsets, end = place(bucket, factor)
    piece = math.ceil(end / (world_size * factor)) * factor
    shards = {}
    for parameter, offset in zip(bucket, offsets, strict=True):
        if not parameter.muon:
            continue
        cols, held = parameter.row_size, []
        for rank in range(offset // piece, (offset + parameter.numel - 1) // piece + 1):
            first = max(rank * piece - offset, 0) // cols
            last = min((rank + 1) * piece - offset, parameter.numel) // cols
            if last > first:
                held.append(Shard(rank, first, last - first, 0, cols))
        shards[parameter.name] = tuple(held)
    return shards


def chunk_factor(bucket: Sequence[Parameter]) -> int:
    """Elements that pieces are a multiple of, so that every cut falls between rows. Long rows come first in `bucket`.

    Source: `_get_parameter_groups`, step 3.
    """
    factor = bucket[0].row_size
    for parameter in bucket:
        row = parameter.row_size
        fits = row == factor or (factor % row == 0 and parameter.numel % factor == 0) or parameter.numel < factor
        if not fits:
            factor = math.lcm(factor, row)
    return factor


def place(bucket: Sequence[Parameter], factor: int) -> tuple[list[int], int]:
    """Where each parameter begins in its bucket, and where the last ends.

    Parameters follow each other; one that leaves part of a chunk over is followed by the next that fits into what is
    left, and small ones fill gaps or come last. Source: `build_data_parallel_buffer_index`.
    """
    sizes = [parameter.numel for parameter in bucket]
    whole = [index for index, size in enumerate(sizes) if size >= factor]
    small = [index for index, size in enumerate(sizes) if size < factor]
    offsets = [0] * len(bucket)
    end = 0
    while whole:
        index = whole.pop(0)
        offsets[index] = end
        rest = sizes[index] % factor
        if not rest:
            end += sizes[index]
            continue
        gap = end + sizes[index]
        end += (sizes[index] // factor + 1) * factor
        space = factor - rest
        partner = next((other for other in whole if 0 < sizes[other] % factor <= space), None)
        if partner is not None:
            whole.remove(partner)
            offsets[partner] = end - sizes[partner] % factor
            space -= sizes[partner] % factor
            end += sizes[partner] // factor * factor
        for other in list(small):
            if sizes[other] <= space:
                offsets[other] = gap
                space -= sizes[other]
                gap += sizes[other]
                small.remove(other)
    for index in small:
        offsets[index] = end
        end += sizes[index]
    return offsets, end
