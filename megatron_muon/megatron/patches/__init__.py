"""Changes of megatron-core and Megatron-FSDP, one function each."""
