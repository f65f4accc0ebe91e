"""The trained ranker as serving calls it."""
