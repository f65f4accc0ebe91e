"""Fast inner loops, native and on the GPU, each with a plain twin."""
