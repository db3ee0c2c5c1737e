"""`Muon`: one optimizer for any PyTorch model, Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.core.assignment import refuse_unmet
from megatron_muon.core.cost import AUTO, Coefficients, Iteration
from megatron_muon.core.errors import UserError
from megatron_muon.core.exchange import OWNER
from megatron_muon.core.layout import Matrix, whole
from megatron_muon.core.numbers import number_of
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.probe import Sampler
from megatron_muon.core.ranks import Alone
from megatron_muon.core.rules.rule import Held
from megatron_muon.fsdp import arguments, checks, cuts
from megatron_muon.fsdp.arguments import NS_COEFFICIENTS, NS_STEPS, in_arguments
from megatron_muon.fsdp.build import make_parts, offload_run
from megatron_muon.fsdp.coverage import warn_if_few
from megatron_muon.fsdp.fused import Split
from megatron_muon.fsdp.part import Part, Source, source_of
from megatron_muon.fsdp.selection import (
    ADAMW,
    MUON,
    OPTIMIZER,
    Rule,
    Selection,
    floats_of,
    members_of,
    select,
    splits,
)
from megatron_muon.fsdp.state import MuonState
from megatron_muon.fsdp.step import adamw_numbers, local_parts, put_on_device, step_adamw
from megatron_muon.offload.run import OffloadRun
from megatron_muon.patterns import steps_of
from megatron_muon.settings import MuonSettings

_ALIKE = (
    "give all ranks the same parameters in the same order, with the same matrices=, exclude=,"
    " flatten=, stacks=, transposed=, split= and ns_steps_for="
)


class Muon(MuonState):
    """Muon for the matrices inside a network, AdamW for all else: embeddings, output layer, vectors.

        model = fully_shard(model)                                  # or DDP, Megatron-FSDP, nothing
        optimizer = megatron_muon.Muon(model, lr=0.02, adamw_lr=3e-4)
        print(optimizer.table())                                    # which of the two takes what

    Names, meaning and defaults are those of `torch.optim.Muon` where it has them, but for `eps`.
    Parameters are plain tensors, or DTensors on one mesh or several; make the optimizer after the
    model is sharded. Every rank of their meshes takes part in every step. A parameter of experts
    `(E, m, n)` is E matrices. State is there from the start: `momentum_buffer` (fp32) of matrices,
    `step`, `exp_avg` and `exp_avg_sq` of the rest, sharded as the parameters are, for
    `torch.distributed.checkpoint.state_dict`.

    A parameter without a gradient is skipped, and so is a matrix whose update is not finite.

    Numbers may be Python's, numpy's, or tensors of one element, which are read here; tensors that
    are put into `param_groups` later are read in each step. Arguments that are not listed are those
    of `torch.optim.Muon`, or the flags `--muon-*` (`--adaptive-muon-*`).

    Args:
        params: the model, whose modules show embeddings and output layers,
            `model.named_parameters()`, or groups of it with settings of their own: `lr`,
            `weight_decay`, `momentum`, `betas`, `eps`, and `optimizer`, "muon" or "adamw", which
            decides for all of a group. Tensors without names must be matrices or in such a group.
            What needs no gradient is left out.
        lr: learning rate of Muon; `adamw_lr` None takes it too.
        weight_decay: decay per unit of learning rate; `adamw_weight_decay` None takes it too.
        ns_coefficients: `(a, b, c)` of every Newton-Schulz step, several of them, the last
            repeated, or the name of a set of emerging-optimizers, such as "polar_express".
        eps: matrices whose momentum has a smaller norm are divided by this instead, so that their
            updates are smaller; with 0 updates do not depend on the scale of gradients.
        adjust_lr_fn: how updates are scaled by a matrix's shape: a key of
            `fsdp.arguments.ADJUST_LR`.
        matrices: what Muon takes, instead of the rule by name (`fsdp.selection`): shell patterns,
            or a function of name and parameter.
        exclude: patterns of what goes to AdamW all the same.
        flatten: patterns of parameters that are read with all dimensions but the first as columns,
            `{"conv*": True}` for `(out, in * k * k)`; of several that match the last holds.
        stacks: patterns of parameters with more than two dimensions, of which the leading ones
            count matrices: `(E, m, n)`, `(L, E, m, n)`. Names with `expert` in them need no
            mention.
        transposed: patterns of weights that a model stores as (inputs, outputs), which Muon then
            reads as (outputs, inputs).
        split: by pattern, rows of the matrices that are fused in one parameter, `{"qkv_proj":
            (4096, 1024, 1024)}`; they repeat to fill its rows, those of each expert, and each is
            orthogonalised alone. "interleaved" gathers every other row (`fsdp.fused.Split`).
        ns_steps_for: by pattern, Newton-Schulz steps of matrices, `{"mlp": 4}`; of several that
            match the last holds.
        fp32_matmul_prec: "medium" iterates in bf16, as torch.optim.Muon does, "high" in TF32,
            "highest" in fp32.
        share_replicated: matrices that every rank holds whole, as under DDP, are orthogonalised by
            one rank each, which broadcasts the update, instead of by all. Needs the same gradients
            on all ranks.
        process_group: of the ranks that share, or whose files fail together, where parameters are
            on no mesh, as in a stage of a pipeline; None takes all ranks.
        hyperball: MuonHyperball; needs `weight_decay=0`. The step overwrites the gradients of
            matrices.
        moment2_method: "adamuon" or "normuon" for adaptive Muon; `beta2` and `moment2_eps` are its.
        cuda_graph: capture the step of the matrices in a CUDA graph at the third step, and replay
            it. `lr` and `weight_decay` of groups are tensors then, to be filled, as torch's
            schedulers do. Gradients must stay where they are: `zero_grad(set_to_none=False)`. It
            has run on one GPU, not on several.
        metrics_interval: measure every so many steps; `metrics.latest` has what was found.

    Raises:
        TypeError: `params` holds no tensors.
        UserError: a ValueError that names parameter or value, and the remedy.
    """

    _step_supports_amp_scaling = checks.NoScaler()

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | Coefficients | str = NS_COEFFICIENTS,
        eps: float = 0.0,
        ns_steps: int = NS_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        matrices: Sequence[str] | Rule | None = None,
        exclude: Sequence[str] = (),
        flatten: Mapping[str, bool] | None = None,
        stacks: Sequence[str] = (),
        transposed: Sequence[str] = (),
        split: Mapping[str, Split] | None = None,
        ns_steps_for: Mapping[str, int] | None = None,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        fp32_matmul_prec: str = Iteration.precision,
        ns: str = MuonSettings.muon_ns,
        exchange: str = MuonSettings.muon_exchange,
        exchange_buffer_mb: float | None = MuonSettings.muon_exchange_buffer_mb,
        free_buffers: bool = MuonSettings.muon_free_buffers,
        exchange_dtype: str = MuonSettings.muon_exchange_dtype,
        team_size: str = MuonSettings.muon_team_size,
        share_replicated: bool = MuonSettings.muon_share_replicated,
        process_group: dist.ProcessGroup | None = None,
        cautious_weight_decay: bool = MuonSettings.muon_cautious_weight_decay,
        hyperball: bool = MuonSettings.muon_hyperball,
        moment2_method: str | None = None,
        beta2: float = MuonSettings.adaptive_muon_beta2,
        moment2_eps: float = MuonSettings.adaptive_muon_eps,
        momentum_dtype: str = MuonSettings.muon_momentum_dtype,
        offload: str = MuonSettings.muon_offload,
        offload_dir: str | None = MuonSettings.muon_offload_dir,
        offload_fraction: float = MuonSettings.muon_offload_fraction,
        offload_buffer_mb: float = MuonSettings.muon_offload_buffer_mb,
        cuda_graph: bool = False,
        metrics_interval: int = MuonSettings.muon_metrics_interval,
    ) -> None:
        self._run: OffloadRun | None = None
        self._warned = set[str]()
        self._settings = {
            name: number_of(value)
            for name, value in locals().items()
            if name not in ("self", "params", "__class__")
        }
        with in_arguments():
            arguments.check(self._settings)
            self._build(self._select(params))
        if matrices is None:
            warn_if_few(self.selection)

    def _select(self, params: Any) -> Selection:
        chosen_by = "matrices", "exclude", "flatten", "stacks", "transposed"
        return select(params, **{name: self._settings[name] for name in chosen_by})

    def _build(self, selection: Selection) -> None:
        """Make everything, or nothing: a refused optimizer leaves no file and holds no folder. Collective."""
        # none but on a refill
        hooks = {name: value for name, value in vars(self).items() if name.endswith("_hooks")}
        self.close()
        self._building, self._has_stepped = True, False
        self.selection = selection
        for options in selection.groups:
            options.update(floats_of(options))
        try:
            self._build_matrices(selection)
            self._add_groups(selection)
            self._members = members_of(self.param_groups)
            others = (p for p in self._members if p not in selection.views)
            self._placed_of_adamw = [(p, checks.placement_of(p)) for p in others]
            self._building = False
            vars(self).update(hooks)
            self.initialize_state()
            self.metrics = Sampler(
                self.parts, interval=self._settings["metrics_interval"], group=self.group
            )
            if self._settings["cuda_graph"]:
                self._capture()
        except BaseException:
            self.close()
            raise

    def _build_matrices(self, selection: Selection) -> None:
        """Make the parts: exchange, plan and state of the matrices on each set of ranks. Collective."""
        given, names, parameters = self._settings, selection.names, list(selection.views)
        self._from_megatron_fsdp = hasattr(parameters[0], "_megatron_fsdp_model")
        steps = steps_of((names[p] for p in parameters), given["ns_steps_for"] or {})
        selection.splits = splits(given["split"] or {}, selection)
        by_ranks: dict[tuple[int, ...], dict[torch.Tensor, list[Matrix]]] = {}
        for p in parameters:
            view = selection.views[p]
            split = selection.splits.get(p, whole(view.matrix[0]))
            matrices = [
                Matrix(name, view.matrix, (), split, steps.get(names[p], 0))
                for name in view.names(names[p])
            ]
            by_ranks.setdefault(cuts.ranks_of(names[p], p), {})[p] = matrices
        in_order = sorted(by_ranks)  # the same on all ranks, as all that follows is collective
        # else those of a mesh
        in_files = given["offload"] == "nvme" and dist.is_initialized() and not any(in_order)
        beside = (
            dist.get_process_group_ranks(given["process_group"])
            if given["share_replicated"] or in_files
            else ()
        )
        together = [ranks or tuple(beside) for ranks in in_order]
        for ranks in together:
            checks.compare_settings(given, selection.groups, ranks)
        plain = given["process_group"] or dist.group.WORLD if given["share_replicated"] else Alone()
        first = [next(iter(by_ranks[ranks])) for ranks in in_order]
        groups: list[Any] = [
            cuts.group_of(p.device_mesh) if isinstance(p, DTensor) else plain for p in first
        ]
        largest = max(together, key=len)
        self.group = groups[together.index(largest)]
        if given["metrics_interval"] and not all(set(ranks) <= set(largest) for ranks in together):
            raise UserError(
                f"metrics_interval={given['metrics_interval']!r} adds up over the largest set of"
                f" ranks that hold a parameter together, and {together} cross; use"
                " metrics_interval=0"
            )
        # on files of no mesh
        agreeing = given["process_group"] if isinstance(self.group, Alone) else self.group
        self._state_groups = [agreeing if isinstance(group, Alone) else group for group in groups]
        self._run = offload_run(arguments.settings_of(given))
        self.parts = []
        for ranks, group in zip(in_order, groups, strict=True):
            self.parts.append(self._part(by_ranks[ranks], group))
            self.parts[-1].copies = self.group.size() if isinstance(group, Alone) else 1
        schemes = {part.exchange.scheme for part in self.parts}
        if given["team_size"] != AUTO and OWNER not in schemes:
            raise UserError(
                f"team_size={given['team_size']!r} has no effect here: no rank owns what others"
                " hold; leave it out"
            )
        self.digest = "-".join(
            part.exchange.plan.digest() for part in self.parts if part.exchange.plan is not None
        )
        self._placed = [(p, checks.placement_of(p)) for p in parameters]

    def _part(self, matrices: Mapping[torch.Tensor, list[Matrix]], group: Any) -> Part:
        """The part of parameters whose ranks are those of `group`. Collective."""
        given, selection, parameters = self._settings, self.selection, list(matrices)
        settings, device = arguments.settings_of(given), parameters[0].device
        layout, mine = cuts.layout_of(matrices, group, remedy=_ALIKE, views=selection.views)
        sources = list[Source]()
        for p in parameters:
            first = sources[-1].first + sources[-1].view.count if sources else 0
            view = selection.views[p]
            sources.append(
                source_of(selection.names[p], p, view, mine[first : first + view.count], first)
            )
        cuts_of = (cut for p in parameters if isinstance(p, DTensor) for cut in p.placements)
        replicated = all(isinstance(cut, Replicate) for cut in cuts_of)
        if self._run is not None:
            self._run.group = self._state_groups[len(self.parts)]
        exchange, rules, store = make_parts(
            Held(layout, group, device, [1] * len(mine), mine, replicated=replicated),
            settings,
            self._orthogonalizer(device),
            moment2=given["moment2_method"],
            nesterov=given["nesterov"],
            offload=self._run,
            scratch=self.parts[-1].exchange.arena.memory if self.parts else None,
        )
        if exchange.unmet:
            refuse_unmet({"these": exchange.unmet})
        standing = {source.parameter: source.matrices for source in sources}
        members = [
            [one for p in options["params"] for one in standing.get(p, [])]
            for options in selection.groups
        ]
        numbered = enumerate(zip(selection.groups, members, strict=True))
        of_groups = [
            (number, {**options, "params": some}) for number, (options, some) in numbered if some
        ]
        defaults = {
            "lr": float(given["lr"]),
            "momentum": given["momentum"],
            "weight_decay": given["weight_decay"],
        }
        of_matrices = zip(itertools.chain(*standing.values()), layout.matrices, strict=True)
        return Part(
            sources,
            of_groups,
            exchange,
            rules,
            defaults=defaults,
            names={one: m.name for one, m in of_matrices},
            store=store,
            skip_missing=True,
        )

    def _add_groups(self, selection: Selection) -> None:
        """Make the parameter groups, those of AdamW with its settings, in the order that was given."""
        defaults = {
            name: float(self._settings[name]) for name in ("lr", "momentum", "weight_decay")
        }
        of_adamw = {
            name: self._settings[f"adamw_{name}"] for name in ("lr", "weight_decay", "betas", "eps")
        }
        of_adamw |= {
            name: defaults[name] for name in ("lr", "weight_decay") if of_adamw[name] is None
        }
        of_adamw |= floats_of(of_adamw)
        for group in selection.groups:
            group.update({**(defaults if group[OPTIMIZER] == MUON else of_adamw), **group})
        torch.optim.Optimizer.__init__(self, selection.groups, defaults)

    def _capture(self) -> None:
        """From now on have the steps of the matrices captured."""
        device = self._members[0].device
        if device.type != "cuda":
            raise UserError(
                f"cuda_graph=True needs a GPU, and the parameters are on {device}; leave it out"
            )
        groups = [group for group in self.param_groups if group[OPTIMIZER] == MUON]
        put_on_device(groups, device)
        for part in self.parts:
            part.capture(groups)

    def _orthogonalizer(self, device: torch.device) -> Orthogonalizer:
        given = self._settings
        scale_mode, factor = arguments.ADJUST_LR[given["adjust_lr_fn"]]
        of_iteration = (
            given[name] for name in ("ns_coefficients", "ns_steps", "fp32_matmul_prec", "ns")
        )
        iteration = arguments.iteration_of(*of_iteration)
        iteration.check_steps_for(given["ns_steps_for"] or {})
        return Orthogonalizer(
            iteration,
            scale_mode=scale_mode,
            extra_scale_factor=factor,
            eps=given["eps"],
            scaled=given["moment2_method"] is None,
            device=device,
        )

    def close(self) -> None:
        """Delete the files of momentum on disk; the optimizer is of no use any more."""
        if self._run is not None:
            self._run.close()
        self._run = None

    def table(self, *, full: bool = False) -> str:
        """Which parameters Muon takes and which AdamW, with the reason, what is split and what has no weight decay.

        A line for each kind of parameter, of which layers have one each; with `full` for each
        parameter.
        """
        return self.selection.table(full=full)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made, but for Megatron-FSDP's `fully_shard`.

        That empties an optimizer and gives it the sharded parameters; then it is made anew.
        """
        if self._building:
            super().add_param_group(param_group)
        elif not self.param_groups:
            if self.selection.grouped:
                raise UserError(
                    "fully_shard(model, optimizer) joins all parameter groups and loses their"
                    " settings; use fully_shard_model(model), make Muon on its parameters, then"
                    " fully_shard_optimizer(optimizer)"
                )
            with in_arguments():
                parameters = list(param_group["params"])
                self._build(self.selection.resharded(parameters) or self._select(parameters))
        else:
            raise UserError("Muon plans who owns what when it is made; give it all parameters then")

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if any(part.captured is not None for part in self.parts):
            self._capture()  # other tensors have the numbers of groups

    @_disable_dynamo  # compiled, the foreach calls of AdamW's step fail
    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returns. Collective.

        Raises: UserError: parameters have changed since the optimizer was made, a gradient is
        sparse, or it is closed. OffloadError: on every rank where one cannot read its momentum; no
        weight has changed if it lay in the buffer, else matrices that came before it have moved.
        The optimizer is of no use afterwards.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_up_exchanged()
        self._require_open()
        arguments.check_groups(self.param_groups, self._settings)
        placed = self._placed if self._has_stepped else self._placed + self._placed_of_adamw
        checks.check_parameters(placed, self.selection.names, self.selection.frozen)
        if not self._has_stepped:
            if self._from_megatron_fsdp and checks.are_zero(self._members, self.group):
                # the step that Megatron-FSDP's fully_shard_optimizer takes to make state, which is
                # there
                return loss
            checks.find_orphans(self._members, self.selection.names)
            with in_arguments():
                for part in self.parts:
                    part.check_weights()
        for store in self.stores:
            store.verify()
        self.refuse_lost_state()
        of_adamw = [
            (group, adamw_numbers(group))
            for group in self.param_groups
            if group[OPTIMIZER] == ADAMW
        ]
        self._restart_cleared(self._members)
        for part in self.parts:
            part.take_up_replaced(self.state)
            part.take_settings(self.param_groups)
            part.take_gradients()
        with self.metrics.step():
            for part in self.parts:
                part.update_matrices()
            self.refuse_lost_state()
            for group, numbers in of_adamw:
                step_adamw(group, numbers, self.state, counts_empty=self._from_megatron_fsdp)
        for part in self.parts:
            part.let_go()
            part.show_settings(self.param_groups)
        self._has_stepped = True
        return loss

    def skipped_updates(self) -> dict[str, int]:
        """Updates skipped since the last call, by matrix, where this rank has a part of it. Waits for the device."""
        return {
            name: count for part in self.parts for name, count in part.skipped_updates().items()
        }

    @override
    def _take_up_exchanged(self) -> None:
        """Make it anew where `param_groups` have got other parameters since, as accelerate gives them. Collective then.

        Source: accelerate.utils.fsdp_utils.fsdp2_switch_optimizer_parameters.
        """
        now = members_of(self.param_groups)
        if len(now) != len(self._members):
            flat = any(p.ndim == 1 for p in now) and not any(p.ndim == 2 for p in now)
            remedy = (
                "use fully_shard (FSDP2), as Muon needs whole matrices and these are flat buffers"
                " (as of ZeRO)"
            )
            raise UserError(
                f"param_groups have {len(now)} parameters, and had {len(self._members)} when the"
                f" optimizer was made; {remedy if flat else 'give it all parameters then'}"
            )
        if not any(map(operator.is_not, now, self._members)):
            return
        kept = [slot for slots in self.state.values() for slot in slots.values()]
        momentum = self.momentum_state().values() if self.stores else ()
        if any(bool(slot.any()) for slot in local_parts([*kept, *momentum])):
            raise UserError(
                "parameters in param_groups were exchanged after steps, so their state would be"
                " lost; exchange them before the first step, and load state after that"
            )
        self.state.clear()
        with in_arguments():
            self._build(self.selection.exchanged(self._members, self.param_groups))
