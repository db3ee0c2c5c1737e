"""Small models of transformers, their gradients, and every way in which ranks hold their weights.

A model is trained once by the reference on whole matrices; its start and the gradients of its steps are kept. The
optimizer under test gets parts of them, cut here by `torch.chunk`, and each rank compares what it holds with its part
of what the reference has.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

import megatron_muon

STEPS = 10
LR, ADAMW_LR, DECAY = 0.02, 3e-3, 0.1
SETTINGS: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {"moment2_method": "normuon"},
    "adamuon": {"moment2_method": "adamuon", "moment2_eps": 1e-2},  # of less, elements near zero are rounding alone
    "hyperball": {"hyperball": True, "weight_decay": 0.0, "adamw_weight_decay": DECAY},
    "all-gather": {"exchange": "allgather"},
    "host": {"offload": "cpu"},
    "disk": {"offload": "nvme"},
    "int8": {"momentum_dtype": "int8"},
}


@dataclass(frozen=True)
class Model:
    """A configuration of transformers, and what a user would say of its matrices."""

    config: dict[str, Any]
    transposed: Sequence[str] = ()
    flatten: Mapping[str, bool] = field(default_factory=dict)
    split: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # rows of the blocks, repeated
    excluded: Sequence[str] = ("embed", "lm_head", "wte", "wpe", "classifier", "bias")  # parts of names for AdamW

    def build(self) -> nn.Module:
        """The model, from seed 0."""
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**self.config)
        config._experts_implementation = "eager"  # grouped products want sizes in multiples of 16 bytes
        is_vision = "image_size" in self.config
        kind: Any = transformers.AutoModelForImageClassification if is_vision else transformers.AutoModelForCausalLM
        return kind.from_config(config, attn_implementation="eager").train()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The input of a step."""
        generator = torch.Generator().manual_seed(step)
        if "image_size" in self.config:
            images = torch.randn(16, 3, 8, 8, generator=generator)
            return {"pixel_values": images, "labels": torch.randint(2, (16,), generator=generator)}
        words = torch.randint(self.config["vocab_size"], (8, 17), generator=generator)
        return {"input_ids": words, "labels": words}

    def matrices(self, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """What Muon reads a parameter as, views of it; none where AdamW takes it."""
        flat = any(self.flatten[part] for part in self.flatten if part in name)
        if whole.ndim < 2 or (not flat and any(part in name for part in self.excluded)):
            return []
        parts = [whole.flatten(1)] if flat else list(whole) if whole.ndim == 3 else [whole]
        return [part.T for part in parts] if any(part in name for part in self.transposed) else parts

    def blocks(self, name: str, rows: int) -> list[slice]:
        """The rows of each of a matrix's blocks."""
        sizes = next((sizes for part, sizes in self.split.items() if part in name), (rows,))
        ends = [0, *itertools.accumulate(sizes * (rows // sum(sizes)))]
        assert ends[-1] == rows
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def muon(self, parameters: Iterable[tuple[str, torch.Tensor]], **settings: Any) -> megatron_muon.Muon:
        """The optimizer under test."""
        mine = {"split": self.split, "transposed": self.transposed, "flatten": self.flatten}
        common = {"lr": LR, "adamw_lr": ADAMW_LR, "weight_decay": DECAY, "fp32_matmul_prec": "highest"}
        return megatron_muon.Muon(parameters, **{**common, **mine, **settings})


_TEXT: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 21,
    "intermediate_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
_EXPERTS = {"moe_intermediate_size": 10, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "head_dim": 4,
    "num_key_value_heads": 3,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: dict[str, Model] = {
    "llama": Model({"model_type": "llama", **_TEXT}),
    "qwen3-moe": Model(
        {"model_type": "qwen3_moe", **_TEXT, **_EXPERTS, "num_experts": 5}, split={"gate_up_proj": (10, 10)}
    ),
    "deepseek-v3": Model({"model_type": "deepseek_v3", **_TEXT, **_EXPERTS, **_LATENT}, split={"kv_b_proj": (6, 5)}),
    "llama4": Model(  # stacks as (experts, inputs, outputs)
        {"model_type": "llama4_text", **_TEXT, "intermediate_size_mlp": 20, "num_local_experts": 4},
        transposed=("gate_up_proj", "experts.down_proj"),
        split={"gate_up_proj": (18, 18)},
    ),
    "gpt2": Model(
        {"model_type": "gpt2", "vocab_size": 50, "n_embd": 22, "n_layer": 2, "n_head": 2, "n_positions": 32},
        transposed=("c_attn", "c_proj", "c_fc"),
        split={"c_attn": (22, 22, 22)},
    ),
    "vit": Model(
        {
            "model_type": "vit",
            "hidden_size": 22,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
        flatten={"projection": True},
    ),
}


class Whole:
    """A model's weights, and the reference's optimizers of them: whole matrices in one process."""

    def __init__(self, model: Model, weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        from tests.support.reference import SplitAdaptiveMuon, SplitHyperball, SplitMuon

        self.model, self.weights = model, {name: weight.clone() for name, weight in weights.items()}
        self._parts: dict[str, list[nn.Parameter]] = {}
        rest: list[dict[str, Any]] = []
        for name, weight in self.weights.items():
            parts = [nn.Parameter(part) for part in model.matrices(name, weight)]  # which share the weight's memory
            for part in parts:
                part.row_blocks = model.blocks(name, len(part))  # type: ignore[attr-defined]
            if not parts:
                parts = [nn.Parameter(weight)]
                rest.append({"params": parts, "weight_decay": DECAY if weight.ndim > 1 else 0.0})
            self._parts[name] = parts
        taken = [part for parts in self._parts.values() for part in parts if hasattr(part, "row_blocks")]
        given: dict[str, Any] = {
            "lr": LR,
            "momentum": 0.95,
            "nesterov": True,
            "weight_decay": settings.get("weight_decay", DECAY),
            "fp32_matmul_prec": "highest",
            "coefficient_type": "simple",
            "scale_mode": "shape_scaling",
        }
        kind: Any = SplitHyperball if settings.get("hyperball") else SplitMuon
        if settings.get("moment2_method"):
            eps = settings.get("moment2_eps", 1e-8)
            kind, more = SplitAdaptiveMuon, {"moment2_method": settings["moment2_method"], "beta2": 0.95, "eps": eps}
            given |= more
        self._optimizers = [kind(taken, **given)]
        self._optimizers.append(torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), eps=1e-8))

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """One update from whole gradients; of a matrix whose gradient is missing or not finite, none."""
        for name, parts in self._parts.items():
            whole = gradients.get(name)
            several = [None] * len(parts) if whole is None else self.model.matrices(name, whole) or [whole]
            for part, gradient in zip(parts, several, strict=True):
                part.grad = gradient if gradient is not None and gradient.isfinite().all() else None
        for optimizer in self._optimizers:
            optimizer.step()


@dataclass(frozen=True)
class Run:
    """Weights at the start of a training by the reference, the gradients of each step, and the weights at the end."""

    start: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    end: dict[str, torch.Tensor]


@functools.cache
def trained(name: str) -> Run:
    """A model's training, by its own gradients."""
    torch.set_num_threads(1)
    module = MODELS[name].build()
    start = {key: p.detach().clone() for key, p in module.named_parameters()}
    whole, gradients = Whole(MODELS[name], start, {}), []
    for step in range(STEPS):
        with torch.no_grad():
            for key, p in module.named_parameters():
                p.copy_(whole.weights[key])
        module.zero_grad()
        module(**MODELS[name].batch(step)).loss.backward()
        gradients.append({key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None})
        whole.step(gradients[-1])
    return Run(start, gradients, whole.weights)


@functools.cache
def expected(name: str, settings: str) -> dict[str, torch.Tensor]:
    """Weights after the gradients of `trained`: by the reference, or by one process where momentum is rounded."""
    run, given = trained(name), SETTINGS[settings]
    if given.get("momentum_dtype"):
        weights = {key: nn.Parameter(weight.clone()) for key, weight in run.start.items()}
        optimizer = MODELS[name].muon(weights.items(), **given)
        for gradients in run.gradients:
            for key, p in weights.items():
                p.grad = gradients[key].clone()
            optimizer.step()
        return {key: p.detach() for key, p in weights.items()}
    whole = Whole(MODELS[name], run.start, given)
    for gradients in run.gradients:
        whole.step(gradients)
    return whole.weights


@dataclass(frozen=True)
class Cut:
    """A mesh and the placements on it: `S0` is Shard(0), `s0` a _StridedShard(0), `R` Replicate.

    `sets` has the ranks of several meshes, each of which holds experts of its own, in this order.
    """

    mesh: tuple[int, ...]
    placements: str
    sets: tuple[tuple[int, ...], ...] = ()

    def of(self, shape: Sequence[int]) -> list[Placement]:
        """The placements of a parameter: Replicate for dimensions that it lacks, rows of a convolution."""
        found: list[Placement] = []
        for place, one in enumerate(self.placements.split()):
            dim = int(one[1:] or 0) if one != "R" else 0
            dim = 0 if len(shape) > 3 else dim
            if one == "R" or dim >= len(shape):
                found.append(Replicate())
            elif one[0] == "s":
                later = zip(self.placements.split()[place + 1 :], self.mesh[place + 1 :], strict=True)
                factor = math.prod(size for other, size in later if other == f"S{dim}")
                found.append(_StridedShard(dim, split_factor=factor))
            else:
                found.append(Shard(dim))
        return found


PLAIN = Cut((), "")


def _along(placements: str, experts: str = "") -> dict[int, tuple[Cut, Cut]]:
    return {size: (Cut((size,), placements), Cut((size,), experts or placements)) for size in (1, 2, 3, 4)}


def _on(mesh: tuple[int, ...], dense: str, experts: str) -> dict[int, tuple[Cut, Cut]]:
    size = math.prod(mesh)
    return {size: (Cut(mesh, dense) if " " in dense else Cut((size,), dense), Cut(mesh, experts))}


LAYOUTS: dict[str, dict[int, tuple[Cut, Cut]]] = {
    "plain": {1: (PLAIN, PLAIN), 2: (PLAIN, PLAIN)},
    "fsdp": _along("S0"),
    "fsdp within experts": _along("S0", "S1"),
    "columns": _along("S-1"),
    "columns of experts": _along("R", "S2"),
    "hsdp": _on((2, 2), "R S0", "R S0"),
    "hsdp of one": _on((3, 1), "R S0", "R S1"),
    "replicas inside": _on((2, 2), "S0 R", "S1 R"),
    "ep x fsdp": _on((2, 2), "S0", "s0 S0"),
    "ep 1 x fsdp": _on((3, 1), "S0", "s0 S0"),
    "ep 3 x fsdp": _on((1, 3), "S0", "s0 S0"),
    "ep x fsdp within": _on((2, 2), "S0", "S1 S0"),
    "ep x tp": _on((2, 2), "R S0", "S0 S1"),
    "ep x tp, columns": _on((2, 2), "S0 S1", "S0 S2"),
    "fsdp x tp": _on((2, 2), "s0 S0", "S0 S1"),
    "tp within fsdp": _on((2, 2), "s0 S0", "s1 S1"),
    "fsdp x ep x tp": _on((2, 1, 2), "s0 R S0", "S1 S0 S2"),
    "hsdp x ep": _on((1, 2, 2), "R S0 R", "R s0 S0"),
    "replicas of all": _on((2, 2), "S0", "R R"),
    "shards of shards": _on((2, 2), "S0 S0", "S0 S0"),
    "plain beside fsdp": {size: (PLAIN, Cut((size,), "S0")) for size in (2, 4)},
    "experts apart": {
        2: (Cut((2,), "S0"), Cut((1,), "S0", ((0,), (1,)))),
        4: (Cut((4,), "S0"), Cut((2,), "S1", ((0, 1), (2, 3)))),
    },
    "experts apart, unequal": {4: (Cut((4,), "S0"), Cut((), "S0", ((0,), (1, 2, 3))))},
    "experts apart, plain": {4: (PLAIN, Cut((2,), "S0", ((0, 2), (1, 3))))},
    "crossing": {4: (Cut((2,), "S0", ((0, 1), (2, 3))), Cut((2,), "S0", ((0, 2), (1, 3))))},
}
"""For numbers of ranks, how they hold dense weights and how experts."""


@functools.cache
def _mesh(shape: tuple[int, ...], sets: tuple[tuple[int, ...], ...]) -> tuple[DeviceMesh, int, int]:
    """This rank's mesh, its number among the `sets`, and how many these are. Collective."""
    if not sets:
        return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape)), 0, 1
    meshes = [DeviceMesh("cpu", list(ranks)) for ranks in sets]
    number = next(number for number, ranks in enumerate(sets) if dist.get_rank() in ranks)
    return meshes[number], number, len(sets)


def part_of(whole: torch.Tensor, mesh: tuple[int, ...], place: Sequence[int], placements: Sequence[Placement]) -> Any:
    """What a rank holds: one axis of the mesh cuts after the other, _StridedShard last, as FSDP does after EP or TP."""
    for axis in sorted(range(len(mesh)), key=lambda axis: isinstance(placements[axis], _StridedShard)):
        cut = placements[axis]
        if not isinstance(cut, Replicate):
            pieces = whole.chunk(mesh[axis], dim=cut.dim)  # type: ignore[attr-defined]
            empty = pieces[0].narrow(cut.dim, 0, 0)  # type: ignore[attr-defined]
            whole = pieces[place[axis]] if place[axis] < len(pieces) else empty
    return whole


class Held:
    """What this rank holds of weights or gradients in a layout. Making the first is collective."""

    def __init__(self, layout: str) -> None:
        self._cuts = LAYOUTS[layout][dist.get_world_size() if dist.is_initialized() else 1]

    def _cut(self, name: str, whole: torch.Tensor) -> tuple[Cut, torch.Tensor, tuple[DeviceMesh, int, int] | None]:
        cut = self._cuts[".experts." in name]
        if cut == PLAIN:
            return cut, whole, None
        found = _mesh(cut.mesh, cut.sets)
        if cut.sets and ".experts." in name and len(whole) > 1:  # every set has some
            whole = whole.tensor_split(found[2])[found[1]]
        return cut, whole, found

    def local(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        cut, whole, found = self._cut(name, whole)
        if found is None:
            return whole
        mesh = found[0]
        place = mesh.get_coordinate()
        assert place is not None
        return part_of(whole, tuple(mesh.mesh.shape), place, cut.of(whole.shape))

    def tensor(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The same as a DTensor where it is one, in memory of its own."""
        local = self.local(name, whole).clone(memory_format=torch.contiguous_format)
        cut, whole, found = self._cut(name, whole)
        if found is None:
            return local
        return DTensor.from_local(
            local, found[0], cut.of(whole.shape), run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
        )

    def parameters(self, wholes: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
        """Parameters with these values."""
        return {name: nn.Parameter(self.tensor(name, whole)) for name, whole in wholes.items()}

    def give(self, parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
        """Give parameters their parts of whole gradients, none where there is none."""
        for name, p in parameters.items():
            p.grad = self.tensor(name, gradients[name]) if name in gradients else None

    def differences(
        self, parameters: Mapping[str, torch.Tensor], wholes: Mapping[str, torch.Tensor]
    ) -> dict[str, float]:
        """The largest difference between each parameter here and its part of the whole."""
        found = {}
        for name, p in parameters.items():
            mine, theirs = local_of(p), self.local(name, wholes[name])
            assert mine.shape == theirs.shape, (name, mine.shape, theirs.shape)
            found[name] = float((mine - theirs).abs().max()) if mine.numel() else 0.0
            if math.isnan(found[name]):
                found[name] = math.inf
        return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def move(parameter: torch.Tensor) -> None:
    """Put a parameter's values into other memory, as FSDP2 does when a model is loaded or moved."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = parameter._local_tensor.clone()
    else:
        parameter.data = parameter.data.clone()


def in_watched_memory(parameter: torch.Tensor) -> Any:
    """Put a parameter's gradient into memory of numpy's, which can be watched; returns the array."""
    array = local_of(parameter.grad).numpy().copy()  # type: ignore[arg-type]
    local, gradient = torch.from_numpy(array), parameter.grad
    if isinstance(gradient, DTensor):
        spec = gradient._spec
        local = DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    parameter.grad = local
    return array


def bits(parameters: Mapping[str, torch.Tensor]) -> bytes:
    """All that this rank holds."""
    return b"".join(np.ascontiguousarray(local_of(p).numpy()).tobytes() for p in parameters.values())


def tree(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module that has parameters of these names, for torch's state dicts."""
    root = nn.Module()
    for name, p in parameters.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, p)
    return root
