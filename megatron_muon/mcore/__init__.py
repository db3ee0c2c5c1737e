"""Every contact with megatron-core's internals: the version guard, flags, patches, parameters and checkpoints.

Nothing is patched on import. Each patch is one function that is called explicitly, names the megatron-core versions
that need it, and fails loudly where what it patches has changed shape.
"""
