"""Where samples come from: files of several formats, or a made-up world that needs none."""

from nestpipe.data.config import (
    CriteoConfig,
    DataConfig,
    KuaiRandConfig,
    MovieLensConfig,
    ParquetConfig,
    Split,
    StreamConfig,
    SyntheticConfig,
)
from nestpipe.data.sequences import Catalogue, Ranking, RankingOptions
from nestpipe.data.source import (
    DENSE,
    HISTORY,
    LABEL,
    MISSING,
    TARGET,
    TIME,
    TIMESTAMPS,
    Column,
    PinsBatches,
    Source,
    concat,
    data_digest,
    open_source,
)
from nestpipe.data.streaming import LogRange, PartitionedLog, Polled, StreamingSource
from nestpipe.data.text import Broken

__all__ = [
    "DENSE",
    "HISTORY",
    "LABEL",
    "MISSING",
    "TARGET",
    "TIME",
    "TIMESTAMPS",
    "Broken",
    "Catalogue",
    "Column",
    "CriteoConfig",
    "DataConfig",
    "KuaiRandConfig",
    "LogRange",
    "MovieLensConfig",
    "ParquetConfig",
    "PartitionedLog",
    "PinsBatches",
    "Polled",
    "Ranking",
    "RankingOptions",
    "Source",
    "Split",
    "StreamConfig",
    "StreamingSource",
    "SyntheticConfig",
    "concat",
    "data_digest",
    "open_source",
]
