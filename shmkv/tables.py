"""All tables of one segment, made of the floor-4 parts; it moves nothing but counters."""

from __future__ import annotations

from .arena import Arena
from .entries import RESERVED, Entries
from .journal import Journal
from .layout import META_UNIT_BYTES, PAGE_BYTES, Area, Header, Lease
from .leases import LeaseKind, Leases
from .peers import Peers, Waits
from .prefix import PrefixOrder
from .segment import Segment
from .signals import Signals


class Tables:
    def __init__(self, segment: Segment):
        layout, words, memory = segment.layout, segment.words, segment.memory
        self.segment, self.layout, self.words, self.memory = segment, layout, words, memory
        self.peers, self.waits = Peers(segment), Waits(segment)
        self.signals, self.journal = Signals(segment), Journal(segment)
        self.entries, self.leases = Entries(segment), Leases(segment)

        def array(area: Area, code: str) -> memoryview:
            return memory[area.at:area.at + area.count * (4 if code == "I" else 8)].cast(code)

        self.arena = Arena(words, Header.arena_holes, array(layout.hole_starts, "Q"), array(layout.hole_lengths, "Q"),
                           layout.arena.nbytes, PAGE_BYTES)
        self.meta = Arena(words, Header.meta_holes, array(layout.meta_hole_starts, "Q"),
                          array(layout.meta_hole_lengths, "Q"), layout.meta.nbytes, META_UNIT_BYTES)
        self.order = PrefixOrder(words, Header.ranked, array(layout.order, "I"), array(layout.parents, "I"), memory,
                                 self.entries.key_span, self.entries.sequence)

    def writing(self) -> list[int]:
        """The RESERVED entries: each is named by a WRITE lease, so the leases in use are all there is to look at."""
        words, leases = self.words, [self.leases.at(index) for index in self.leases.held()]
        slots = {words[at + Lease.slot] for at in leases if words[at + Lease.kind] == LeaseKind.WRITE}
        return [slot for slot in slots if self.entries.state(slot) == RESERVED]

    def has_room(self, run_bytes: int, meta_bytes: int) -> bool:
        """Whether an entry of these sizes could be reserved now."""
        return (self.entries.peek_free() is not None and self.leases.n_free() > 0
                and (not run_bytes or self.arena.fits(run_bytes)) and self.meta.fits(meta_bytes))

    def count(self, counter: int, by: int = 1) -> None:
        """Add to a counter; under the lock."""
        self.words[self.layout.counters.word + counter] += by

    def counter(self, counter: int) -> int:
        return self.words[self.layout.counters.word + counter]
