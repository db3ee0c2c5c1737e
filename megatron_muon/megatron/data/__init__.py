"""Real text into Megatron's indexed data: find documents, tokenize them, write `PREFIX.bin` and `PREFIX.idx`.

Importing this package is cheap: torch and megatron-core are imported only when something is written. It does
not read data for training; megatron-core's own datasets do that.
"""

from megatron_muon.megatron.data.corpus import STDLIB, prepare
from megatron_muon.megatron.data.sources import Settings
from megatron_muon.megatron.data.tokenizers import TokenizerSpec

__all__ = ["STDLIB", "Settings", "TokenizerSpec", "prepare"]
