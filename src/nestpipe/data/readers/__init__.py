"""Readers of files: Parquet, MovieLens, KuaiRand, Criteo."""
