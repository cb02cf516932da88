"""What the others are told of a move: signals into their rings, bells to ring, events in the journal.

All of it is news, none of it truth: every listener looks at the tables again. Signals and events are written under the
lock; bells are only noted here and rung by the caller once outside (`take_rings`).
"""

from __future__ import annotations

from .journal import EventKind
from .layout import Entry, Header, Peer, Wait
from .peers import WaitKind
from .signals import SignalKind
from .tables import Tables

Ring = tuple[int, int, int]
"""wait kind, key family (0: any), peer (-1: any)"""


class News:
    def __init__(self, tables: Tables):
        self._tables, self._words = tables, tables.words
        self._rings: list[Ring] = []
        self.sender = 0

    def take_rings(self) -> list[Ring]:
        """Whom to ring, once outside the lock."""
        rings, self._rings = self._rings, []
        return rings

    def ready(self, family: int) -> None:
        """An entry became READY; `family` 0 tells all who wait for an entry."""
        self._words[Header.ready_count] += 1
        self._announce(WaitKind.ENTRY, SignalKind.READY, family)

    def room(self) -> None:
        """Bytes became free."""
        self._announce(WaitKind.ROOM, SignalKind.ROOM, 0)

    def left(self, peer: int) -> None:
        """A peer closed its handle or died: waiters of any kind look again."""
        for other in self._tables.peers.attached():
            if other != peer:
                self._tables.signals.post(other, SignalKind.CLOSED, peer, value=peer)
                self._note(WaitKind.SIGNAL, 0, other)
        self._note(WaitKind.ENTRY, 0, -1)
        self._note(WaitKind.ROOM, 0, -1)

    def ring(self, wait: WaitKind, peer: int) -> None:
        """Have a peer's waiting threads of this kind look again."""
        self._note(wait, 0, peer)

    def tell_producer(self, slot: int, kind: SignalKind) -> None:
        """Tell the producer of an entry what became of it, if it is still attached."""
        words, at = self._words, self._tables.entries.at(slot)
        peer, record = words[at + Entry.peer], self._tables.peers.at(words[at + Entry.peer])
        if words[record] and words[record + Peer.generation] == words[at + Entry.peer_generation]:
            self._tables.signals.post(peer, kind, self.sender, words[at + Entry.sequence], slot)
            self._note(WaitKind.SIGNAL, 0, peer)

    def log(self, kind: EventKind, slot: int) -> None:
        """Put an event of an entry into the journal."""
        words, at = self._words, self._tables.entries.at(slot)
        self._tables.journal.write(
            kind, self.sender, sequence=words[at + Entry.sequence], slot=slot,
            generation=words[at + Entry.generation], fingerprint=words[at + Entry.fingerprint],
            n_tokens=(words[at + Entry.key_bytes] - words[at + Entry.token_start]) // 4)

    def log_of(self, kind: EventKind, peer: int) -> None:
        """Put an event of a peer into the journal."""
        self._tables.journal.write(kind, peer)

    def _announce(self, wait: WaitKind, signal: SignalKind, family: int) -> None:
        words, waits = self._words, self._tables.waits.waiting(wait)
        for at in waits:
            if not family or words[at + Wait.family] in (0, family):
                self._tables.signals.post(words[at + Wait.peer], signal, self.sender)
                self._note(WaitKind.SIGNAL, 0, words[at + Wait.peer])
        if waits:
            self._note(wait, family, -1)

    def _note(self, *ring: int) -> None:
        if ring not in self._rings:
            self._rings.append(ring)
