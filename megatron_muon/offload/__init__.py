"""Where state lives between steps, and as which bytes. Nothing here knows Megatron or collectives of a step."""
