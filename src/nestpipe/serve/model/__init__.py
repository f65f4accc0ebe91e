"""The trained ranker as serving calls it: weights of a checkpoint, prefix and rank."""
