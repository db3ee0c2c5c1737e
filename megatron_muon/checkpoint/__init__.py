"""Checkpoints in Megatron's fsdp_dtensor format: which are complete, and what they hold.

Writing and loading is torch's distributed checkpointing, which `megatron/checkpoint/` patches.
"""
