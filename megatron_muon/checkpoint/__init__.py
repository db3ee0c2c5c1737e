"""Checkpoints in Megatron's fsdp_dtensor format, without Megatron: their folders and content."""
