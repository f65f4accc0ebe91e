"""`nestpipe bench train`: the trainer beside TorchRec on CPU ranks."""
