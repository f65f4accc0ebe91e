"""A small training run on any device and any number of ranks; rank 0 writes what came out.

python program.py OUT DEVICE STEPS [key=value ...]
"""

import os
import sys

import torch

from nestpipe.config import build, override
from nestpipe.train.job import JobConfig, prepare
from nestpipe.train.loop import communicator

SETTINGS = (
    "run.batch=256",
    "data.synthetic.samples=12800",
    "data.synthetic.num_keys=2000",
    "data.synthetic.num_tables=6",
    "data.synthetic.keys_per_sample=[0, 4]",
    "model.dim=16",
)


def main() -> None:
    out, device, steps, *more = sys.argv[1:]
    # Ranks that share one GPU must look like different hosts to NCCL.
    os.environ.setdefault("NCCL_HOSTID", f"host{os.environ.get('RANK', 0)}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    config = build(JobConfig, override({}, [*SETTINGS, f"run.device={device}", *more]))
    comm = communicator(config)
    job = prepare(config, comm, None)
    losses: list[float] = []
    job.trainer.fit(job.train, steps=int(steps), on_step=lambda report: losses.append(report.loss))
    keys = torch.arange(2000)
    result = {f"rows.{name}": job.trainer.rows_of(name, keys) for name in job.trainer.table_names}
    result |= {f"dense.{k}": v.cpu() for k, v in job.trainer.model.state_dict().items()}
    if comm.rank == 0:
        torch.save({"losses": torch.tensor(losses, dtype=torch.float64), **result}, out)
    comm.close()


if __name__ == "__main__":
    main()
