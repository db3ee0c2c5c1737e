"""Storage of state between steps, without Megatron and without the collectives of a step."""
