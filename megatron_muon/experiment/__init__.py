"""Experiments around training: what a run did, and what to try next."""
