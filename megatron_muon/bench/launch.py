"""What `bench step` measures, as plain data that travels to the ranks. Needs neither torch nor megatron-core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSpec:
    """What `bench step` measures; travels to the ranks as JSON.

    Attributes:
        ranks: processes, one for each shard.
        hidden_size: H; a block holds qkv `(3H, H)`, proj `(H, H)`, fc1 `(4H, H)` and fc2 `(H, 4H)`.
        num_layers: blocks.
        ns_dtype: "bf16" or "fp32", what Newton-Schulz's products run in.
        methods: of "owner", "allgather", "allgather-tuned", "adam".
        peers: other implementations, of "deepspeed", "deepspeed-gram", "muon-fsdp2".
        repeat: timed steps of each method.
        warmup: steps of each method before these.
        buffer_mb: MiB for the owner scheme's waves.
        device: "auto", "cpu" or "cuda".
        offload: of "none", "cpu", "nvme": the owner scheme once more with momentum there.
        offload_dir: the directory for "nvme".
        offload_buffer_mb: MiB that momentum on its way may fill.
        momentum_dtype: "fp32", "bf16" or "int8", how momentum is stored with `offload`.
    """

    ranks: int
    hidden_size: int
    num_layers: int
    ns_dtype: str = "bf16"
    methods: tuple[str, ...] = ("owner", "allgather", "allgather-tuned", "adam")
    peers: tuple[str, ...] = ()
    repeat: int = 5
    warmup: int = 1
    buffer_mb: float = 256.0
    device: str = "auto"
    offload: tuple[str, ...] = ()
    offload_dir: str | None = None
    offload_buffer_mb: float = 24.0
    momentum_dtype: str = "fp32"
