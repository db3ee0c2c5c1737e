"""Benchmarks of optimizer steps, also against other implementations. Not in the wheel."""
