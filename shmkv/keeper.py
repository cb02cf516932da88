"""A thread that waits for devices where nobody else may: it ends leases when the consumer's device work is done, and
lets go of regions whose owner is gone.

A lease often ends in a finaliser, which must not wait. It only puts the lease's streams and what is to be done after
them into a queue; recording the event later than the last use of the bytes makes the wait longer, never wrong. Jobs
are looked at in turn, so that a stuck stream holds up nobody else's lease.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from .segment import log

LOOK_EVERY_S = 0.25
_PAUSE_S, _PAUSE_MOST_S = 0.0001, 0.005
Work = set[tuple[int, int]]
"""(device ordinal, stream)"""


class Keeper:
    """`begin` marks some device work, `is_done` asks whether what was marked is done; `look` is called four times a
    second while `watched` says that there is something to look after.
    """

    def __init__(self, begin: Callable[[Work], Any], is_done: Callable[[Any], bool], look: Callable[[], None],
                 watched: Callable[[], bool]):
        self._begin, self._is_done, self._look, self._watched = begin, is_done, look, watched
        self._jobs: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._pending: list[tuple[Any, Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._run, name="shmkv-keeper", daemon=True)
        self._thread.start()

    def drain(self, work: Work, then: Callable[[], None]) -> None:
        """Call `then` once this work is done; to be called from anywhere, finalisers included."""
        self._jobs.put((work, then))

    def wake(self) -> None:
        """Look now."""
        self._jobs.put((set(), _nothing))

    def stop(self) -> None:
        """End when all that was asked for is done."""
        self._jobs.put(None)

    def _run(self) -> None:
        pause, looked, stopping = _PAUSE_S, 0.0, False
        while not stopping or self._pending:
            timeout = pause if self._pending else LOOK_EVERY_S if self._watched() else None
            woken = False
            try:
                job = self._jobs.get(timeout=timeout)
                woken = True
                if job is None:
                    stopping = True
                else:
                    self._start(*job)
                job = None  # it keeps the lease's objects
            except queue.Empty:
                pass
            pause = _PAUSE_S if self._finish_some() else min(2 * pause, _PAUSE_MOST_S)
            if not stopping and (woken or time.monotonic() - looked >= LOOK_EVERY_S):
                looked = time.monotonic()
                _safely(self._look)

    def _start(self, work: Work, then: Callable[[], None]) -> None:
        mark = _safely(functools.partial(self._begin, work)) if work else None
        if mark is None:
            _safely(then)
        else:
            self._pending.append((mark, then))

    def _finish_some(self) -> bool:
        """End the jobs whose work is done; whether there were any."""
        done = [job for job in self._pending if _safely(functools.partial(self._is_done, job[0])) is not False]
        if done:
            self._pending = [job for job in self._pending if job not in done]
        for _, then in done:
            _safely(then)
        return bool(done)


def _safely(step: Callable[[], Any]) -> Any:
    """A lost device, or bytes of no sense, must not keep leases for ever."""
    try:
        return step()
    except Exception as error:
        log.debug("while waiting for a device: %s: %s", type(error).__name__, error)
        return None


def _nothing() -> None:
    return None
