"""Estimates of a whole training step with Adam and with Muon: memory of a GPU, and time.

FSDP's gathers and reductions overlap with forward and backward; the time of elementwise work is
bytes over memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_muon.tools.plan.estimate import PRODUCT_SHARE, Hardware, PlanSettings

MFU = 0.45
"""Share of the data sheet's rate that model FLOPs reach in forward and backward.

Megatron-LM reports 41 % (2B) to 48 % (462B) on H100,
https://github.com/NVIDIA/Megatron-LM#training-speed-and-scalability.
"""

UNITS = "optim_grads_params"
"""The strategy that shards weights, in buckets of a transformer layer; others cut by size."""

# Bytes moved for each parameter, in fp32 and without cache hits.
NORM_BYTES, CLIP_BYTES = 4, 8  # reads the gradient; reads and writes it
# one fused pass: reads gradient, weight and two moments, writes all but the gradient
ADAM_BYTES = 28
MOMENTUM_BYTES = 24  # momentum and look-ahead each read two tensors and write one
APPLY_BYTES = 20  # decay and update each read and write the weight; the update is read

# Bytes stored for each parameter.
# the main weight, which Megatron-FSDP keeps in fp32 training too; Adam's moments
MAIN_BYTES, MOMENTS_BYTES = 4, 8
STORED_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}  # momentum, by --muon-momentum-dtype


@dataclass(frozen=True)
class Parameters:
    """Trained parameters of a kind, dense or experts."""

    count: int  # of one copy of the model, over all ranks
    muon: int  # of them, those in Muon's matrices
    parts: int  # tensor and expert parallel ranks, which cut them first
    ranks: int  # that FSDP cuts each part over

    def gather_s(self, hardware: Hardware, element_bytes: int) -> float:
        """Seconds in which all ranks gather or reduce their parts, in and between nodes at once.

        A node's ranks share the data that arrives from other nodes.
        """
        part = self.count / self.parts * element_bytes
        local = min(max(hardware.joined_ranks // self.parts, 1), self.ranks)
        nodes = math.ceil(self.ranks / local)
        within, between = part * (1 - 1 / local), part / local * (1 - 1 / nodes)
        return max(within / hardware.node_gb_per_s, between / hardware.network_gb_per_s) / 1e9


@dataclass(frozen=True)
class TrainedModel:
    """Parameters and batch of a training step."""

    parameters: tuple[Parameters, ...]  # dense ones, and experts where there are any
    copies: int  # of the optimizer's state: HSDP's instances
    sequence_flops: float  # of a sequence, forward and backward
    sequence_length: int  # tokens
    has_vocabulary: bool  # the size of the embedding is known
    global_batch: int | None  # sequences of a step; None where the config names none
    micro_batch: int  # sequences of a data-parallel rank at a time
    replicas: int  # data-parallel ranks
    strategy: str  # --data-parallel-sharding-strategy
    weight_bytes: int  # of an element of the weights when they are gathered: 2 in bf16
    reduced_bytes: int  # of an element of the gradients when they are reduced
    activation_bytes: float = 0.0  # of a micro-batch on a rank

    def held(self, name: str = "count") -> float:
        """Parameters in a rank's shards; with "muon", those in Muon's matrices."""
        return sum(float(getattr(kind, name)) / kind.parts / kind.ranks for kind in self.parameters)

    def collectives(self, micro_batches: int) -> tuple[int, int]:
        """The numbers of times that a step gathers all weights and reduces all gradients.

        Sharded weights are gathered for forward and for backward, sharded gradients are reduced in
        every micro-batch.
        """
        gathers = 2 * micro_batches if self.strategy == UNITS else 1
        return gathers, 1 if self.strategy == "optim" else micro_batches

    def communication_s(self, hardware: Hardware, micro_batches: int) -> float:
        """Seconds of a step's gathers and reductions without overlap."""
        gathers, reductions = self.collectives(micro_batches)
        seconds = 0.0
        for kind in self.parameters:
            seconds += gathers * kind.gather_s(hardware, self.weight_bytes)
            seconds += reductions * kind.gather_s(hardware, self.reduced_bytes)
            shard = kind.count / kind.parts / kind.ranks * self.reduced_bytes
            # among instances
            seconds += 2 * (1 - 1 / self.copies) * shard / hardware.network_gb_per_s / 1e9
        return seconds


def holder_bytes(settings: PlanSettings) -> int:
    """Bytes that momentum, exchange and update move in the holder's memory for a parameter."""
    return MOMENTUM_BYTES + 2 * settings.memory.element_bytes + APPLY_BYTES


def owner_bytes(settings: PlanSettings) -> int:
    """Bytes that a step moves in the owner's memory for an element, without products.

    The element is assembled, measured, scaled to about 1 in the iteration's dtype, checked for
    finiteness, and copied to its stack and on to a buffer: `core.exchange`, `core.orthogonalize`.
    """
    return 9 * settings.memory.element_bytes + 3 * (2 if settings.memory.iteration.half else 4)


def elementwise_ms(held: float, owned: float, settings: PlanSettings, hardware: Hardware) -> float:
    """Milliseconds of a rank's elementwise passes, by Muon's parameters that it holds and owns."""
    moved = held * holder_bytes(settings) + owned * owner_bytes(settings)
    return moved / hardware.memory_gb_per_s / 1e6


def memory(model: TrainedModel, config: Any, step_bytes: int, hardware: Hardware) -> dict[str, Any]:
    """Bytes of a GPU's memory by purpose, with Adam and with Muon, whose step takes `step_bytes`.

    Weights and gradients are sharded as by Megatron-FSDP; `config` has Muon's settings.
    """
    held, muon = model.held(), model.held("muon")
    whole = sum(kind.count / kind.parts for kind in model.parameters)
    kept = 1.0  # share of momentum on the device
    if config.muon_offload != "none":
        kept -= config.muon_offload_fraction
    kept_main = kept if config.muon_offload_state == "all" else 1.0
    momentum = STORED_BYTES[config.muon_momentum_dtype] * kept
    is_adaptive = config.optimizer == "adaptive_muon"
    if is_adaptive and config.adaptive_muon_moment2_method == "adamuon":
        momentum += 4
    weights = model.weight_bytes * (held if model.strategy == UNITS else whole)
    common = {
        "gradients": model.reduced_bytes * (whole if model.strategy == "optim" else held),
        "activations": model.activation_bytes,
    }
    with_adam = {
        "weights": weights + MAIN_BYTES * held,
        **common,
        "state": MOMENTS_BYTES * held,
        "step": 0,
    }
    with_muon = {
        "weights": weights + MAIN_BYTES * kept_main * held,
        **common,
        "state": momentum * muon + MOMENTS_BYTES * kept_main * (held - muon),
        "step": step_bytes,
    }
    for parts in (with_adam, with_muon):
        parts["total"] = sum(parts.values())
    capacity = hardware.memory_gb * 1e9
    fits = with_muon["total"] <= capacity
    return {"adam": with_adam, "muon": with_muon, "capacity": capacity, "fits": fits}


def simulate(
    model: TrainedModel,
    plan: Mapping[str, Any],
    *,
    settings: PlanSettings,
    hardware: Hardware,
    mfu: float,
) -> tuple[dict[str, Any], list[str]]:
    """Milliseconds of a step of the model's batch with Adam and with Muon, and warnings.

    `plan` has the figures of the plan.
    """
    assert model.global_batch is not None
    peak_tflops = hardware.tflops(half=model.weight_bytes == 2) / PRODUCT_SHARE
    # by Megatron's count: causal attention, no recomputation
    flops = model.sequence_flops * model.global_batch
    compute_ms = flops / (plan["world_size"] * peak_tflops * 1e12 * mfu) * 1e3
    sequences = model.global_batch / model.replicas
    micro_batches = max(math.ceil(sequences / model.micro_batch), 1)
    communication_ms = model.communication_s(hardware, micro_batches) * 1e3
    held, muon = model.held(), model.held("muon")

    def passes_ms(parameters: float, moved: float) -> float:
        return parameters * moved / hardware.memory_gb_per_s / 1e6

    common = {
        "forward_backward": compute_ms,
        "communication": max(communication_ms - compute_ms, 0.0),  # without overlap
        "norm_clip_install": passes_ms(held, NORM_BYTES + CLIP_BYTES + 4 + model.weight_bytes),
    }
    # an element has one owner, however many ranks hold it
    owned = plan["max_over_mean"] * muon / model.copies
    of_muon = elementwise_ms(muon, owned, settings, hardware)
    adam = {**common, "adam": passes_ms(held, ADAM_BYTES)}
    ours = {
        **common,
        "adam": passes_ms(held - muon, ADAM_BYTES),
        "elementwise": of_muon,
        "muon_step": plan["step_ms"],
    }
    for each in (adam, ours):
        each["total"] = sum(each.values())
    figures = {
        "tokens": model.global_batch * model.sequence_length,
        "adam_ms": adam,
        "muon_ms": ours,
        "muon_over_adam": ours["total"] / adam["total"],
        "communication_share": adam["communication"] / adam["total"],
    }
    return figures, _warnings(model, sequences)


def _warnings(model: TrainedModel, sequences: float) -> list[str]:
    warnings = []
    if sequences < 1:
        warnings.append(
            f"a data-parallel rank has {sequences:.2g} of a sequence of {model.sequence_length:,}"
            " tokens; use a larger --global-batch-size or fewer ranks"
        )
    if not model.has_vocabulary:
        warnings.append(
            "the size of the vocabulary is unknown and counts as 0; add --vocab-size to the config"
        )
    return warnings
