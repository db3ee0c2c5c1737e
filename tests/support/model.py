"""A case's model under the real Megatron-FSDP with the real optimizer, for tests that run on
several ranks.

Runs in the workers; importing it imports no Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.case import SEQUENCE, Case, batches, gradient_of
from tests.support.gpt import build_gpt, cut_along, global_name, transformer_config

_sizes: dict[str, int] | None = None


def make_groups(**sizes: int) -> None:
    """Megatron's process groups of these sizes, those of the case before where they are the same.

    Making them takes half of a case's time, and their threads end with the process.
    """
    from megatron.core import parallel_state, tensor_parallel

    global _sizes
    if sizes != _sizes:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        _sizes = sizes
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class Trainer:
    """A wrapped model, its optimizer and its learning-rate schedule on this rank.

    Attributes:
        parameters: the optimizer's parameters by name, whatever the model shows at the moment.
        shapes: whole shapes of all parameters by name.
    """

    def __init__(self, case: Case, *, steps: int = 10) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.module import Float16Module

        self.case = case
        make_groups(
            tensor_model_parallel_size=case.tensor,
            context_parallel_size=case.context,
            num_distributed_optimizer_instances=case.instances,
            expert_model_parallel_size=case.expert_parallel,
            expert_tensor_parallel_size=case.expert_tensor,
        )
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        config = transformer_config(case)
        model = build_gpt(case, config)
        if case.bf16:
            model = Float16Module(config, model)
        self.model = FullyShardedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_megatron_fsdp=True,
                data_parallel_sharding_strategy=case.strategy,
                num_distributed_optimizer_instances=case.instances,
                outer_dp_sharding_strategy=case.outer,
                use_distributed_optimizer=True,
                overlap_grad_reduce=case.overlap,
                overlap_param_gather=case.overlap,
                gradient_reduce_div_fusion=False,
                grad_reduce_in_fp32=case.bf16,
            ),
            model,
            pg_collection=self.groups,
        )
        self._buffer = self.model.param_and_grad_buffer
        first = (
            parallel_state.get_expert_model_parallel_rank() * case.experts // case.expert_parallel
        )
        self.parameters = {
            global_name(name, first): parameter
            for name, parameter in self._buffer.optimizer_named_parameters
        }
        self.shapes = {}
        for shapes in self._of_all_ranks(
            {name: tuple(p.shape) for name, p in self.parameters.items()}
        ):
            self.shapes.update(shapes)
        self.optimizer = _optimizer(case, self.model, self.groups)
        self._schedule = _schedule(case, self.optimizer, steps)
        config.grad_scale_func = self.optimizer.scale_loss
        if case.overlap or case.strategy in ("optim_grads", "optim_grads_params"):
            # as megatron.training does under --overlap-grad-reduce
            config.no_sync_func = self.model.no_sync
        self.steps_done = 0

    def step(
        self,
        gradient: Callable[[str, Sequence[int], int], torch.Tensor] = gradient_of,
    ) -> Any:
        """One optimizer step with given whole gradients, written where Megatron-FSDP keeps the
        reduced ones.
        """
        self.optimizer.zero_grad()
        attach = self._buffer.update_main_grads

        def write_and_attach() -> None:
            self._write(gradient)
            attach()

        self._buffer.update_main_grads = write_and_attach
        try:
            self.model.finish_grad_sync()
            result = self.optimizer.step()
        finally:
            del self._buffer.update_main_grads
        self._advance(result)
        return result

    def train(
        self,
        tokens: torch.Tensor,
        *,
        micro_batches: int = 1,
    ) -> tuple[float, Any]:
        """One training step as megatron.training makes it; the mean loss of the global batch, and
        step()'s result.

        Args:
            tokens: `(global batch, SEQUENCE + 1)`, the same on every rank.
            micro_batches: parts into which every rank cuts its share.
        """
        from megatron.core.distributed import finalize_model_grads

        self.model.config.finalize_model_grads_func = (
            None if self.case.own_loop else finalize_model_grads
        )
        ranks = self.groups.dp.size()
        mine = tokens.chunk(ranks)[self.groups.dp.rank()]
        assert len(mine) * ranks == len(tokens)
        self.optimizer.zero_grad()
        losses = _forward_backward(self.model, mine, micro_batches)
        result = self.optimizer.step()
        self._advance(result)
        loss = torch.stack([part["loss"] for part in losses]).mean()
        dist.all_reduce(loss, group=self.groups.dp)
        return loss.item() / ranks, result

    def whole(self) -> dict[str, torch.Tensor]:
        """Every parameter's main weight, whole, put together from the shards of all ranks."""
        return self.assemble(
            {name: p._local_tensor for name, p in self.parameters.items()}, self.shapes
        )

    def whole_state(self, slot: str) -> dict[str, torch.Tensor]:
        """A slot of the optimizer state, whole, of every parameter that has it; no second moments
        under TP.
        """
        if slot != "momentum_buffer" and max(self.case.tensor, self.case.expert_tensor) > 1:
            return {}
        state = {name: state[slot] for name, state in self.states().items() if slot in state}
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        return self.assemble(
            {name: value._local_tensor for name, value in state.items()},
            shapes if slot != "momentum_buffer" else self.shapes,
        )

    def states(self) -> dict[str, dict[str, Any]]:
        """The optimizer state of every parameter, by name."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        return {
            names[parameter]: state
            for member in self.optimizer.chained_optimizers
            for parameter, state in member.optimizer.state.items()
        }

    def bits(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's shards of all weights and all state."""
        copies = {name: p._local_tensor.detach().clone() for name, p in self.parameters.items()}
        for name, state in self.states().items():
            for slot, value in state.items():
                copies[f"{name}:{slot}"] = (
                    getattr(
                        value,
                        "_local_tensor",
                        value,
                    )
                    .detach()
                    .clone()
                )
        return copies

    def _advance(self, result: Any) -> None:
        if result[0]:
            self.steps_done += 1
            self._schedule.step(1)

    def _write(
        self,
        gradient: Callable[[str, Sequence[int], int], torch.Tensor],
    ) -> None:
        sharded = self.case.strategy != "no_shard"
        for name, parameter in self.parameters.items():
            original = parameter.orig_param
            group = self._buffer.parameter_groups[self._buffer.param_to_param_group[original]]
            if group.main_grad_buffer is None:
                continue
            place = group.main_grad_buffer.get_item(
                group.main_grad_buffer.param_idx[original], only_shard=sharded
            )
            whole = gradient(name, self.shapes[name], self.steps_done)
            place.copy_(whole[self._place(name)].reshape(-1))

    def _place(self, name: str) -> tuple[slice, ...]:
        """Which part of the whole parameter this rank's shard is, from Megatron-FSDP's own notes on
        where it cut.
        """
        parameter = self.parameters[name]
        original, shard = parameter.orig_param, parameter._local_tensor
        starts = [0] * original.ndim
        if shard.numel() and self.case.strategy != "no_shard":
            cut = parameter.megatron_fsdp_slice.start // math.prod(original.shape[1:])
            starts[0] = cut if shard.numel() < original.numel() else 0
        if (dim := cut_along(original)) is not None:
            group = self.groups.tp if getattr(original, "allreduce", True) else self.groups.expt_tp
            starts[dim] += group.rank() * original.shape[dim]
        return tuple(
            slice(start, start + size) for start, size in zip(starts, shard.shape, strict=True)
        )

    def assemble(
        self,
        shards: dict[str, torch.Tensor],
        shapes: dict[str, tuple[int, ...]],
    ) -> dict[str, torch.Tensor]:
        """Whole tensors from the shards of all ranks; every element is there, and replicas agree to
        the last bit.

        Args:
            shards: this rank's, by the name of the parameter that is cut in the same way.
            shapes: whole shapes. Where the first is not the parameter's, each rank has all.
        """
        whole: dict[str, torch.Tensor] = {}
        seen: dict[str, torch.Tensor] = {}
        mine = {}
        for name, shard in shards.items():
            shape = shapes[name]
            is_cut = shape[0] == self.shapes[name][0]
            place = self._place(name) if is_cut else (slice(None),)
            # tensors take four times as long to unpickle
            mine[name] = (place, shape, shard.detach().float().cpu().numpy())
        for rank, shards_of_rank in enumerate(self._of_all_ranks(mine)):
            for name, (place, shape, values_of_rank) in shards_of_rank.items():
                shard = torch.from_numpy(values_of_rank)
                values = whole.setdefault(name, torch.full(shape, torch.nan))
                held = seen.setdefault(name, torch.zeros(shape, dtype=torch.int32))
                twice = held[place] > 0
                assert torch.equal(values[place][twice], shard[twice]), (
                    f"{name}: rank {rank} has other values"
                )
                values[place] = shard
                held[place] += 1
        for name, held in seen.items():
            assert held.min() == held.max() > 0, (
                f"{name}: elements are held by {held.tolist()} ranks"
            )
        return whole

    @staticmethod
    def _of_all_ranks(mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone


def gradient_statistics(rank: int, world_size: int, *, case: Case) -> tuple[float, int]:
    """In a worker: norm and number of zeros of the gradients of the first step on one rank, where
    nothing wraps the model.
    """
    make_groups()
    model = build_gpt(case, transformer_config(case))
    _forward_backward(model, batches(1)[0], 1)
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    together = torch.cat(gradients)
    return float(together.norm()), int((together == 0).sum())


@contextmanager
def sabotaged(how: str) -> Iterator[None]:
    """Bugs that others shipped, put in for negative controls; "" leaves everything as it is."""
    from megatron_muon.core.cost import Iteration
    from megatron_muon.core.engine import Engine
    from megatron_muon.core.methods.newton_schulz import NewtonSchulz
    from megatron_muon.core.rules.hyperball import Hyperball
    from tests.support.rows import orthogonalized

    def orthogonalize_the_shard(self: Any) -> None:
        method = NewtonSchulz(Iteration(precision="highest"), extra_scale_factor=0.2)
        self.passes.begin(self.probe)
        waves = [each for wave in self.waves for each in (wave, *wave.batches)]
        for wave in waves:
            for chunk in wave.chunks:
                alone = SimpleNamespace(chunks=[chunk])
                self.passes.advance(alone)
                for rows in chunk.prepared_rows:
                    rows.copy_(orthogonalized(method, rows))
                chunk.updates.copy_(chunk.prepared)
                with mock.patch("megatron_muon.core.passes.copy_all"):
                    self.passes.descend(alone)
        self.passes.end()

    end = Hyperball.end

    def norms_of_shards(self: Any) -> None:
        self.held = replace(self.held, replicated=True)
        end(self)

    replaced: dict[str, Any] = {
        "shard": (Engine, "step", orthogonalize_the_shard),
        "norms": (Hyperball, "end", norms_of_shards),
    }
    with mock.patch.object(*replaced[how]) if how else nullcontext():
        yield


def _optimizer(case: Case, model: torch.nn.Module, groups: Any) -> Any:
    from megatron_muon.core import packing
    from megatron_muon.megatron.factory import get_megatron_muon_optimizer
    from megatron_muon.megatron.muon_config import MuonOptimizerConfig

    packing.SMALL_BYTES = 0  # several waves, as large models have

    config = MuonOptimizerConfig(
        use_distributed_optimizer=True,
        bf16=case.bf16,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        **case.settings,
    )
    return get_megatron_muon_optimizer(config, [model], None, groups)


def _schedule(case: Case, optimizer: Any, steps: int) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    decay = case.settings["weight_decay"]
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=case.settings["lr"],
        min_lr=case.settings["min_lr"],
        lr_warmup_steps=0,
        lr_decay_steps=steps,
        lr_decay_style="cosine",
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )


def _forward_backward(
    model: torch.nn.Module, tokens: torch.Tensor, micro_batches: int
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    assert len(tokens) % micro_batches == 0
    losses: list[Any] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter(tokens.chunk(micro_batches)),
        model=model,
        num_microbatches=micro_batches,
        seq_length=SEQUENCE,
        micro_batch_size=len(tokens) // micro_batches,
        forward_only=False,
    )
    return losses


def _forward_step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = next(iterator).cuda()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device="cuda").expand_as(inputs)
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda").tril().logical_not()
    output = model(inputs, positions, future, labels=labels)

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, mean
