"""Records of runs that never ran, written by the real writer: for pages, servers and metrics."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any

from nestpipe.dashboard.record import FOLDER, RecordWriter, file_of

KINDS = {"retrieve": (6.0, 1.0), "rows": (2.0, 1.5), "grads": (2.5, 0.5), "prefetch": (4.0, 0.0)}
"""Hidden and exposed milliseconds of a step."""
COMPUTE_MS, IDLE_MS = 12.0, 0.5
STEP_MS = COMPUTE_MS + IDLE_MS + sum(exposed for _, exposed in KINDS.values())


def about(rank: int, ranks: int, steps: int) -> dict[str, Any]:
    return {
        "plan": "nested",
        "micro_batches": 2,
        "retrieval": "new",
        "compares": True,
        "ranks": ranks,
        "groups": 1,
        "device": "cpu",
        "batch": 1000,
        "model": "Dlrm",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "rank": rank,
        "steps": steps,
    }


def point(step: int, rank: int) -> dict[str, Any]:
    """Totals by that step; rank 1 spends 2 ms more of each step in the network than rank 0."""
    loss = 0.5 * step + 20 * (1 - math.exp(-step / 100))
    now = 0.5 + 0.2 * math.exp(-step / 100)
    return {
        "steps": step,
        "loss": loss,
        "finite": step,
        "low": now - 0.05,
        "high": now + 0.05,
        "samples": 1000 * step,
        "seconds": 0.02 * step,
        "faults": 0,
        "rows_read": 600 * step,
        "rows_refreshed": 200 * step,
        "rows_written": 600 * step,
        "keys_asked": 800 * step,
        "batches": step,
        "step_ms": STEP_MS * step,
        "compute_ms": COMPUTE_MS * step,
        "hidden_ms": {kind: hidden * step for kind, (hidden, _) in KINDS.items()},
        "exposed_ms": {
            "idle": IDLE_MS * step,
            **{kind: exposed * step for kind, (_, exposed) in KINDS.items()},
        },
        "lane_ms": {"compute": COMPUTE_MS * step, "net": (6.0 + 2.0 * rank) * step},
        "counters": {
            "bytes_sent": 5000 * step,
            "keys_shared": 200 * step,
            "keys_compared": 800 * step,
        },
        "tables": {"items": 10 * step, "users": 4 * step},
    }


def spans(step: int) -> list[list[Any]]:
    """Three batches of a few ops each."""
    found: list[list[Any]] = []
    for n in range(3):
        start = STEP_MS * n
        found += [
            ["retrieve", "host", step + n + 1, None, start, start + 7],
            ["rows", "net", step + n, 0, start, start + 3.5],
            ["dense", "compute", step + n, 0, start + 3.5, start + 14],
            ["update", "compute", step + n, None, start + 14, start + STEP_MS],
        ]
    return found


def written_run(
    folder: Path, steps: int, *, ranks: int = 1, every: int = 1, end: str | None = "finished"
) -> Path:
    """A run with a point after every so many steps; `end`: how it ended, None: it goes on."""
    for rank in range(ranks):
        writer = RecordWriter(file_of(folder / FOLDER, rank), about(rank, ranks, steps))
        for step in range(every, steps + 1, every):
            writer.add("point", step, point(step, rank))
            if step % max(1, steps // 8) == 0:
                writer.add("lanes", step, {"ms": 3 * STEP_MS, "spans": spans(step)})
                metrics = {"loss": 0.55, "auc": 0.7 + 0.1 * step / steps, "train_auc": 0.75}
                writer.add("evaluation", step, {"split": "validation", "metrics": metrics})
        if end is not None:
            failed = "the loss of step 7 is nan; lower the learning rates"
            sentence = failed if end == "failed" else ""
            writer.add("end", steps, {"status": end, "sentence": sentence})
    return folder
