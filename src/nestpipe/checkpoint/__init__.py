"""Checkpoints on disk: what is in one, whether it is whole, which to use and which to keep."""
