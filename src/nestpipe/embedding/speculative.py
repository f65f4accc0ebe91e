"""The two messages about rows that are sent early: which of them come again, and those rows.

Both are collectives; the rows that came early are in `flight.received[0]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.batch_state import InFlight
from nestpipe.embedding.routing.all_to_all import exchange
from nestpipe.embedding.stale_mask import Again, make_again, packed, packed_sizes
from nestpipe.kernels.rows.segments import Rows, empty_rows, sum_bags

# Shapes: P rows that came early, n those of them that come again, D weights


def exchange_marks(comm: Communicator, flight: InFlight, device: torch.device) -> list[Again]:
    """Owners tell which rows of the first micro-batch they will send again, group by group."""
    rank = comm.rank
    marks = [working.marks_P for working in flight.working if working.marks_P is not None]
    served = [working.marked for working in flight.working if working.marked is not None]
    served_counts = [working.serve_counts[0] for working in flight.working]
    counts = [of[0].rows_per_owner for of in flight.requests]
    sizes = [packed_sizes(of) for of in counts]
    told = [torch.empty(sum(of) - of[rank], dtype=torch.int64) for of in sizes]
    exchange(
        comm,
        [packed(of_group, of, rank) for of_group, of in zip(marks, served_counts, strict=True)],
        [packed_sizes(of) for of in served_counts],
        told,
        sizes,
    )
    return [
        make_again(*group, rank, device)
        for group in zip(served, marks, served_counts, told, counts, strict=True)
    ]


def send_again(
    comm: Communicator, flight: InFlight, weights: Sequence[Rows], wire: torch.dtype
) -> None:
    """Send those rows, refreshed by now, and put what comes in the place of what came early."""
    sent, came = zip(
        *(
            _gathered(rows, again, received_PD, comm.rank, wire)
            for rows, again, received_PD in zip(
                weights, flight.again, flight.received[0], strict=True
            )
        ),
        strict=True,
    )
    exchange(
        comm,
        sent,
        [again.served_counts for again in flight.again],
        [
            came_nD[: len(came_nD) - again.counts[comm.rank]]
            for came_nD, again in zip(came, flight.again, strict=True)
        ],
        [again.counts for again in flight.again],
        wire,
    )
    for received_PD, came_nD, again in zip(flight.received[0], came, flight.again, strict=True):
        received_PD.index_copy_(0, again.places_n, came_nD)


def _gathered(
    rows: Rows, again: Again, received_PD: Tensor, rank: int, wire: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What goes to other ranks, and room for what comes, with this rank's own rows at its end."""
    own, dim, device = again.served_counts[rank], received_PD.shape[1], received_PD.device
    sent_nD = empty_rows(sum(again.served_counts) - own, dim, device, wire)
    came_nD = empty_rows(len(again.places_n), dim, device)
    own_nD = came_nD[len(came_nD) - own :]
    sum_bags(again.served, rows, [sent_nD, own_nD], leaving=wire)
    return sent_nD, came_nD
