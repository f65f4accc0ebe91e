"""Which samples a batch holds, and how it is split into micro-batches."""
