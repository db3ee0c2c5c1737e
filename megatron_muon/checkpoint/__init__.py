"""Checkpoints in Megatron's fsdp_dtensor format, without Megatron: which are complete, and what they hold."""
