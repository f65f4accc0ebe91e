"""`nestpipe bench pipeline`: every plan on the same work, measured and predicted."""
