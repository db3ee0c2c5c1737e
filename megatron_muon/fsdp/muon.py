"""`Muon`: one optimizer for any PyTorch model, Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.core.assignment import refuse_unmet
from megatron_muon.core.cost import AUTO, Coefficients, Iteration
from megatron_muon.core.errors import UserError
from megatron_muon.core.exchange import OWNER
from megatron_muon.core.layout import Matrix, whole
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.probe import Sampler
from megatron_muon.core.ranks import Alone
from megatron_muon.core.rules.rule import Held
from megatron_muon.fsdp import arguments, checks, cuts
from megatron_muon.fsdp.arguments import NS_COEFFICIENTS, NS_STEPS, in_arguments
from megatron_muon.fsdp.build import make_parts, offload_run, scheme_of
from megatron_muon.fsdp.selection import ADAMW, MUON, OPTIMIZER, Rule, Selection, members_of, select, splits, steps_of
from megatron_muon.fsdp.state import MuonState
from megatron_muon.fsdp.step import CapturedStep, local_parts, step_adamw
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore
from megatron_muon.settings import MuonSettings

_ALIKE = (
    "give all ranks the same parameters in the same order, with the same matrices=, exclude=, split= and ns_steps_for="
)


class Muon(MuonState):
    """Muon for the matrices inside a network, AdamW for all else: embeddings, output layer, vectors.

        model = fully_shard(model)                                  # or DDP, Megatron-FSDP, nothing
        optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.02, adamw_lr=3e-4)
        print(optimizer.table())                                    # which of the two takes what

    Names, meaning and defaults are those of `torch.optim.Muon` where it has them. Parameters are plain tensors, or
    DTensors sharded by rows; make the optimizer after the model is sharded. Every rank takes part in every step.
    State is there from the start: `momentum_buffer` (fp32) of matrices, `step`, `exp_avg` and `exp_avg_sq` of the rest,
    sharded as the parameters are, for `torch.distributed.checkpoint.state_dict`.

    A parameter without a gradient is passed over, and so is a matrix whose update is not finite.

    Arguments that are not listed are those of `torch.optim.Muon`, or the flags `--muon-*` (`--adaptive-muon-*`).

    Args:
        params: `model.named_parameters()`, or groups of it with settings of their own: `lr`, `weight_decay`,
            `momentum`, `betas`, `eps`, and `optimizer`, "muon" or "adamw", which decides for all of a group. Tensors
            without names must be matrices or in such a group. What needs no gradient is left out.
        lr: learning rate of Muon; `adamw_lr` None takes it too.
        weight_decay: decay per unit of learning rate; `adamw_weight_decay` None takes it too.
        ns_coefficients: `(a, b, c)` of every Newton-Schulz step, several of them, the last repeated, or the name of a
            set of emerging-optimizers, such as "polar_express".
        adjust_lr_fn: how updates are scaled by a matrix's shape: a key of `fsdp.arguments.ADJUST_LR`.
        matrices: what Muon takes, instead of the rule by name (`fsdp.selection`): shell patterns, or a function of name
            and parameter.
        exclude: patterns of what goes to AdamW all the same.
        split: by pattern, rows of the matrices that are fused in one parameter, `{"qkv_proj": (4096, 1024, 1024)}`;
            they repeat to fill its rows, and each is orthogonalised alone.
        ns_steps_for: by pattern, Newton-Schulz steps of matrices, `{"mlp": 4}`; of several that match the last holds.
        fp32_matmul_prec: "medium" iterates in bf16, as torch.optim.Muon does, "high" in TF32, "highest" in fp32.
        share_replicated: matrices that every rank holds whole, as under DDP, are orthogonalised by one rank each, which
            broadcasts the update, instead of by all. Needs the same gradients on all ranks.
        process_group: of the ranks that share; None takes all ranks.
        hyperball: MuonHyperball; needs `weight_decay=0`. The step overwrites the gradients of matrices.
        moment2_method: "adamuon" or "normuon" for adaptive Muon; `beta2` and `moment2_eps` are its.
        cuda_graph: capture the step of the matrices in a CUDA graph at the third step, and replay it. `lr` and
            `weight_decay` of groups are tensors then, to be filled, as torch's schedulers do. Gradients must stay where
            they are: `zero_grad(set_to_none=False)`. It has never run on a GPU.
        metrics_interval: measure every so many steps; `metrics.latest` has what was found.

    Raises:
        TypeError: `params` holds no tensors.
        UserError: a ValueError that names parameter or value, and the remedy.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | Coefficients | str = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = NS_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        matrices: Sequence[str] | Rule | None = None,
        exclude: Sequence[str] = (),
        split: Mapping[str, int | Sequence[int]] | None = None,
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
        self._captured: CapturedStep | None = None
        self._warned = set[str]()
        self._settings = {
            name: value for name, value in locals().items() if name not in ("self", "params", "__class__")
        }
        with in_arguments():
            arguments.check(self._settings)
            self._build(select(params, matrices, exclude))

    def _build(self, selection: Selection) -> None:
        """Make everything, or nothing: a refused optimizer leaves no file and holds no folder. Collective."""
        hooks = {name: value for name, value in vars(self).items() if name.endswith("_hooks")}  # none but on a refill
        self.close()
        self._building, self._has_stepped = True, False
        self.selection = selection
        for options in selection.groups:
            options.update({name: float(options[name]) for name in ("lr", "weight_decay") if name in options})
        try:
            self._build_matrices(selection)
            self._add_adamw(selection)
            self._members = members_of(self.param_groups)
            self._building = False
            vars(self).update(hooks)
            self.initialize_state()
            self.metrics = Sampler([self], interval=self._settings["metrics_interval"], group=self.group)
            if self._settings["cuda_graph"]:
                self._capture()
        except BaseException:
            self.close()
            raise

    def _build_matrices(self, selection: Selection) -> None:
        """Find out who holds what, and make exchange, plan and state of the matrices. Collective."""
        given, names = self._settings, selection.names
        settings, parameters = arguments.settings_of(given), members_of(selection.muon)
        mesh = cuts.mesh_of(names, parameters)
        checks.compare_settings(given, selection.groups, self._ranks(mesh))
        group: Any = Alone() if mesh is None else cuts.group_of(mesh)
        if mesh is None and given["share_replicated"]:
            group = given["process_group"] or dist.group.WORLD
        self.group, device = group, parameters[0].device
        self._from_megatron_fsdp = hasattr(parameters[0], "_megatron_fsdp_model")
        steps = steps_of((names[p] for p in parameters), given["ns_steps_for"] or {})
        selection.splits = splits(given["split"] or {}, names, parameters)
        matrices = {
            p: Matrix(names[p], (p.shape[0], p.shape[1]), (), split, steps.get(names[p], 0))
            for p in parameters
            for split in [selection.splits.get(p, whole(p.shape[0]))]
        }
        layout, mine = cuts.layout_of(matrices, group, remedy=_ALIKE)
        placements = (each for p in parameters if isinstance(p, DTensor) for each in p.placements)
        replicated = all(isinstance(each, Replicate) for each in placements)
        if given["team_size"] != AUTO and scheme_of(settings, replicated=replicated) != OWNER:
            raise UserError(
                f"team_size={given['team_size']!r} has no effect here: no rank owns what others hold; leave it out"
            )
        columns = [(start, count) for _, _, start, count in mine]
        held = Held(layout, group, device, [1] * len(parameters), columns, replicated=replicated)
        self._run = offload_run(settings)
        exchange, rules, store = make_parts(
            held,
            settings,
            self._orthogonalizer(device),
            moment2=given["moment2_method"],
            nesterov=given["nesterov"],
            offload=self._run,
        )
        if exchange.unmet:
            refuse_unmet({"these": exchange.unmet})
        self.digest = exchange.plan.digest() if exchange.plan is not None else ""
        self._placed = [(p, checks.placement_of(p)) for p in parameters]
        defaults = {"lr": float(given["lr"]), "momentum": given["momentum"], "weight_decay": given["weight_decay"]}
        super().__init__(
            selection.muon, exchange, rules, defaults=defaults, names=names, store=store, skip_missing=True
        )

    def _add_adamw(self, selection: Selection) -> None:
        """Add AdamW's parameter groups, and put all groups in the order that was given."""
        of_adamw = {name: self._settings[f"adamw_{name}"] for name in ("lr", "weight_decay", "betas", "eps")}
        of_adamw |= {name: self.defaults[name] for name in ("lr", "weight_decay") if of_adamw[name] is None}
        for members in (group for group in selection.groups if group[OPTIMIZER] == ADAMW):
            members.update({**of_adamw, **members})
            self.add_param_group(members)
        self.param_groups = list(selection.groups)
        numbered = enumerate(self.param_groups)
        self._group_of = [number for number, group in numbered if group[OPTIMIZER] == MUON for _ in group["params"]]

    @override
    def _enqueue(self) -> None:
        (self._captured or super()._enqueue)()

    def _capture(self) -> None:
        """From now on have the step of the matrices captured."""
        device = self._matrices[0].device
        if device.type != "cuda":
            raise UserError(f"cuda_graph=True needs a GPU, and the parameters are on {device}; leave it out")
        groups = [group for group in self.param_groups if group[OPTIMIZER] == MUON]
        self._captured = CapturedStep(super()._enqueue, self._matrices, groups)

    def _ranks(self, mesh: DeviceMesh | None) -> list[int]:
        """The ranks that make this optimizer together."""
        if mesh is not None:
            return sorted(mesh.mesh.flatten().tolist())
        if self._settings["share_replicated"]:
            return dist.get_process_group_ranks(self._settings["process_group"])
        in_files = self._settings["offload"] == "nvme" and dist.is_initialized()
        return list(range(dist.get_world_size())) if in_files else []

    def _orthogonalizer(self, device: torch.device) -> Orthogonalizer:
        given = self._settings
        scale_mode, factor = arguments.ADJUST_LR[given["adjust_lr_fn"]]
        iteration = arguments.iteration_of(
            given["ns_coefficients"], given["ns_steps"], given["fp32_matmul_prec"], given["ns"]
        )
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

        A line for each kind of parameter, of which layers have one each; with `full` for each parameter.
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
                    "fully_shard(model, optimizer) joins all parameter groups and loses their settings; use "
                    "fully_shard_model(model), make Muon on its parameters, then fully_shard_optimizer(optimizer)"
                )
            with in_arguments():
                self._build(select(param_group["params"], self._settings["matrices"], self._settings["exclude"]))
        else:
            raise UserError("Muon plans who owns what when it is made; give it all parameters then")

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._captured is not None:
            self._capture()  # other tensors have state and numbers

    @_disable_dynamo  # compiled, the foreach calls of AdamW's step fail
    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returns. Collective.

        Raises: UserError: parameters have changed since the optimizer was made, a gradient is sparse, or it is
        closed. OffloadError: on every rank where one cannot read its momentum; no weight has changed if it lay in
        the buffer, else matrices that came before it have moved. The optimizer is of no use afterwards.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_up_exchanged()
        self._require_open()
        checks.check_parameters(self._placed, self._names, self.selection.frozen)
        if not self._has_stepped:
            if self._from_megatron_fsdp and checks.are_zero(self._members, self.group):
                return loss  # the step that Megatron-FSDP's fully_shard_optimizer takes to make state, which is there
            checks.refuse_orphans(self._members, self._names, is_sharded=isinstance(self._matrices[0], DTensor))
            with in_arguments():
                self.check_weights()
        if isinstance(self.store, RecordStore):
            self.store.verify()
        self.refuse_lost_state()
        with self.metrics.step():
            self.update_matrices()
            self.refuse_lost_state()
            for group in (group for group in self.param_groups if group[OPTIMIZER] == ADAMW):
                step_adamw(group, self.state, counts_empty=self._from_megatron_fsdp)
        self._has_stepped = True
        return loss

    @override
    def _take_up_exchanged(self) -> None:
        """Make it anew where `param_groups` have got other parameters since, as accelerate gives them. Collective then.

        Source: accelerate.utils.fsdp_utils.fsdp2_switch_optimizer_parameters.
        """
        now = members_of(self.param_groups)
        if len(now) != len(self._members):
            raise UserError(
                f"param_groups have {len(now)} parameters, and had {len(self._members)} when the optimizer was made; "
                "give it all parameters then"
            )
        if not any(map(operator.is_not, now, self._members)):
            return
        kept = [slot for slots in self.state.values() for slot in slots.values()]
        if any(bool(slot.any()) for slot in local_parts([*kept, *self.momentum_state().values()])):
            raise UserError(
                "parameters in param_groups were exchanged after steps, so their state would be lost; exchange them "
                "before the first step, and load state after that"
            )
        self.state.clear()
        with in_arguments():
            self._build(self.selection.exchanged(self._members, self.param_groups))
