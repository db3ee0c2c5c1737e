"""Settings of pretrain_gpt.py: flags, experiment files, and checks before anything starts."""
