"""What: a ring of signals for each peer: hints of what happened to its entries, from many writers to one reader.

Map: `ring` records of 64 bytes a peer; head, tail and the count of lost ones stand in the peer's record. Positions
are endless 64-bit counts, a record's place is the count modulo the ring's size, and its `ticket` is the count + 1.

States: a record is written under the segment's lock, then the head moves; the reader reads up to the head, then the
tail moves.

Guarantees: signals of one peer are read in the order in which they were posted, each at most once. A full ring loses
the newest signal, never an older one, and counts it: truth is in the tables, a signal is only news of it.

Not guaranteed: delivery.

If a party dies here: a writer before the head moved has written nothing that is seen; a reader before the tail moved
reads again; a dead peer's ring is emptied by the next claim of its record.

Sync points: signal-posted, signal-read.

Why not a pipe or socket: it would hold the news in a process; these bytes can be read when everyone is dead.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import NamedTuple

from .errors import SegmentBroken
from .layout import Counter, Peer
from .layout import Signal as Record
from .segment import Segment


class SignalKind(IntEnum):
    READY = 1
    """an entry this peer waits for may be there"""
    ROOM = 2
    """room was made while this peer waited for it"""
    TAKEN = 3
    """a consumer drop-selected the entry"""
    RELEASED = 4
    """the entry is gone and its bytes are free again"""
    CANCELLED = 5
    """somebody cancelled the entry"""
    CLOSED = 6
    """a peer closed its handle or died; `value` is its record's index"""


class Signal(NamedTuple):
    """News of one event. `sequence` is what insert() returned for the entry, 0 for READY, ROOM and CLOSED; `sender` is
    the index of the peer whose doing it is; `value`: for CLOSED the index of the peer that is gone, else 0.
    """

    kind: SignalKind
    sequence: int
    slot: int
    sender: int
    value: int
    time_ns: int


_ENDLESS = 1 << 64
_KINDS = frozenset(SignalKind)


class Signals:
    """The rings of all peers."""

    def __init__(self, segment: Segment):
        layout = segment.layout
        self._words, self._size = segment.words, layout.geometry.ring
        self._first, self._peers = layout.signals.word, layout.peers
        self._dropped = layout.counters.word + Counter.signals_dropped
        self._posted = layout.counters.word + Counter.signals

    def post(self, peer: int, kind: SignalKind, sender: int, sequence: int = 0, slot: int = 0, value: int = 0) -> bool:
        """Write a signal into a peer's ring, under the lock; False if the ring is full."""
        words, at = self._words, self._peer_at(peer)
        head = words[at + Peer.ring_head]
        if (head - words[at + Peer.ring_tail]) % _ENDLESS >= self._size:
            words[at + Peer.ring_dropped] += 1
            words[self._dropped] += 1
            return False
        record = self._record_at(peer, head)
        words[record + Record.kind], words[record + Record.sender] = kind, sender
        words[record + Record.sequence], words[record + Record.slot] = sequence, slot
        words[record + Record.value], words[record + Record.time_ns] = value, time.monotonic_ns()
        words[record + Record.ticket] = (head + 1) % _ENDLESS
        words[at + Peer.ring_head] = (head + 1) % _ENDLESS  # SYNC POINT signal-posted (store)
        words[self._posted] += 1
        return True

    def read(self, peer: int) -> list[Signal]:
        """Take all signals out of the ring; only by the peer itself, one thread at a time."""
        words, at = self._words, self._peer_at(peer)
        head = words[at + Peer.ring_head]  # SYNC POINT signal-posted (load)
        unread = min(self._size, (head - words[at + Peer.ring_tail]) % _ENDLESS)
        found = [self._signal(self._record_at(peer, head - back)) for back in range(unread, 0, -1)]
        words[at + Peer.ring_tail] = head  # SYNC POINT signal-read (store)
        return found

    def pending(self, peer: int) -> int:
        at = self._peer_at(peer)
        tail = self._words[at + Peer.ring_tail]  # SYNC POINT signal-read (load)
        return (self._words[at + Peer.ring_head] - tail) % _ENDLESS

    def _signal(self, record: int) -> Signal:
        words = self._words
        if words[record + Record.kind] not in _KINDS:
            raise SegmentBroken(f"a signal of kind {words[record + Record.kind]}")
        return Signal(SignalKind(words[record + Record.kind]), words[record + Record.sequence],
                      words[record + Record.slot], words[record + Record.sender], words[record + Record.value],
                      words[record + Record.time_ns])

    def _peer_at(self, peer: int) -> int:
        return self._peers.word + peer * self._peers.stride

    def _record_at(self, peer: int, count: int) -> int:
        return self._first + (peer * self._size + count % self._size) * Record.words
