"""Train on two ranks: every rank runs this file, and the tables are sharded over them.

    torchrun --nproc-per-node 2 examples/04_two_ranks.py

One rank or many is the same code: `connect` joins the group that torchrun describes, and the
communicator does the rest. The batch is global, so more ranks make each rank's part smaller and
change nothing but the order of floating-point sums.
"""

import torch

from nestpipe import (
    DataConfig,
    Dlrm,
    DlrmConfig,
    PipelineSettings,
    SyntheticConfig,
    Trainer,
    TrainSettings,
    connect,
    evaluate,
    open_source,
)

comm = connect("gloo")  # NCCL where ranks have a GPU each
data = DataConfig(
    synthetic=SyntheticConfig(samples=20_000, test_samples=4_000, num_tables=6, num_keys=10_000)
)
features = tuple(f"c{number}" for number in range(6))

torch.manual_seed(comm.rank)  # rank 0's weights win: the trainer shares them before the first step
model = Dlrm(DlrmConfig(features=features, dense_features=13, dim=16))
settings = TrainSettings(
    batch=512,
    device="cpu",
    pipeline=PipelineSettings(plan="nested", micro_batches=2),
)
trainer = Trainer(model, model.tables(), settings, comm)
trainer.fit(open_source(data))

# Every rank evaluates its part of the test split, and every rank gets the same figures.
metrics = evaluate(trainer, open_source(data, "test"))
if comm.rank == 0:
    print(f"{comm.size} ranks, {trainer.progress.step} steps, test AUC {metrics['auc']:.3f}")
    print(f"rank 0 sent {comm.bytes_sent / 1e6:.1f} MB")
trainer.close()
comm.close()
