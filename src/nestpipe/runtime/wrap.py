"""Work around work: the same ops with a name on the network, or slower."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from nestpipe.runtime.lanes import Act, Work
from nestpipe.schedule import LANE_OF, Lane, Op


def name_collectives(work: Work, doing: Callable[[str], AbstractContextManager[None]]) -> Work:
    """Tell the communicator which op its collectives serve: pass `comm.doing`."""

    def named(act: Act) -> Act:
        def call(op: Op) -> None:
            with doing(str(op)):
                act(op)

        return call

    return {k: named(act) if LANE_OF[k] is Lane.NET else act for k, act in work.items()}


def inject_delays(work: Work, *, seed: int, max_ms: float) -> Work:
    """A tool for tests: every op takes up to `max_ms` longer, by chance.

    The delay of an op is a function of the seed and its name, whatever thread runs it.
    """

    def delayed(act: Act) -> Act:
        def call(op: Op) -> None:
            time.sleep(random.Random(f"{seed} {op}").random() * max_ms / 1e3)
            act(op)

        return call

    return {kind: delayed(act) for kind, act in work.items()}
