"""A thread that waits for devices where nobody else may: it ends leases when the consumer's device work is done, and
lets go of regions whose owner is gone.

A lease often ends in a finaliser, which must not wait. It only puts the lease's streams and what is to be done after
them into a queue; recording the event later than the last use of the bytes makes the wait longer, never wrong.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable

from .errors import ShmkvError
from .segment import log

LOOK_EVERY_S = 0.25
Work = set[tuple[int, int]]
"""(device ordinal, stream)"""


class Keeper:
    """`finish` returns when the devices have done some work; `look` is called four times a second while `watched`
    says that there is something to look after.
    """

    def __init__(self, finish: Callable[[Work], None], look: Callable[[], None], watched: Callable[[], bool]):
        self._finish, self._look, self._watched = finish, look, watched
        self._jobs: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shmkv-keeper", daemon=True)
        self._thread.start()

    def drain(self, work: Work, then: Callable[[], None]) -> None:
        """Call `then` once this work is done; to be called from anywhere, finalisers included."""
        self._jobs.put((work, then))

    def wake(self) -> None:
        """Look now."""
        self._jobs.put((set(), _nothing))

    def stop(self) -> None:
        """End after what is queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=LOOK_EVERY_S if self._watched() else None)
            except queue.Empty:
                job = set(), _nothing
            if job is None:
                return
            work, then = job
            for step in (functools.partial(self._finish, work), then, self._look):
                try:
                    step()
                except ShmkvError as error:  # a lost device must not keep leases for ever
                    log.debug("while waiting for a device: %s", error)
            del job, work, then  # they keep the lease's objects


def _nothing() -> None:
    return None
