"""Muon on sharded matrices, with torch alone: no Megatron, no command line, no files."""
