"""Muon's settings as fields: each is a flag of pretrain_gpt.py, made by megatron-core's `ArgumentGroupFactory`.

Name, choices, default and help (the docstring) stand here alone. The factory reads types at run
time, so annotations are no strings; neither torch nor megatron-core is imported.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from megatron_muon.core.cost import Iteration
from megatron_muon.core.errors import UserError, word_settings

TP_MODE = "duplicated"
"""Default of --muon-tp-mode: updates do not depend on the tensor parallel size. That of 0.19 is blockwise."""

METRICS_INTERVAL = 10
"""Default of --muon-metrics-interval; scripts of one's own measure nothing unless they ask for it."""


def _field(default: Any, /, **flag: Any) -> Any:
    """A field with what its flag has beside name, type and default."""
    return field(default=default, metadata={"argparse_meta": flag})


@dataclass
class RunSettings:
    """For every run of pretrain_gpt.py, with Muon and without."""

    config: str | None = _field(None, metavar="FILE.yaml")
    """experiment file (ENV_VARS, MODEL_ARGS); flags on the line override it"""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where to train; auto takes CUDA where it is"""


@dataclass
class LoadSettings:
    """For loading a checkpoint under Megatron-FSDP."""

    muon_allow_missing_state: bool = False
    """with --load: optimizer state that the checkpoint should hold and does not starts at zero, with a warning"""

    verify_checkpoint: bool = _field(True, arg_names=["--no-verify-checkpoint"])
    """with --load: do not compare the checkpoint's files with their checksums, which reads each of them once"""


@dataclass
class MuonSettings:
    """How Muon works under Megatron-FSDP."""

    muon_exchange: Literal["owner", "allgather"] = "owner"
    """how sharded matrices become whole: owner sends the rows of each to one rank that orthogonalises it; allgather,
    the reference, has every rank orthogonalise all of them"""

    muon_exchange_buffer_mb: float | None = _field(None, metavar="MIB")
    """what Muon's step may take of a rank's memory beyond weights, gradients and state: what travels, the matrices that
    it orthogonalises, temporaries; default 256, or as much as the largest matrix needs with its blocks whole"""

    muon_free_buffers: bool = False
    """give the step's buffers back after each step, for forward and backward to use, and take them again in the next"""

    muon_exchange_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """what travels; auto sends bf16 only where Newton-Schulz starts from bf16 anyway"""

    muon_team_size: Literal["auto", "1", "2", "4", "8"] = "auto"
    """with the owner scheme: how many ranks of a node own a matrix together, each with a part of it; auto forms teams
    only where a matrix is more than a rank's share of the work, and where they save time"""

    muon_ns: Literal["auto", "standard", "gram"] = "auto"
    """the Newton-Schulz iteration; auto takes Gram iteration where it needs fewer operations and is proven"""

    muon_ns_steps_for: list[str] = field(
        default_factory=list, metadata={"argparse_meta": {"metavar": "PATTERN=N"}}
    )
    """take N Newton-Schulz steps for matrices whose names the pattern matches, as for --muon-exclude, instead of
    --muon-num-ns-steps: linear_fc1=4 layers.0.*qkv=8; of several that match the last holds"""

    muon_lr: float | None = None
    """peak learning rate of Muon's parameters; default --lr"""

    muon_min_lr: float | None = None
    """lowest learning rate of Muon's parameters; default --min-lr"""

    muon_split_gated_mlp: bool = False
    """orthogonalise gate and up of a gated MLP's first projection (--swiglu) as two matrices, not as one"""

    muon_split_heads: bool = False
    """orthogonalise every attention head alone: each query, key and value head of the projections that make heads
    (rows). The output projection, which takes heads in (columns), stays one matrix"""

    muon_exclude: list[str] = field(
        default_factory=list, metadata={"argparse_meta": {"metavar": "PATTERN"}}
    )
    """send parameters to the scalar optimizer (Adam) whose names, as --muon-log-params prints them, a shell-style
    pattern matches by whole components: router, layers.1 (not layer 10), layers.0.*fc1; a pattern that matches no
    matrix is an error"""

    adaptive_muon_moment2_method: Literal["adamuon", "normuon"] = "adamuon"
    """with --optimizer adaptive_muon: the second moment of each element of the orthogonalised update (adamuon) or of
    each row, in a wide matrix each column (normuon)"""

    adaptive_muon_beta2: float = 0.95
    """with --optimizer adaptive_muon: what the second moment's average keeps in a step"""

    adaptive_muon_eps: float = 1e-8
    """with --optimizer adaptive_muon: keeps the division by the second moment finite"""

    muon_cautious_weight_decay: bool = False
    """decay only what the update brings nearer to zero: elements of one sign with their update"""

    muon_hyperball: bool = False
    """MuonHyperball: every matrix keeps its Frobenius norm, and its learning rate, --muon-lr or else --lr, is the
    relative size of a step; needs --weight-decay 0"""

    muon_log_params: bool = False
    """print every parameter with the optimizer that takes it"""

    muon_share_replicated: bool = False
    """with no_shard: each matrix is orthogonalised by one rank, which broadcasts the update, instead of by all"""

    muon_metrics_interval: int = _field(0, default=METRICS_INTERVAL, metavar="K")
    """with --tensorboard-dir or --wandb-project: measure updates, orthogonality, momentum and the phases of every K-th
    step, and log them under muon/; 0 never"""

    muon_offload: Literal["none", "cpu", "nvme"] = "none"
    """where Muon's momentum lives between steps: on the device, in host memory (cpu), or in files on a local disk
    (nvme); the updates are the same to the last bit"""

    muon_offload_state: Literal["momentum", "all"] = "momentum"
    """with --muon-offload: what leaves the device: Muon's momentum, or all state of the optimizers: also Adam's moments
    and the fp32 main weights"""

    muon_offload_dir: str | None = _field(None, metavar="DIR")
    """with --muon-offload nvme: a directory on a fast disk"""

    muon_offload_fraction: float = _field(1.0, metavar="F")
    """with --muon-offload: the share of each rank's momentum that leaves the device, largest shards first; of main
    weights and of Adam's state likewise"""

    muon_offload_buffer_mb: float = _field(24.0, metavar="MIB")
    """with --muon-offload: what momentum on its way may fill on a rank, in host memory and on a GPU alike, at least
    three times the largest shard; as much again for main weights, and for Adam's state"""

    muon_ns_device: Literal["auto", "accelerator", "cpu"] = "auto"
    """with --muon-offload on a machine with a GPU: orthogonalise there, with momentum streamed through, or on the CPU,
    with only gradients and updates on their way; auto: there"""

    muon_momentum_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """how momentum is stored: bf16 takes a half and int8 a quarter of fp32's bytes, rounded stochastically;
    computed with in fp32"""


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


word_as_flags = functools.partial(word_settings, flag_of)
"""Rewords errors about settings with their flags, for Megatron's command line and scripts."""


def iteration_of(settings: Any) -> Iteration:
    """The Newton-Schulz iteration that parsed flags or a MuonOptimizerConfig ask for, whatever the device."""
    return Iteration(
        settings.muon_coefficient_type,
        settings.muon_num_ns_steps,
        settings.muon_fp32_matmul_prec,
        settings.muon_ns,
    )


def steps_for(settings: Any) -> dict[str, int]:
    """The Newton-Schulz steps of each pattern of `muon_ns_steps_for`, in their order.

    Raises:
        UserError: one is not of the form PATTERN=N.
    """
    found: dict[str, int] = {}
    for given in settings.muon_ns_steps_for:
        pattern, _, steps = given.rpartition("=")
        if not pattern or not steps.isdecimal():
            raise UserError(
                f"--muon-ns-steps-for {given!r} is not PATTERN=N; type for instance linear_fc1=4"
            )
        found.pop(pattern, None)  # of two alike the place of the last holds
        found[pattern] = int(steps)
    return found


def default_of(name: str) -> Any:
    """What the flag of a setting gives where it is left out."""
    flag = MuonSettings.__dataclass_fields__[name].metadata.get("argparse_meta", {})
    return flag.get("default", getattr(MuonSettings(), name))


def choices_of(name: str) -> tuple[str, ...]:
    """What a setting may be, where it is one of a few words."""
    kind = MuonSettings.__dataclass_fields__[name].type
    return get_args(kind) if get_origin(kind) is Literal else ()
