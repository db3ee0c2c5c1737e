"""Checkpoints in Megatron's fsdp_dtensor format: which are complete, and what they hold.

`files` looks at folders and file sizes, `checksums` at the bytes of files, `content` at the entries of one checkpoint,
which `unpickling` reads without running what they name. Writing and loading is torch's distributed checkpointing,
called by megatron-core; `megatron/checkpoint/` uses this package around it.
"""
