"""HSTU's attention over jagged sequences with gradients, and no score in memory."""

from nestpipe.kernels.fused_attention.function import fused_attention
from nestpipe.kernels.fused_attention.plain import plain_attention

__all__ = ["fused_attention", "plain_attention"]
