"""`nestpipe bench hstu`: attention alone, the encoder, and a whole step of a sequence model."""
