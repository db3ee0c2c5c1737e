"""Checkpoints in Megatron's fsdp_dtensor format: which are complete, and what they hold.

`files` looks at folders and file sizes, `content` at the entries of one checkpoint, `report` sums up both. Writing and
loading is torch's distributed checkpointing, called by megatron-core; `megatron/checkpoint/saving.py` and
`megatron/checkpoint/loading.py` use this package around it.
"""
