"""Segment sums, row updates and row copies, native and on the GPU."""
