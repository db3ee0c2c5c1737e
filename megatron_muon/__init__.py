"""Muon for Megatron-FSDP: every matrix is orthogonalised whole, wherever its shards lie.

megatron_muon extends megatron-core. Megatron-FSDP (ZeRO-1/2/3) leaves each rank with a few rows of a matrix, while Muon
needs the whole momentum matrix; the package brings the two together under Megatron's own command line.

Importing this package is cheap and changes nothing: neither torch nor megatron-core is imported, nothing is patched.
"""

from megatron_muon.version import __version__

__all__ = ["__version__"]
