"""Where a rank is, over all its networks: in which collective, after which, or broken by which."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nestpipe.comm.peer_failure import LostPeers
from nestpipe.errors import RunError

CULPRIT_FIRST_S = 1.0
"""A survivor ends this much later, so that the launcher sees and reports who failed first."""


class CollectiveState:
    """What the communicators of one process share, of all ranks and of parts of them.

    When a collective of one has failed, the others start none.
    """

    def __init__(self, rank: int, lost: LostPeers) -> None:
        self.rank = rank
        self.op_label = OpLabel()
        self._lost = lost
        self._inside: dict[int, str] = {}
        """The collective that this rank is in, by thread: each network may have one."""
        self._last = "any collective"
        self._broken: str | None = None

    @contextmanager
    def inside(self, collective: str, members: Sequence[int]) -> Iterator[None]:
        """Turn what the backend says about lost peers and timeouts into one sentence.

        `members` are the ranks that take part, by their numbers in the world.
        """
        call = self.op_label.name(collective)
        if self._broken is not None:
            raise RunError(f"rank {self.rank} cannot start {call} after it failed: {self._broken}")
        thread = threading.get_ident()
        self._inside[thread] = self._last = call
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            sentence = self._lost.explain(call, error, members)
            # What another thread has seen fail first is what others are told.
            self._broken = self._broken or sentence
            time.sleep(CULPRIT_FIRST_S)
            raise RunError(sentence) from error
        finally:
            self._inside.pop(thread, None)

    def sentence(self) -> str:
        """Which collective this rank is in, was in last, or failed in."""
        if self._broken is not None:
            return self._broken
        inside = " and ".join(list(self._inside.values()))
        where = f"was in {inside}" if inside else f"had left {self._last}"
        return f"rank {self.rank} {where}"


# The name of the work that a collective serves, so that a failure can say it.


class OpLabel:
    """What a rank is doing on the network: `with op_label("rows 3.1"): ...`.

    Each thread that issues collectives has a name of its own.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def what(self) -> str:
        return getattr(self._of_thread, "what", "")

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Name the collectives inside; the name before comes back afterwards."""
        before, self._of_thread.what = self.what, what
        try:
            yield
        finally:
            self._of_thread.what = before

    def name(self, collective: str) -> str:
        """A collective as messages call it: `rows 3.1` (all_to_all)."""
        return f"`{self.what}` ({collective})" if self.what else f"`{collective}`"
