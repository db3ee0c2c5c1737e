"""Muon on sharded matrices, without Megatron, command line or files.

To be read in the order of a step: `optimizer`, `exchange.steps`, `exchange.repeated`, `exchange.owner`, `batch`,
`orthogonalize`, `newton_schulz`; and before the first step: `layout`, `cost`, `plan`.
"""
