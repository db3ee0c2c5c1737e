"""What this package changes in megatron-core and Megatron-FSDP, one function for each change."""
