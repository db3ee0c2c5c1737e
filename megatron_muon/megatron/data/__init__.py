"""Real text into Megatron's indexed data; megatron-core's own datasets read it. Importing this package is cheap."""
