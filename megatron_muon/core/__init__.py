"""Muon on sharded matrices, without Megatron, command line or files.

To be read in the order of a step: `optimizer`, `exchange`, `orthogonalize`, `newton_schulz`; and before the first step:
`layout`, `cost`, `plan`, `route`, `copies`, `arena`, `build`.
"""
