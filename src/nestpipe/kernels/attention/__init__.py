"""HSTU's pointwise attention: the plain reference, and the kernels with and without gradients."""
