"""Muon on sharded matrices, without Megatron, command line or files; `docs/design.md` has the order to read it in."""
