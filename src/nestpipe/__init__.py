"""NestPipe: exact, nested pipelining for recommendation models with very large tables.

The public names are imported when they are first used, so that drawing and simulating work, and
`import nestpipe` is quick, without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestpipe.batch import Batch
    from nestpipe.comm import Communicator, LocalCommunicator, connect, launch
    from nestpipe.config import Table
    from nestpipe.data import DataConfig, ParquetConfig, Source, SyntheticConfig, open_source
    from nestpipe.jagged import Jagged, pool_rows
    from nestpipe.models import (
        Dlrm,
        DlrmConfig,
        HstuConfig,
        HstuRanker,
        HstuRetriever,
        Loss,
        RecModel,
        SampledSoftmaxConfig,
        ScoringModel,
        TaskLoss,
    )
    from nestpipe.schedule import Exchange, Merge, Retrieval
    from nestpipe.train import (
        DenseSettings,
        ParallelSettings,
        PipelineSettings,
        RowSettings,
        Trainer,
        TrainSettings,
        evaluate,
    )
    from nestpipe.train.verify import verify

__version__ = "0.1.0"

_MODULE_OF = {
    "Batch": "batch",
    "Exchange": "schedule",
    "Merge": "schedule",
    "Retrieval": "schedule",
    "Communicator": "comm",
    "DataConfig": "data",
    "DenseSettings": "train",
    "Dlrm": "models",
    "DlrmConfig": "models",
    "HstuConfig": "models",
    "HstuRanker": "models",
    "HstuRetriever": "models",
    "Jagged": "jagged",
    "LocalCommunicator": "comm",
    "Loss": "models",
    "TaskLoss": "models",
    "ParallelSettings": "train",
    "ParquetConfig": "data",
    "PipelineSettings": "train",
    "RecModel": "models",
    "RowSettings": "train",
    "SampledSoftmaxConfig": "models",
    "ScoringModel": "models",
    "Source": "data",
    "SyntheticConfig": "data",
    "Table": "config",
    "TrainSettings": "train",
    "Trainer": "train",
    "connect": "comm",
    "evaluate": "train",
    "launch": "comm",
    "open_source": "data",
    "pool_rows": "jagged",
    "verify": "train.verify",
}

__all__ = [
    "Batch",
    "Communicator",
    "DataConfig",
    "DenseSettings",
    "Dlrm",
    "DlrmConfig",
    "Exchange",
    "HstuConfig",
    "HstuRanker",
    "HstuRetriever",
    "Jagged",
    "LocalCommunicator",
    "Loss",
    "Merge",
    "ParallelSettings",
    "ParquetConfig",
    "PipelineSettings",
    "RecModel",
    "Retrieval",
    "RowSettings",
    "SampledSoftmaxConfig",
    "ScoringModel",
    "Source",
    "SyntheticConfig",
    "Table",
    "TaskLoss",
    "TrainSettings",
    "Trainer",
    "__version__",
    "connect",
    "evaluate",
    "launch",
    "open_source",
    "pool_rows",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'nestpipe' has no attribute {name!r}")
    return getattr(import_module(f"nestpipe.{_MODULE_OF[name]}"), name)
