"""Keys and rows in device memory: an index, routing, segments, sums; each with a plain twin."""
