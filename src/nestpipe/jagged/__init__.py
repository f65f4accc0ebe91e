"""Lists of different lengths, one per sample, in two flat tensors."""

from nestpipe.jagged.jagged import Jagged

__all__ = ["Jagged"]
