"""Carries rows to where matrices are orthogonalised, and the update's rows back: collectives, streams, buffers."""

from megatron_muon.core.exchange.owner import OwnerExchange
from megatron_muon.core.exchange.repeated import AllGatherExchange, LocalExchange
from megatron_muon.core.exchange.shared import SharedExchange

__all__ = ["AllGatherExchange", "LocalExchange", "OwnerExchange", "SharedExchange"]
