"""`Muon`: one optimizer for any PyTorch model, Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, override

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from megatron_muon.core.cost import Coefficients, Iteration
from megatron_muon.core.methods.method import Method
from megatron_muon.core.rows import STEPS
from megatron_muon.core.rules.held import Held
from megatron_muon.errors import AuditError, UserError
from megatron_muon.fsdp import guards, options
from megatron_muon.fsdp.assembly import Beside, Variant, make_part
from megatron_muon.fsdp.options import NS_COEFFICIENTS, NS_STEPS, word_as_arguments
from megatron_muon.fsdp.parameter_groups import ADAMW, MUON, OPTIMIZER, members_of
from megatron_muon.fsdp.part import NUMBERS, Part, view_parameters
from megatron_muon.fsdp.rank_sets import RankSet, largest_of, rank_sets
from megatron_muon.fsdp.read_numbers import ON_DEVICE
from megatron_muon.fsdp.selection import Patterns, Predicate, Selection, report, select
from megatron_muon.fsdp.state_dicts import MuonState
from megatron_muon.fsdp.step import adamw_numbers, step_adamw
from megatron_muon.matrices import cuts
from megatron_muon.matrices.fused import Split
from megatron_muon.matrices.table import table
from megatron_muon.metrics import Sampler
from megatron_muon.offload.run import offload_run
from megatron_muon.ranges import number_of
from megatron_muon.ranks import Alone
from megatron_muon.settings import MuonSettings

_REMEDY = (
    "give all ranks the same parameters in the same order, with the same matrices=, exclude=,"
    " flatten=, stacks=, transposed=, split= and ns_steps_for="
)


class Muon(MuonState):
    """Muon for the matrices inside a network, AdamW for embeddings, output layer and vectors.

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
            `fsdp.options.ADJUST_LR`.
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
            orthogonalised alone. "interleaved" gathers every other row (`matrices.fused.Split`).
        ns_steps_for: by pattern, Newton-Schulz steps of matrices, `{"mlp": 4}`; of several that
            match the last holds.
        fp32_matmul_prec: "medium" iterates in bf16, as torch.optim.Muon does, "high" in TF32,
            "highest" in fp32.
        share_replicated: matrices that every rank holds whole, as under DDP, are orthogonalised by
            one rank each, which broadcasts the update, instead of by all. Needs the same gradients
            on all ranks.
        process_group: of the ranks that share with `share_replicated`, or whose files fail
            together, as in a stage of a pipeline; None takes all ranks.
        hyperball: MuonHyperball; needs `weight_decay=0`. The step overwrites the gradients of
            matrices.
        moment2_method: "adamuon" or "normuon" for adaptive Muon; `beta2` and `moment2_eps` are its.
        cuda_graph: capture the step of the matrices in a CUDA graph at the third step, and replay
            it. `lr` and `weight_decay` of groups are tensors then, to be filled, as torch's
            schedulers do. Gradients must stay where they are: `zero_grad(set_to_none=False)`. It
            has run on one GPU, not on several.
        metrics_interval: measure every so many steps; `metrics.latest` has what was found.
        audit_action: "stop" raises an AuditError in a step whose audit found a fault.

    Raises:
        TypeError: `params` holds no tensors.
        UserError: a ValueError that names parameter or value, and the remedy.
    """

    _step_supports_amp_scaling = guards.NoScaler()

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
        matrices: Sequence[str] | Predicate | None = None,
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
        audit_interval: int = MuonSettings.muon_audit_interval,
        audit_action: str = MuonSettings.muon_audit_action,
    ) -> None:
        given = dict(locals())
        for name in ("self", "params"):
            del given[name]
        self._set_up(params, given)

    def _set_up(self, params: Any, given: Mapping[str, Any]) -> None:
        """Check arguments, select parameters, and plan for them. Collective."""
        self._settings = {name: number_of(value) for name, value in given.items()}
        with word_as_arguments():
            options.check_options(self._settings)
            patterns = {each.name: self._settings[each.name] for each in fields(Patterns)}
            selection = select(params, self.matrix_optimizer, **patterns)
            names = NUMBERS if self.matrix_optimizer == MUON else ON_DEVICE
            defaults = {name: float(self._settings[name]) for name in names}
            super().__init__(options.with_defaults(selection.groups, self._settings), defaults)
            self._build(selection)
        report(self.selection, self.matrix_optimizer)

    def _build(self, selection: Selection) -> None:
        """Plan for the parameters of `param_groups`. Collective; a failure leaves no files."""
        self.close()
        self.selection = selection
        self._is_fresh = True
        self._has_stepped = False
        self._members = members_of(self.param_groups)
        try:
            self._build_parts()
            self._placed = {p: guards.placement_of(p) for p in self._members}
            self.initialize_state()
            interval = self._settings["metrics_interval"]
            self.metrics = Sampler(self.parts, interval=interval, group=self.group)
            if self._settings["cuda_graph"]:
                self._capture()
        except BaseException:
            self.close()
            raise

    def _build_parts(self) -> None:
        """Make exchange, plan and state of the matrices on each set of ranks. Collective."""
        given = self._settings
        sets = rank_sets(self.selection)
        groups = [each.group(given) for each in sets]
        for group in groups:
            guards.compare_settings(given, self.param_groups, group)
        self.group = largest_of(groups, given["metrics_interval"])
        # ranks of no mesh agree over this group on what their files have lost
        agreeing = given["process_group"] if isinstance(self.group, Alone) else self.group
        self._state_groups = [agreeing if isinstance(each, Alone) else each for each in groups]
        self._run = offload_run(options.settings_of(given))
        self.parts = []
        for each, group, of_state in zip(sets, groups, self._state_groups, strict=True):
            if self._run is not None:
                self._run.group = of_state
            self.parts.append(self._make_part(each, group))
        plans = [part.waves.plan for part in self.parts]
        self.digest = "-".join(plan.digest() for plan in plans if plan)
        self._from_megatron_fsdp = hasattr(self._members[0], "_megatron_fsdp_model")

    def _make_part(self, rank_set: RankSet, group: Any) -> Part:
        """The matrices of parameters whose ranks are those of `group`. Collective."""
        given = self._settings
        matrices = rank_set.matrices
        layout, mine = cuts.layout_of(matrices, group, remedy=_REMEDY)
        viewed = view_parameters(matrices, mine)
        device = viewed[0].parameter.device
        part = make_part(
            viewed,
            Held(layout, group, device, mine, replicated=rank_set.replicated),
            options.settings_of(given),
            self._method(device),
            Variant(given["moment2_method"], nesterov=given["nesterov"], skip_missing=True),
            Beside(
                offload=self._run,
                memory=self.parts[-1].waves.memory.tensor if self.parts else None,
            ),
        )
        if part.waves.unmet:
            raise part.waves.unmet
        part.read_groups(self.param_groups)
        if isinstance(group, Alone):
            part.copies = self.group.size()
        return part

    def _method(self, device: torch.device) -> Method:
        """The computation on whole blocks."""
        return options.method_of(self._settings, device)

    def close(self) -> None:
        """Delete the files of momentum on disk; the optimizer cannot be used after that."""
        if self._run is not None:
            self._run.close()
        self._run = None

    def table(self, *, full: bool = False) -> str:
        """A table of parameters: their optimizer and why, splits, and those without decay.

        One line for each kind of parameter, such as all layers' query projections; with `full` for
        each parameter.
        """
        return table(self.selection.rows(), frozen=len(self.selection.frozen), full=full)

    @_disable_dynamo  # compiled, the foreach calls of AdamW's step fail
    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns. Collective.

        Raises:
            UserError: parameters or state have changed since the optimizer was made, a gradient is
                sparse, or it is closed.
            OffloadError: on every rank if one cannot read its momentum. No weight has changed if it
                was in the buffer, else matrices that came before it have. The optimizer cannot be
                used after that.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_replaced()
        self._require_open()
        guards.check_parameters(self._placed, self.selection)
        if not self._has_stepped:
            if self._from_megatron_fsdp and guards.are_zero(self._members, self.group):
                # the step by which Megatron-FSDP's fully_shard_optimizer makes state
                return loss
            guards.check_first_gradients(self._members)
            # from now on AdamW's may move, as nothing here views their memory
            self._placed = {p: self._placed[p] for p in self.selection.matrices}
            with word_as_arguments():
                for part in self.parts:
                    part.check_weights()
        for store in self.stores:
            store.verify()
        self.refuse_lost_state()
        for part in self.parts:
            part.take_up(self.state)
        self._update()
        self._has_stepped = True
        self._is_fresh = False
        if self._settings["audit_action"] == "stop":
            faults = [line for part in self.parts if part.audit for line in part.audit.faults]
            if faults:
                raise AuditError("; ".join(faults))
        return loss

    def _update(self) -> None:
        """Update weights and state, once nothing is left to refuse."""
        read = [
            (group, adamw_numbers(group))
            for group in self.param_groups
            if group[OPTIMIZER] == ADAMW
        ]
        with self.metrics.step():
            for part in self.parts:
                if part.audit:
                    part.audit.steps = self._steps_taken()
                part.step(self.param_groups)
            for group in self.param_groups:
                if group[OPTIMIZER] != ADAMW:
                    group[STEPS] = group.get(STEPS, 0) + 1
            self.refuse_lost_state()
            for group, numbers in read:
                step_adamw(group, numbers, self.state, counts_empty=self._from_megatron_fsdp)

    def skipped_updates(self) -> dict[str, int]:
        """Updates skipped since the last call, by matrix, if this rank holds rows of it.

        Waits for the device.
        """
        return dict(ChainMap(*(part.skipped_updates() for part in self.parts)))

    @override
    def _follow_replaced(self) -> None:
        """Plan again if a framework has replaced parameters of `param_groups`. Collective then.

        Source: accelerate.utils.fsdp_utils.fsdp2_switch_optimizer_parameters.
        """
        now = members_of(self.param_groups)
        if list(map(id, now)) == list(map(id, self._members)):
            return
        before = [p.shape for p in self._members]
        if not self._is_fresh or [p.shape for p in now] != before:
            raise UserError(
                "param_groups have other parameters than when the optimizer was made; make it of"
                " all parameters, after the model is sharded (fully_shard, fully_shard_model)"
            )
        self.state.clear()
        with word_as_arguments():
            self._build(self.selection.with_parameters(self._members, self.param_groups))
