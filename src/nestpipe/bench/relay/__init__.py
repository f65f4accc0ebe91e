"""`nestpipe bench relay`: relay beside inline ranking, over HTTP."""
