"""`nestpipe bench checkpoint` and `bench dashboard`: what goes on beside training costs a job.

The same trainer takes turns: some steps in one go, as many in shorter runs, which drains and
fills the pipeline, and as many with a checkpoint between these runs. Each interval with checkpoints
begins with one and ends when it is written, so nothing is left out.

Likewise for the dashboard: some steps without a record, as many with one and an open page.
"""

from __future__ import annotations

import http.client
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from nestpipe.checkpoint.folder import DENSE, read_manifest
from nestpipe.config import positive
from nestpipe.dashboard.server import Address, beside_training, listen
from nestpipe.train.background import BackgroundWriter, StoodStill
from nestpipe.train.job import Job
from nestpipe.train.loggers import recorded

MANY_EPOCHS = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCase:
    """How much is measured."""

    every: int = 100
    """Steps between checkpoints."""
    intervals: int = 3
    """Of a turn."""
    rounds: int = 3
    """Turns of either kind."""
    full: bool = False
    """Full checkpoints instead of increments."""

    def __post_init__(self) -> None:
        for name in ("every", "intervals", "rounds"):
            positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReading:
    """What came out, on rank 0."""

    without: tuple[float, ...]
    """Samples per second of each turn without checkpoints, ..."""
    cut: tuple[float, ...]
    """... with the pipeline drained and filled where one would be, ..."""
    with_them: tuple[float, ...]
    """... and with them."""
    interval_samples: int
    """Samples from one checkpoint to the next."""
    stood_still: StoodStill
    """What training waited for, for a checkpoint in the mean."""
    bytes_written: int
    """By all ranks, a checkpoint in the mean."""
    bytes_of_rows: int
    """Of those, files of rows."""
    bytes_touched: int
    """Keys, weights and state of the rows touched since the one before, in the mean."""

    @property
    def cost(self) -> float:
        """The share of throughput that is lost, the median over neighbouring turns."""
        pairs = zip(self.without, self.with_them, strict=True)
        return median(1 - after / before for before, after in pairs)

    @property
    def drained_s(self) -> float:
        """Seconds that an interval takes longer where the pipeline is drained and filled."""
        return self._longer_s(self.cut, self.without)

    @property
    def beside_s(self) -> float:
        """Seconds that training takes longer beside the thread that writes."""
        return self._longer_s(self.with_them, self.cut) - self.stood_still.seconds

    def _longer_s(self, slow: Sequence[float], fast: Sequence[float]) -> float:
        """Of an interval, in the median over neighbouring turns."""
        longer = [1 / one - 1 / other for one, other in zip(slow, fast, strict=True)]
        return self.interval_samples * median(longer)

    @property
    def bytes_ratio(self) -> float:
        """Bytes written over bytes touched."""
        return self.bytes_written / max(1, self.bytes_touched)

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "cost": self.cost,
            "waited_s": self.stood_still.seconds,
            "drained_s": self.drained_s,
            "beside_s": self.beside_s,
            "bytes_ratio": self.bytes_ratio,
        }


def measure_checkpoints(
    job: Job,
    folder: Path,
    case: CheckpointCase,
    progress: Callable[[], None] = lambda: None,
    so_far: Callable[[CheckpointReading], None] = lambda reading: None,
) -> CheckpointReading:
    """Take turns; all ranks call it, with one empty folder. `so_far` is called after each pair."""
    turns = _Turns(job, folder, case)
    turns.train(case.every)  # what is done once is done now
    for _ in range(case.rounds):
        for turn in (turns.without, turns.cut, turns.with_them):
            turn()
            progress()
        so_far(turns.reading())
    return turns.reading()


class _Turns:
    """Steps of one trainer, timed."""

    def __init__(self, job: Job, folder: Path, case: CheckpointCase) -> None:
        self._job, self._folder, self._case = job, folder, case
        self._speeds: dict[str, list[float]] = {"without": [], "cut": [], "with_them": []}
        self._stood_still = StoodStill()
        self.checkpoints = self.bytes_written = self.bytes_of_rows = self.bytes_touched = 0

    def train(self, steps: int) -> None:
        trainer = self._job.trainer
        trainer.fit(self._job.train, steps=steps, epochs=MANY_EPOCHS)

    def without(self) -> None:
        """A turn without checkpoints."""
        self._job.trainer.track_rows(on=False)
        with self._timed("without"):
            self.train(self._case.intervals * self._case.every)

    def cut(self) -> None:
        """The same, drained where there would be checkpoints."""
        with self._timed("cut"):
            for _ in range(self._case.intervals):
                self.train(self._case.every)

    def with_them(self) -> None:
        """The same with a checkpoint at the beginning of each interval."""
        trainer, on_device = self._job.trainer, self._job.config.run.snapshot_on_device
        increments = 0 if self._case.full else 1e9
        writer = BackgroundWriter(self._folder, trainer.mesh, increments, on_device=on_device)
        parent = trainer.save(self._folder)
        trainer.track_rows()
        self.train(self._case.every)
        paths: list[Path] = []
        with self._timed("with_them"):
            for _ in range(self._case.intervals):
                parent = trainer.save_in_background(writer, parent)
                paths.append(parent)
                self.train(self._case.every)
            writer.wait()
        self.bytes_touched += writer.bytes_touched
        self._stood_still += writer.stood_still
        self._look_at(paths)

    def reading(self) -> CheckpointReading:
        """The figures so far."""
        written = max(1, self.checkpoints)
        speeds = {name: tuple(of) for name, of in self._speeds.items()}
        return CheckpointReading(
            **speeds,
            interval_samples=self._case.every * self._job.trainer.settings.batch,
            stood_still=self._stood_still / written,
            bytes_written=self.bytes_written // written,
            bytes_of_rows=self.bytes_of_rows // written,
            bytes_touched=self.bytes_touched // written,
        )

    @contextmanager
    def _timed(self, kind: str) -> Generator[None]:
        """Keep the samples per second of a turn, from when all ranks begin until all are done."""
        trainer = self._job.trainer
        trainer.comm.barrier()
        began = time.perf_counter()
        yield
        trainer.comm.barrier()
        samples = self._case.intervals * self._case.every * trainer.settings.batch
        self._speeds[kind].append(samples / (time.perf_counter() - began))

    def _look_at(self, paths: list[Path]) -> None:
        """Count what was written, and make room for the next turn."""
        comm = self._job.trainer.comm
        for path in paths:
            files = read_manifest(path).files
            self.checkpoints += 1
            self.bytes_written += sum(entry.num_bytes for entry in files.values())
            self.bytes_of_rows += sum(e.num_bytes for n, e in files.items() if n != DENSE)
        comm.barrier()
        if comm.rank == 0:
            for path in self._folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
        comm.barrier()


# The dashboard: a record, a server beside training, and a page that asks for news.


ASK_S = 2.0
"""How often an open page asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DashboardCase:
    """How much is measured."""

    steps: int = 200
    """Of a turn."""
    rounds: int = 7
    """Turns of either kind, in pairs; every other pair begins with the dashboard."""

    def __post_init__(self) -> None:
        positive("steps", self.steps)
        positive("rounds", self.rounds)


@dataclass(frozen=True, slots=True)
class DashboardReading:
    """What came out, on rank 0."""

    without: tuple[float, ...]
    """Samples per second of each turn without the dashboard ..."""
    with_it: tuple[float, ...]
    """... and with it."""
    recorder_share: float
    """Processor time of rank 0's recorder over the time of the turns with it: what it takes of one
    core, which a busy machine does not blur."""
    server_share: float
    """The same of the server, from its first answer on."""
    answers: int
    """Times that the page was given news."""

    @property
    def costs(self) -> tuple[float, ...]:
        """The share of throughput that each pair of turns lost."""
        pairs = zip(self.without, self.with_it, strict=True)
        return tuple(1 - after / before for before, after in pairs)

    @property
    def cost(self) -> float:
        """The median over pairs."""
        return median(self.costs)

    @property
    def middle_half(self) -> tuple[float, float]:
        """Between which values the middle half of the pairs lies."""
        if len(self.costs) < 2:
            return self.cost, self.cost
        low, _, high = quantiles(self.costs, n=4, method="inclusive")
        return low, high

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "cost": self.cost, "middle_half": self.middle_half}


def measure_dashboard(
    job: Job,
    folder: Path,
    case: DashboardCase,
    progress: Callable[[], None] = lambda: None,
    so_far: Callable[[DashboardReading], None] = lambda reading: None,
) -> DashboardReading:
    """Take turns; all ranks call it, with one empty folder. `so_far` is called after each pair."""
    page = _OpenPage()
    speeds: dict[bool, list[float]] = {False: [], True: []}
    spent: list[float] = []
    samples = case.steps * job.trainer.settings.batch

    def reading() -> DashboardReading:
        with_it_s = sum(samples / speed for speed in speeds[True])
        both = tuple(speeds[False]), tuple(speeds[True])
        return DashboardReading(
            *both, sum(spent) / with_it_s, page.spent_s / with_it_s, page.answers
        )

    _steps(job, None, case.steps)  # what is done once is done now
    for number in range(case.rounds):
        for shown in (False, True) if number % 2 == 0 else (True, False):
            own = folder / f"{number}" if shown else None
            speed, recorder_s = _steps(job, own, case.steps, page)
            speeds[shown].append(speed)
            spent.append(recorder_s)
            progress()
        so_far(reading())
    return reading()


def _steps(
    job: Job, folder: Path | None, steps: int, page: _OpenPage | None = None
) -> tuple[float, float]:
    """Samples per second of some steps, and the recorder's processor time, where there is one.

    A run starts its server once, so that start is not part of the time.
    """
    trainer = job.trainer
    with ExitStack() as held:
        watched = page if trainer.comm.rank == 0 else None
        look = None
        if folder is not None and watched is not None:
            look = held.enter_context(watched.open(folder))
        recorder = held.enter_context(recorded(trainer, folder, {"steps": None}))
        on_step = recorder.on_step if recorder is not None else lambda report: None
        if look is not None:
            look()
        trainer.comm.barrier()
        began = time.perf_counter()
        trainer.fit(job.train, steps=steps, epochs=MANY_EPOCHS, on_step=on_step)
        trainer.comm.barrier()
        speed = steps * trainer.settings.batch / (time.perf_counter() - began)
        return speed, recorder.spent_s if recorder is not None else 0.0


def _processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _OpenPage:
    """A page of rank 0 that asks for news, as a browser does."""

    def __init__(self) -> None:
        self.answers = 0
        self.spent_s = 0.0
        """Processor time of servers, from their first answer on."""

    @contextmanager
    def open(self, folder: Path) -> Generator[Callable[[], None]]:
        """Inside, the run is served; a page is open from the call of the result on."""
        listening = listen(Address(port=0))
        host, port = listening.getsockname()[:2]
        closed = threading.Event()
        asking = threading.Thread(target=self._ask, args=(host, port, closed), daemon=True)
        with beside_training(folder, listening, None) as server:
            before_s = 0.0

            def look() -> None:
                nonlocal before_s
                self._ask_once(host, port)
                before_s = _processor_s(server.pid)
                asking.start()

            try:
                yield look
                self.spent_s += _processor_s(server.pid) - before_s
            finally:
                closed.set()
                if asking.is_alive():
                    asking.join()
            self._ask_once(host, port)  # it reads how the run ended, and the server may go

    def _ask(self, host: str, port: int, closed: threading.Event) -> None:
        while not closed.wait(ASK_S):
            self._ask_once(host, port)

    def _ask_once(self, host: str, port: int) -> None:
        connection = http.client.HTTPConnection(host, port, timeout=60)
        try:
            connection.request("GET", "/v1/run")
            self.answers += connection.getresponse().status == http.HTTPStatus.OK
        finally:
            connection.close()
