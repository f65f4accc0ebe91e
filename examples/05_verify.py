"""Prove on your own model that a plan changes no bit, and see a stale plan caught.

    python examples/05_verify.py

`verify` trains twice from the same start, once with `serial` and once with the plan. It compares
every row, optimizer state, dense weight, counter and loss, bit for bit.
`nestpipe verify config.toml --plan nested` is the same for a config.
"""

import torch

from nestpipe import (
    DataConfig,
    Dlrm,
    DlrmConfig,
    PipelineSettings,
    Source,
    SyntheticConfig,
    Trainer,
    TrainSettings,
    open_source,
    verify,
)

# Few keys, so that neighbouring batches share rows: there staleness shows.
data = DataConfig(synthetic=SyntheticConfig(samples=5_000, num_tables=4, num_keys=500))


def start(pipeline: PipelineSettings) -> tuple[Trainer, Source]:
    """A fresh trainer and its data: the same weights and the same order every time."""
    torch.manual_seed(0)
    features = tuple(f"c{number}" for number in range(4))
    model = Dlrm(DlrmConfig(features=features, dense_features=13, dim=8))
    settings = TrainSettings(batch=128, device="cpu", pipeline=pipeline)
    return Trainer(model, model.tables(), settings), open_source(data)


for plan in ("nested", "stale_prefetch"):
    verdict = verify(start, PipelineSettings(plan=plan, micro_batches=2), steps=10)
    print(
        f"{plan}: {'identical' if verdict.identical else 'different'} after {verdict.steps} steps"
    )
    print(f"  {verdict.rows_compared} rows compared, {verdict.rows_different} differ")
    if verdict.first_difference:
        print(f"  first: {verdict.first_difference}")
