"""What happens to stacks of whole blocks on their owners."""
