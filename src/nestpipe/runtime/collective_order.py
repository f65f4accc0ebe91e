"""One order for all collectives of the devices, whichever thread starts them.

Rows and row gradients are started by the thread of the `net` lane, sums of dense gradients by the
backward pass of a batch's last `dense`. Each has a network of its own, so on the device both may
run at a time. But a rank that starts them in another order than its peers can hang with them:
whatever keeps it from starting the second (the driver loads a kernel, which waits for those that
run; two streams share a queue; one thread holds what the other needs) lasts until the first has
ended, and that waits for a peer with whom it is the other way round.
"""

from __future__ import annotations

from nestpipe.schedule import Kind, Lane, Op, Shape


class CollectiveOrder:
    """The order of issue, as far as it concerns collectives of the devices."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._last: Op | None = None
        self._last_sums: Op | None = None

    def behind(self, op: Op) -> Op | None:
        """The op that must have started its collectives before this one may start its own.

        To be asked for every op, in the order of issue. None where it starts none, or where the
        order of its lane says enough.
        """
        if self._starts_sums(op):
            behind, self._last_sums = self._last, op
            return behind
        if self._shape.lane(op.kind) is Lane.NET:
            self._last = op
            return self._last_sums
        return None

    def _starts_sums(self, op: Op) -> bool:
        last = op.kind is Kind.DENSE and op.micro == self._shape.micro_batches - 1
        return last and self._shape.separate_dense_group
