"""Train on your own Parquet files: say which column is what, and the rest follows.

    python examples/03_your_parquet.py

Keys are whole numbers, strings, or lists of either. Strings are hashed to 64 bits, so no vocabulary
has to be built. Files are read piece by piece and never have to fit into memory.
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe import (
    DataConfig,
    Dlrm,
    DlrmConfig,
    ParquetConfig,
    Trainer,
    TrainSettings,
    evaluate,
    open_source,
)


def write_clicks(file: Path, rows: int, seed: int) -> None:
    """Stands in for your log: each user and each word has an effect, and a low price helps."""
    effects = np.random.default_rng(0)
    of_user, of_word = effects.normal(0, 1, 200), effects.normal(0, 1, 100)
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 200, rows)
    words = [rng.integers(0, 100, rng.integers(1, 4)) for _ in range(rows)]
    price = rng.normal(0, 1, rows)
    logit = of_user[user] + np.array([of_word[some].sum() for some in words]) - price
    columns = {
        "user": pa.array([f"user-{number}" for number in user]),
        "words": pa.array([some.tolist() for some in words]),
        "price": pa.array(price),
        "clicked": pa.array((rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int64)),
    }
    pq.write_table(pa.table(columns), file)


with tempfile.TemporaryDirectory() as folder:
    for part in range(2):
        write_clicks(Path(folder) / f"part-{part}.parquet", 15_000, seed=1 + part)

    # Of ten neighbouring rows the last is for test, the one before for validation.
    data = DataConfig(
        kind="parquet",
        path=folder,
        test_every=10,
        parquet=ParquetConfig(sparse=("user", "words"), dense=("price",), labels=("clicked",)),
    )
    source = open_source(data)
    print("columns:", ", ".join(f"{column.name} ({column.kind})" for column in source.columns))

    model = Dlrm(DlrmConfig(features=("user", "words"), dense_features=1, dim=8))
    trainer = Trainer(model, model.tables(), TrainSettings(batch=256, device="cpu"))
    trainer.fit(source, epochs=2)
    metrics = evaluate(trainer, open_source(data, "test"))
    print(f"test AUC {metrics['auc']:.3f}, log loss {metrics['log_loss']:.3f}")
    print(f"always predicting the mean label: {metrics['baseline_log_loss']:.3f}")
    trainer.close()
