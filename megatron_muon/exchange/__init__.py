"""Carries rows to where matrices are orthogonalised, and the update's rows back: collectives, streams, buffers."""

from megatron_muon.exchange.allgather import AllGatherExchange

__all__ = ["AllGatherExchange"]
