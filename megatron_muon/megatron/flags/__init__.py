"""What a user of pretrain_gpt.py sets: flags, experiment files, and what is refused before anything starts."""
