"""One training run: settling its flags, launching it, its folder and its summary."""
