"""Shard tables in groups of ranks and replicate them across groups (2D sparse parallelism).

    python examples/07_groups.py

Four ranks form two groups of two. Keys, rows and row gradients stay inside a group; dense gradients
are summed over all ranks. `exact` also sums row gradients over the groups in every batch, so the
result is that of one group but for the order of sums. `averaged` merges replicas now and then.
"""

import sys

import torch

from nestpipe import (
    DataConfig,
    Dlrm,
    DlrmConfig,
    Merge,
    ParallelSettings,
    SyntheticConfig,
    Trainer,
    TrainSettings,
    connect,
    evaluate,
    launch,
    open_source,
)

FORMS = {
    "one group": ParallelSettings(),
    "two groups, exact": ParallelSettings(groups=2, merge=Merge.EXACT),
    "two groups, averaged every 4": ParallelSettings(groups=2, merge=Merge.AVERAGED, merge_every=4),
}


def train() -> None:
    """What each rank runs."""
    comm = connect("gloo")
    data = DataConfig(
        synthetic=SyntheticConfig(samples=6_000, test_samples=2_000, num_tables=4, num_keys=2_000)
    )
    for name, parallel in FORMS.items():
        torch.manual_seed(0)
        features = tuple(f"c{number}" for number in range(4))
        model = Dlrm(DlrmConfig(features=features, dense_features=13, dim=8))
        settings = TrainSettings(batch=256, device="cpu", parallel=parallel)
        trainer = Trainer(model, model.tables(), settings, comm)
        trainer.fit(open_source(data))
        metrics = evaluate(trainer, open_source(data, "test"))
        if comm.rank == 0:
            print(f"{name}: test AUC {metrics['auc']:.5f}")
        trainer.close()
    comm.close()


if __name__ == "__main__":
    # As `torchrun --nproc-per-node 4` would start them.
    sys.exit(launch(train, ranks=4))
