"""Muon's settings as fields; megatron-core's `ArgumentGroupFactory` makes flags of them.

Name, choices, default and help (the docstring) are defined here alone. The factory reads types at
run time, so annotations are not strings; neither torch nor megatron-core is imported.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from megatron_muon.core.cost import Iteration
from megatron_muon.errors import UserError, word_settings

TP_MODE = "duplicated"
"""Default of --muon-tp-mode: updates independent of tensor parallelism; 0.19 has blockwise."""

AUTO, OURS, UPSTREAM = "auto", "ours", "upstream"
"""Values of --muon-matrices; the last follows megatron-core's own Muon."""

METRICS_INTERVAL = 10
"""Default of --muon-metrics-interval; in custom scripts it is 0."""


def _field(default: Any, /, **flag: Any) -> Any:
    """A field with further arguments of its flag."""
    return field(default=default, metadata={"argparse_meta": flag})


@dataclass
class RunSettings:
    """For every run of pretrain_gpt.py, with Muon and without."""

    config: str | None = _field(None, metavar="FILE.yaml")
    """experiment file (ENV_VARS, MODEL_ARGS); flags on the command line override it"""

    resume: bool = False
    """resume from the latest checkpoint in --save, if any"""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """device to train on; auto: CUDA if available"""


@dataclass
class LoadSettings:
    """For loading a checkpoint under Megatron-FSDP."""

    muon_allow_missing_state: bool = False
    """with --load: optimizer state that is missing from the checkpoint starts at zero, with a
    warning"""

    verify_checkpoint: bool = _field(True, arg_names=["--no-verify-checkpoint"])
    """with --load: skip verifying checksums, which reads each of the checkpoint's files once"""


@dataclass
class MuonSettings:
    """Muon under Megatron-FSDP."""

    matrix_optimizer: str | None = _field(None, metavar="NAME")
    """optimizer for matrices that --optimizer has no choice for, with --optimizer adam: its name in
    emerging-optimizers (rekls, polargrad, mop, psgd_pro), or module:Class"""

    matrix_optimizer_args: list[str] = field(
        default_factory=list, metadata={"argparse_meta": {"metavar": "KEY=VALUE"}}
    )
    """arguments of --optimizer soap or of --matrix-optimizer: use_kl_shampoo=False eps=1e-8"""

    muon_exchange: Literal["owner", "allgather"] = "owner"
    """how sharded matrices are assembled: owner sends each matrix's rows to one rank, which
    orthogonalizes it; allgather, the reference, makes every rank orthogonalize all matrices"""

    muon_exchange_buffer_mb: float | None = _field(None, metavar="MIB")
    """per-rank memory budget of Muon's step, beyond weights, gradients and state: send and receive
    buffers, matrices being orthogonalized, temporaries; default 248, or more if the largest matrix
    needs it"""

    muon_free_buffers: bool = False
    """free the step's buffers after each step, so that forward and backward can use the memory,
    and allocate them again in the next step"""

    muon_exchange_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """dtype of exchanged rows; auto: bf16 only if Newton-Schulz starts from bf16 anyway"""

    muon_team_size: Literal["auto", "1", "2", "4", "8"] = "auto"
    """with the owner exchange: number of ranks in a node that jointly own a matrix, one part each;
    auto: teams only for matrices that exceed a rank's share of the work, if they save time"""

    muon_ns: Literal["auto", "standard", "gram"] = "auto"
    """the Newton-Schulz iteration; auto: Gram iteration if it needs fewer operations and is
    proven for the coefficients and step count"""

    muon_ns_steps_for: list[str] = field(
        default_factory=list, metadata={"argparse_meta": {"metavar": "PATTERN=N"}}
    )
    """use N Newton-Schulz steps instead of --muon-num-ns-steps for matrices whose names match the
    pattern, as for --muon-exclude: linear_fc1=4 layers.0.*qkv=8; the last matching pattern wins"""

    muon_lr: float | None = None
    """peak learning rate of Muon's parameters; default --lr"""

    muon_min_lr: float | None = None
    """minimum learning rate of Muon's parameters; default --min-lr"""

    muon_split_gated_mlp: bool = False
    """orthogonalize the gate and up projections of a gated MLP (--swiglu) as two matrices, not as
    one"""

    muon_split_heads: bool = False
    """orthogonalize every attention head separately: each query, key and value head is a block of
    rows. The output projection, whose columns belong to heads, stays one matrix"""

    muon_exclude: list[str] = field(
        default_factory=list, metadata={"argparse_meta": {"metavar": "PATTERN"}}
    )
    """use the scalar optimizer (Adam) for parameters whose names, as printed by --muon-log-params,
    match a shell-style pattern by whole components: router, layers.1 (not layer 10), layers.0.*fc1;
    a pattern that matches no matrix is an error"""

    muon_matrices: Literal["auto", "ours", "upstream"] = "auto"
    """which weights Muon takes, and their blocks: ours (docs/parameters.md); upstream, as
    megatron-core's own Muon does; auto: as the run did that wrote the checkpoint in --load, or
    ours"""

    adaptive_muon_moment2_method: Literal["adamuon", "normuon"] = "adamuon"
    """with --optimizer adaptive_muon: second moment of the orthogonalized update per element
    (adamuon), or per row, or per column of a wide matrix (normuon)"""

    adaptive_muon_beta2: float = 0.95
    """with --optimizer adaptive_muon: decay rate of the second moment's moving average"""

    adaptive_muon_eps: float = 1e-8
    """with --optimizer adaptive_muon: added to the denominator for numerical stability"""

    muon_cautious_weight_decay: bool = False
    """decay only elements where weight and update have the same sign"""

    muon_hyperball: bool = False
    """MuonHyperball: every matrix keeps its Frobenius norm, and its learning rate, --muon-lr or
    else --lr, is the relative size of a step; needs --weight-decay 0"""

    muon_log_params: bool = False
    """print every parameter with its optimizer"""

    muon_share_replicated: bool = False
    """with no_shard: only one rank orthogonalizes each matrix, and broadcasts the update"""

    muon_metrics_interval: int = _field(0, default=METRICS_INTERVAL, metavar="K")
    """with --tensorboard-dir or --wandb-project: measure updates, orthogonality, momentum and
    phases of every K-th step, and log them under muon/; 0: never"""

    muon_audit_interval: int = _field(1000, metavar="K")
    """compare the first step after a start or load, and every K-th, with a step of one whole matrix
    by emerging-optimizers, each time another; 0: never"""

    muon_audit_action: Literal["warn", "stop"] = "warn"
    """after an audit that found a fault: go on with a warning, or save a checkpoint and end"""

    muon_offload: Literal["none", "cpu", "nvme"] = "none"
    """where to keep Muon's momentum between steps: on the device, in host memory (cpu), or in files
    on a local disk (nvme); updates are bit-identical"""

    muon_offload_state: Literal["momentum", "all"] = "momentum"
    """with --muon-offload: state to offload: Muon's momentum, or all, including Adam's moments and
    the fp32 main weights"""

    muon_offload_dir: str | None = _field(None, metavar="DIR")
    """with --muon-offload nvme: a directory on a fast disk"""

    muon_offload_fraction: float = _field(1.0, metavar="F")
    """with --muon-offload: the fraction of each rank's momentum that is offloaded, largest shards
    first; the same for main weights and Adam's state"""

    muon_offload_buffer_mb: float = _field(24.0, metavar="MIB")
    """with --muon-offload: staging memory per rank for momentum, both in host memory and on the
    GPU; at least three times the largest shard. Main weights and Adam's state each take the same
    amount again"""

    muon_ns_device: Literal["auto", "accelerator", "cpu"] = "auto"
    """with --muon-offload on a machine with a GPU: accelerator streams momentum to the GPU and
    orthogonalizes there; cpu orthogonalizes on the CPU and transfers only gradients and updates;
    auto: accelerator"""

    muon_momentum_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """storage dtype of momentum: bf16 takes half the bytes of fp32 and int8 a quarter, with
    stochastic rounding; arithmetic is in fp32"""


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


word_as_flags = functools.partial(word_settings, flag_of)
"""Rewords errors about settings with their flags, for Megatron's command line and scripts."""


def iteration_of(settings: Any) -> Iteration:
    """The Newton-Schulz iteration of parsed flags or a MuonOptimizerConfig, on any device."""
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
                f"--muon-ns-steps-for {given!r} is not PATTERN=N; for example, type linear_fc1=4"
            )
        found.pop(pattern, None)  # a repeated pattern takes its last place
        found[pattern] = int(steps)
    return found


def default_of(name: str) -> Any:
    """The value of a setting whose flag is left out."""
    flag = MuonSettings.__dataclass_fields__[name].metadata.get("argparse_meta", {})
    return flag.get("default", getattr(MuonSettings(), name))


def choices_of(name: str) -> tuple[str, ...]:
    """The allowed values of a setting; empty if any is."""
    kind = MuonSettings.__dataclass_fields__[name].type
    return get_args(kind) if get_origin(kind) is Literal else ()
