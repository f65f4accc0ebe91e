"""Train a click model on one rank, with lookups of later batches under compute.

    python examples/01_one_rank.py

No files and no GPU: the samples are generated. Tables start empty, and a row appears when its key
is first seen, so nobody has to say how many rows a table will have.
"""

from nestpipe import (
    DataConfig,
    Dlrm,
    DlrmConfig,
    PipelineSettings,
    SyntheticConfig,
    Trainer,
    TrainSettings,
    evaluate,
    open_source,
)

# Eight categorical features c0 ... c7 with up to 20,000 keys each, and 13 numbers per sample.
data = DataConfig(
    synthetic=SyntheticConfig(samples=30_000, test_samples=5_000, num_tables=8, num_keys=20_000)
)
features = tuple(f"c{number}" for number in range(8))
model = Dlrm(DlrmConfig(features=features, dense_features=13, dim=16))

# `nested` looks up the next batch while this one computes, and exchanges the rows of one
# micro-batch while another computes. The result is that of `serial`, bit for bit.
settings = TrainSettings(
    batch=512,
    device="cpu",
    pipeline=PipelineSettings(plan="nested", micro_batches=2),
)
trainer = Trainer(model, model.tables(), settings)

losses: list[float] = []
trainer.fit(open_source(data), on_step=lambda report: losses.append(report.loss))
print(f"{trainer.progress.step} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")

metrics = evaluate(trainer, open_source(data, "test"))
print(f"test AUC {metrics['auc']:.3f}, log loss {metrics['log_loss']:.3f}")
trainer.close()
