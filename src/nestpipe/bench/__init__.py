"""Measured comparisons: our trainer beside a peer, in the same processes and the same run."""
