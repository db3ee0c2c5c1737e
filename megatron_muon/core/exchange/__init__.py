"""Carries rows to where matrices are orthogonalised, and the update's rows back: collectives, streams, buffers."""

from megatron_muon.core.exchange.allgather import AllGatherExchange
from megatron_muon.core.exchange.local import LocalExchange
from megatron_muon.core.exchange.owner import OwnerExchange
from megatron_muon.core.exchange.shared import SharedExchange

__all__ = ["AllGatherExchange", "LocalExchange", "OwnerExchange", "SharedExchange"]
