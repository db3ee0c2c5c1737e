"""Carries rows to where matrices are orthogonalised, and the update's rows back: collectives, streams, buffers."""

from megatron_muon.exchange.allgather import AllGatherExchange
from megatron_muon.exchange.local import LocalExchange
from megatron_muon.exchange.neurons import NeuronMoments, NormalizedBatch
from megatron_muon.exchange.owner import OwnerExchange
from megatron_muon.exchange.shared import SharedExchange

__all__ = [
    "AllGatherExchange",
    "LocalExchange",
    "NeuronMoments",
    "NormalizedBatch",
    "OwnerExchange",
    "SharedExchange",
]
