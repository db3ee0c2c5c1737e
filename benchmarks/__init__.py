"""Optimizer steps measured against other implementations and against the machine's own rates. Not in the wheel."""
