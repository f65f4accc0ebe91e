"""A batch of samples, as data readers make it and models take it."""

from nestpipe.batch.batch import Batch

__all__ = ["Batch"]
