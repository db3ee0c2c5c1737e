"""The optimizers of a model under Megatron-FSDP: Muon for matrices, a scalar one for the rest.

`builder` makes the Muons.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.build import OWNER
from megatron_muon.errors import UserError
from megatron_muon.fsdp.assembly import Beside
from megatron_muon.fsdp.guards import compare_settings
from megatron_muon.fsdp.part import Part
from megatron_muon.matrices.table import doubt, elements_of, table, totals
from megatron_muon.matrices.views import Matrices
from megatron_muon.megatron.attention_logits import AttentionLogits
from megatron_muon.megatron.builder import build_muon
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.flags.named_optimizer import LION, is_class
from megatron_muon.megatron.flags.refusals import logits_flag
from megatron_muon.megatron.main_weights import MainWeights
from megatron_muon.megatron.model import matrices as mp
from megatron_muon.megatron.muon_config import MuonOptimizerConfig, check_supported, with_settings
from megatron_muon.megatron.patches.fsdp import patch_megatron_fsdp
from megatron_muon.megatron.plan_figures import figures, refuse_unmet
from megatron_muon.megatron.scalar_state import ScalarState, initialize_scalar_state
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.megatron.state_report import report_state
from megatron_muon.megatron.upstream import (
    ConstantGradScaler,
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    ProcessGroupCollection,
    _get_megatron_optimizer_based_on_param_groups,
    _get_param_groups,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron_muon.offload.run import offload_run
from megatron_muon.ranks import say
from megatron_muon.settings import UPSTREAM, flag_of, steps_for, word_as_flags


@word_as_flags()
def get_megatron_muon_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: dict[ParamKey, Any] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> MuonChainedOptimizer:
    """The optimizer for model chunks in Megatron-FSDP, which is patched (`patch_megatron_fsdp`).

    Args:
        config: megatron-core's optimizer config; a `MuonOptimizerConfig` also carries this
            package's settings.
        model_chunks: the model, each chunk a megatron-core FullyShardedDataParallel.
        config_overrides: settings for subsets of parameters, as megatron-core's
            `get_megatron_optimizer` takes them.
        pg_collection: by default the process groups of megatron-core's parallel state.

    Raises:
        UserError: a setting that Muon under Megatron-FSDP does not support, or that differs between
            ranks.
    """
    settings = _checked(config, model_chunks)
    pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    groups, names = _groups(settings, model_chunks, config_overrides)
    offload = None if is_class(settings.optimizer) else offload_run(settings)
    optimizers: list[MegatronOptimizer] = []
    parts: dict[str, Part] = {}
    matrices: dict[torch.Tensor, Matrices] = {}
    weights = MainWeights(model_chunks) if settings.muon_offload_state == "all" else None
    keep = None
    if weights is not None and offload is not None:
        keep = partial(weights.keep_beside, offload)
    scalar_state: dict[MegatronOptimizer, ScalarState] = {}
    ddp_config = model_chunks[0].ddp_config
    memory: torch.Tensor | None = None
    for is_expert in (False, True):
        ours = [g for g in groups if g["is_expert_parallel"] is is_expert and g["params"]]
        muon_groups = [group for group in ours if "optimizer" not in group]
        scalar_groups = [group for group in ours if "optimizer" in group]
        stats_group = _grad_stats_group(ddp_config, pg_collection, is_expert=is_expert)
        scalars = {settings.muon_scalar_optimizer: scalar_groups}
        if settings.optimizer == LION:
            scalars[LION] = scalars.get(LION, []) + muon_groups
            muon_groups = []
        if muon_groups:
            muon, theirs = build_muon(
                muon_groups,
                settings,
                ddp_config,
                pg_collection,
                names,
                Beside(offload, keep, memory=memory),
                is_expert=is_expert,
            )
            if isinstance(muon, ShardedMuon):
                memory = muon.part.waves.memory.tensor
                parts["experts" if is_expert else "dense"] = muon.part
            matrices |= theirs
            optimizers.append(wrap(muon, settings, model_chunks, pg_collection))
            optimizers[-1].grad_stats_parallel_group = stats_group
        for name, members in scalars.items():
            if not members:
                continue
            scalar = _scalar(name, settings, model_chunks, members, pg_collection, stats_group)
            optimizers.append(scalar)
            if weights is None or offload is None:
                initialize_scalar_state(scalar)
            else:
                scalar_state[scalar] = ScalarState(scalar, weights, offload, names)
    if not optimizers:
        raise UserError("the model has no trainable parameter on this rank; unfreeze at least one")
    facts = _report(parts, groups, names, matrices, settings)
    if weights is not None:
        weights.move_out()
    chain = MuonChainedOptimizer(
        optimizers,
        metrics_interval=settings.muon_metrics_interval,
        weights=weights,
        scalar_state=scalar_state,
    )
    if logits_flag(model_chunks[0].config):
        chain.qk_clip = AttentionLogits(model_chunks, pg_collection.tp)
    chain.facts = {**facts, "state_bytes": report_state(chain, of_muon=True)}
    return chain


def _checked(config: OptimizerConfig, model_chunks: Sequence[Any]) -> MuonOptimizerConfig:
    """The config with this package's settings, supported and alike on all ranks. Collective."""
    settings = with_settings(config)
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    if ddp_config is None or not ddp_config.use_megatron_fsdp:
        raise UserError(
            "the model is not wrapped in Megatron-FSDP; wrap it first, or use megatron-core's own"
            " optimizer"
        )
    patch_megatron_fsdp()
    compare_settings(vars(settings), [])
    check_supported(settings, model_chunks)
    return settings


def _groups(
    config: MuonOptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: dict[ParamKey, Any] | None,
) -> tuple[list[dict[str, Any]], dict[Any, str]]:
    """megatron-core's parameter groups, those of Muon without `optimizer`, and parameter names."""
    mp.restore_attributes(model_chunks)
    mp.tag_for_muon(
        model_chunks,
        exclude=config.muon_exclude,
        steps_for=steps_for(config),
        like_upstream=config.muon_matrices == UPSTREAM,
    )
    unlike = mp.unlike_upstream(model_chunks, config)
    if unlike and not is_class(config.optimizer):
        say(
            f"megatron-muon: note: megatron-core's own Muon would choose otherwise:"
            f" {'; '.join(unlike)}. --muon-matrices upstream chooses as it does"
        )
    width = getattr(model_chunks[0].config, "mup_width_mult", 1.0)
    groups = _get_param_groups(model_chunks, config, _overrides(config, config_overrides, width))
    names = mp.parameter_names(model_chunks)
    return groups, mp.with_all_experts(names, model_chunks[0].config)


def _report(
    parts: Mapping[str, Part],
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[torch.Tensor, str],
    matrices: Mapping[torch.Tensor, Matrices],
    config: MuonOptimizerConfig,
) -> dict[str, Any]:
    """Print the plan and the table of parameters; the same for facts.json.

    Raises:
        UserError: settings that no group of ranks can satisfy.
    """
    plans = {}
    unmet = {}
    for kind, part in parts.items():
        if part.waves.plan is not None:
            plans[kind] = part.waves.plan
        if part.waves.scheme == OWNER:
            unmet[kind.rstrip("s")] = part.waves.unmet
    for note in refuse_unmet(unmet):
        say(f"megatron-muon: note: {note.worded(flag_of)}")
    digest = "-".join(plan.digest() for plan in plans.values())
    if digest:
        say(f"megatron-muon: plan {digest}")
    label = config.optimizer if is_class(config.optimizer) else mp.MUON
    rows = mp.parameter_rows(groups, names, matrices, label)
    say(f"megatron-muon: parameters: {totals(rows)}")
    say(table(rows, full=config.muon_log_params))
    if text := doubt(rows, label):
        say(f"megatron-muon: warning: {text}. Set its use_muon: True if it is a matrix, else False")
    elements = elements_of(rows)
    return {
        "muon_parameters": elements[label],
        "scalar_parameters": elements.total() - elements[label],
        "plan": digest,
        "plans": {kind: figures(plan) for kind, plan in plans.items()},
    }


def _by_width(
    config: MuonOptimizerConfig, given: dict[ParamKey, Any], width: float
) -> dict[ParamKey, Any]:
    """Apply MuP's overrides, of --use-mup, to the scalar optimizer's parameters alone.

    megatron-core 0.19 decides by dimensions: it counts a stack of experts as Adam's and a matrix of
    --muon-exclude as Muon's. Its rule for `muon` leaves Adam's epsilon out, too.
    """
    if is_class(config.optimizer):  # upstream's rule for it is Adam's
        return dict(given)
    others = {}
    for key, value in given.items():
        if not getattr(key.with_name_predicate, "name", "").startswith("mup_"):
            others[key] = value
    if len(others) == len(given):
        return others
    mup = get_mup_config_overrides(config, width, config.muon_scalar_optimizer)
    for key, value in mup.items():
        of_scalar = _unless_muon(key.with_name_predicate)
        others[ParamKey(with_name_predicate=of_scalar)] = value
    return others


def _unless_muon(predicate: ParamWithNamePredicate) -> ParamWithNamePredicate:
    def fn(parameter: torch.nn.Parameter, name: str) -> bool:
        return not mp.is_muon_matrix(parameter) and predicate.fn(parameter, name)

    return ParamWithNamePredicate(name=predicate.name, fn=fn)


def _overrides(
    config: MuonOptimizerConfig, given: dict[ParamKey, Any] | None, width: float
) -> dict[ParamKey, Any]:
    """Route non-matrices to the scalar optimizer; give matrices Muon's learning rates."""
    overrides: dict[ParamKey, Any]
    if given is None:
        overrides = get_standard_config_overrides(config)
    else:
        overrides = _by_width(config, given, width)
    scalar = ParamPredicate(name="not_a_muon_matrix", fn=lambda p: not mp.is_muon_matrix(p))
    overrides[ParamKey(predicate=scalar)] = {"optimizer": config.muon_scalar_optimizer}
    rates = {"max_lr": config.muon_lr, "min_lr": config.muon_min_lr}
    chosen = {name: rate for name, rate in rates.items() if rate is not None}
    if chosen:
        matrix = ParamPredicate(name="muon_matrix", fn=mp.is_muon_matrix)
        overrides[ParamKey(predicate=matrix)] = chosen
    return overrides


def wrap(
    inner: torch.optim.Optimizer,
    config: MuonOptimizerConfig,
    model_chunks: Sequence[Any],
    pg_collection: ProcessGroupCollection,
) -> MegatronOptimizer:
    """megatron-core's DistributedOptimizer of a Muon: norms, clipping, loss scale, checkpoints."""
    wrapped = DistributedOptimizer(
        inner,
        config,
        ConstantGradScaler(config.loss_scale) if config.loss_scale else None,
        lambda optimizer, config=None: optimizer.initialize_state(),
        model_chunks=list(model_chunks),
        per_model_buffers=None,
        data_parallel_group=None,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=None,
        distributed_optimizer_instance_id=0,
    )
    wrapped.tp_group = pg_collection.tp
    wrapped.expert_tp_group = getattr(pg_collection, "expt_tp", pg_collection.tp)
    return wrapped


def _scalar(
    name: str,
    config: MuonOptimizerConfig,
    model_chunks: Sequence[Any],
    groups: list[dict[str, Any]],
    pg_collection: ProcessGroupCollection,
    stats_group: dist.ProcessGroup,
) -> MegatronOptimizer:
    """megatron-core's own optimizer for the other parameters, still without state."""
    scalar_config = copy.copy(config)
    scalar_config.optimizer = name
    wrapped = _get_megatron_optimizer_based_on_param_groups(
        config=scalar_config,
        model_chunks=list(model_chunks),
        param_groups=groups,
        intra_dist_opt_group=stats_group,
        pg_collection=pg_collection,
    )
    wrapped.config = config  # a chain's members share one config
    return wrapped


def _grad_stats_group(
    ddp_config: Any, pg_collection: ProcessGroupCollection, *, is_expert: bool
) -> dist.ProcessGroup:
    """The group over which gradient norms and zero counts add up.

    Shards add up over all ranks of the optimizer instance, or of all instances if these share them
    too. Under no_shard only model-parallel ranks add; for experts these include ranks with other
    experts.
    """
    group: dist.ProcessGroup | None
    if ddp_config.data_parallel_sharding_strategy == "no_shard":
        group = pg_collection.tp_ep_pp if is_expert else pg_collection.mp
    elif (
        ddp_config.num_distributed_optimizer_instances > 1
        and ddp_config.outer_dp_sharding_strategy != "no_shard"
    ):
        # 0.19's norm stays within the instance; there are no pipeline stages.
        group = dist.group.WORLD
    else:
        group = pg_collection.intra_dist_opt
    assert group is not None
    return group
