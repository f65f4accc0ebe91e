"""Models in two halves: which keys they want, and what they do with the rows."""

from nestpipe.models.dlrm import Dlrm, DlrmConfig, LogisticRegression
from nestpipe.models.hstu import Hstu
from nestpipe.models.hstu_models import HstuRanker, HstuRetriever, SampledSoftmaxConfig
from nestpipe.models.metrics import Auc, LogLoss, TargetRank, ranks_of_targets
from nestpipe.models.protocol import Loss, RecModel, ScoringModel, TaskLoss
from nestpipe.models.sequence import EncoderOptions, HstuConfig, Prefix, PrefixParts, Tokens

__all__ = [
    "Auc",
    "Dlrm",
    "DlrmConfig",
    "EncoderOptions",
    "Hstu",
    "HstuConfig",
    "HstuRanker",
    "HstuRetriever",
    "LogLoss",
    "LogisticRegression",
    "Loss",
    "Prefix",
    "PrefixParts",
    "RecModel",
    "SampledSoftmaxConfig",
    "ScoringModel",
    "TargetRank",
    "TaskLoss",
    "Tokens",
    "ranks_of_targets",
]
