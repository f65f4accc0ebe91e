"""From a config to a source."""

from __future__ import annotations

from typing import get_args

from nestpipe.data.config import DataConfig, Split
from nestpipe.data.source import Source
from nestpipe.errors import ConfigError


def open_source(config: DataConfig, split: Split = "train") -> Source:
    """The samples of one split. The train split is shuffled, others keep the files' order."""
    if split not in get_args(Split):
        raise ConfigError(f"there is no split {split!r}; use {', '.join(get_args(Split))}")
    if config.kind == "synthetic":
        from nestpipe.data.synthetic import open_synthetic

        return open_synthetic(config, split)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"reading {config.kind} files needs pyarrow; run pip install 'nestpipe[train]'"
        ) from None
    return _open_files(config, split)


def _open_files(config: DataConfig, split: Split) -> Source:
    """Readers are imported when used: the made-up world does without Arrow."""
    if config.kind == "parquet":
        from nestpipe.data.readers.parquet import open_parquet

        return open_parquet(config, split)
    if config.kind == "movielens":
        from nestpipe.data.readers.movielens import open_movielens

        return open_movielens(config, split)
    if config.kind == "kuairand":
        from nestpipe.data.readers.kuairand import open_kuairand

        return open_kuairand(config, split)
    from nestpipe.data.readers.criteo import open_criteo

    return open_criteo(config, split)
