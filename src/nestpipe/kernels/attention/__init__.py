"""HSTU's pointwise attention: the plain reference and the kernels."""
