from megatron_muon.cpu.patching import Patches, versions

__all__ = ["Patches", "versions"]
