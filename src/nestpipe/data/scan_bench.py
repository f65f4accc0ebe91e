"""How fast samples are read, beside a plain Arrow scan of the same columns in the same run.

Both are counted in processor time, so that a busy machine slows the two alike: samples per second
of one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import torch

from nestpipe.config import positive
from nestpipe.data import DataConfig, Source, SyntheticConfig, open_source
from nestpipe.data.synthetic import write

Form = Literal["clicks", "sequences"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCase:
    """What is read."""

    form: Form
    samples: int = 1_000_000
    ranks: int = 1
    batch: int = 4096
    """Samples of a batch and rank."""
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("samples", "ranks", "batch", "rounds"):
            positive(name, getattr(self, name))

    @property
    def world(self) -> SyntheticConfig:
        """Clicks have 26 lists of 1 to 3 keys and 13 floats, sequences 10 to 50 items."""
        if self.form == "sequences":
            return SyntheticConfig(flavour="sequence", samples=self.samples)
        return SyntheticConfig(samples=self.samples, keys_per_sample=(1, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReading:
    """What was found, in samples per second of processor time."""

    form: Form
    samples: int
    ranks: int
    shards: int
    scan: float
    """A scan of all row groups by Arrow, on one thread, that looks at nothing."""
    batches: float
    """Shuffled batches, the first rank's."""

    @property
    def ratio(self) -> float:
        """Of the scan."""
        return self.batches / self.scan


def measure_data(
    case: DataCase, folder: Path, progress: Callable[[], object] = lambda: None
) -> DataReading:
    """Write the data once, then scan it and read it in turns; the median of the rounds."""
    files = write(folder / case.form, case.world, files=1, force=True)
    progress()
    path = str(folder / case.form)
    source = open_source(DataConfig(kind="parquet", path=path, test_path=path, threads=1))
    scans: list[float] = []
    batches: list[float] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(case.rounds + 1):
            scan, mine = _per_second(lambda: _scan(files)), _per_second(lambda: _read(source, case))
            if turn:  # the first round warms up
                scans.append(scan)
                batches.append(mine)
            progress()
    finally:
        torch.set_num_threads(threads)
    return DataReading(
        form=case.form,
        samples=case.samples,
        ranks=case.ranks,
        shards=getattr(source, "shards", 1),
        scan=statistics.median(scans),
        batches=statistics.median(batches),
    )


def _per_second(work: Callable[[], int]) -> float:
    work()  # the other side has given memory back: whoever comes first pays for fresh pages
    start = time.process_time()
    samples = work()
    return samples / (time.process_time() - start)


def _scan(files: list[Path]) -> int:
    rows = 0
    for path in files:
        file = pq.ParquetFile(path)
        for piece in file.iter_batches(batch_size=65_536, use_threads=False):
            rows += piece.num_rows
    return rows


def _read(source: Source, case: DataCase) -> int:
    batches = source.batches(global_batch=case.batch * case.ranks, rank=0, ranks=case.ranks, seed=1)
    return sum(batch.size for batch in batches)
