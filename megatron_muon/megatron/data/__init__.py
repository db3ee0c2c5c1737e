"""Text as Megatron's indexed data, which megatron-core's own datasets read; cheap to import."""
