"""Commands that convert and use checkpoints: export, import, generate, eval."""
