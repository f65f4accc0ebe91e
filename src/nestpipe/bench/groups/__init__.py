"""`nestpipe bench groups`: one dimension beside groups of ranks."""
