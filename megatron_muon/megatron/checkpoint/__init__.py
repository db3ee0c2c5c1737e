"""Saving and loading through Megatron's fsdp_dtensor format."""
