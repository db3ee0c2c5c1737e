"""From checkpoints to models that other software reads, and back: export, import, generate, eval."""
