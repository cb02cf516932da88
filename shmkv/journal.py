"""The last events of a segment (kind, time, entry, actor), for `explain` and post-mortem.

A ring written under the lock; a record's `ticket` is zeroed first and stored last, so a reader without the lock
knows a torn or overwritten record. Nothing depends on it: it is never repaired.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from .layout import Event as Record
from .layout import Header
from .segment import Segment


class EventKind(IntEnum):
    READY = 1
    TAKEN = 2
    CONSUMED = 3
    RETURNED = 4
    EVICTED = 5
    EXPIRED = 6
    CANCELLED = 7
    ABORTED = 8
    DIED = 9
    RECOVERED = 10
    LOST = 11


class Event(NamedTuple):
    """One event; `fingerprint` is a hint of the key, `time_ns` is monotonic."""

    ticket: int
    kind: EventKind
    time_ns: int
    sequence: int
    slot: int
    generation: int
    peer: int
    pid: int
    fingerprint: int
    n_tokens: int


class Journal:
    def __init__(self, segment: Segment):
        self._words, self._area = segment.words, segment.layout.journal

    def write(self, kind: EventKind, peer: int, *, sequence: int = 0, slot: int = 0, generation: int = 0,
              fingerprint: int = 0, n_tokens: int = 0) -> None:
        """Add an event, under the lock."""
        words = self._words
        ticket = words[Header.journal_next]
        at = self._area.word + ticket % self._area.count * self._area.stride
        words[at + Record.ticket] = 0
        words[at + Record.kind], words[at + Record.time_ns] = kind, time.monotonic_ns()
        words[at + Record.sequence], words[at + Record.slot] = sequence, slot
        words[at + Record.generation], words[at + Record.n_tokens] = generation, n_tokens
        words[at + Record.peer], words[at + Record.pid] = peer, os.getpid()
        words[at + Record.fingerprint] = fingerprint
        words[at + Record.ticket] = ticket + 1
        words[Header.journal_next] = ticket + 1

    def events(self) -> Iterator[Event]:
        """The events still kept, oldest first."""
        words, last = self._words, self._words[Header.journal_next]
        for ticket in range(max(0, last - self._area.count), last):
            at = self._area.word + ticket % self._area.count * self._area.stride
            values = words[at:at + len(Record.names)].tolist()
            if values[0] == ticket + 1 and values[1] in _KINDS:
                yield Event(values[0], EventKind(values[1]), *values[2:])


_KINDS = frozenset(EventKind)
